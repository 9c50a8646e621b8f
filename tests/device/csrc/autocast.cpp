// Autocast with torch's own lists of operators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
  AT_FORALL_PROMOTE(WIDEST)
}

} // namespace
