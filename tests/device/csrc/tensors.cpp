// Tensors: making, copying, viewing and resizing them.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace test_device {
namespace {

using at::Tensor;
using c10::SymIntArrayRef;
template <class T>
using Maybe = std::optional<T>;

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(
    c10::IntArrayRef size, Maybe<at::ScalarType> dtype, Maybe<at::Layout> /*layout*/,
    Maybe<at::Device> device, Maybe<bool> pin, Maybe<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "test device: only host tensors are pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, device_allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, Maybe<at::ScalarType> dtype,
    Maybe<at::Layout> /*layout*/, Maybe<at::Device> device, Maybe<bool> /*pin*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), KEYS, c10::dtype_or_default(dtype));
}

void launch_copy(const c10::Stream& stream, const Tensor& to, const Tensor& from) {
  launch(stream, to.numel(), [to, from] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    to.copy_(from);
  });
}

// As between two CUDA devices: on the source's stream, after what the target's stream has been
// given, and before what it is given later.
void copy_between(const Tensor& from, const Tensor& to) {
  const auto source = current_stream(from.device().index());
  const auto target = current_stream(to.device().index());
  if (source != target) block(source, mark(target));
  launch_copy(source, host_view(to), host_view(from));
  if (source != target) block(target, mark(source));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  if (!from.is_cpu() && !to.is_cpu()) {
    copy_between(from, to);
    return to;
  }
  const Tensor &host = from.is_cpu() ? from : to, &here = from.is_cpu() ? to : from;
  const auto stream = current_stream(here.device().index());
  const bool pinned = is_pinned(host.data_ptr());
  // A view without an owner: like a real device, a copy keeps no tensor alive.
  const Tensor memory = at::from_blob(
      host.data_ptr(), host.sizes(), host.strides(),
      host.options().requires_grad(false).pinned_memory(false));
  if (to.is_cpu())
    launch_copy(stream, memory, host_view(from));
  else // pageable memory is read before the call returns
    launch_copy(stream, host_view(to), pinned ? memory : from.clone());
  if (pinned) record_pinned(host.data_ptr(), stream);
  if (!non_blocking || (to.is_cpu() && !pinned)) synchronize(stream);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) { return tensor.cpu().item(); }

Tensor as_strided(
    const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride, Maybe<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? Maybe<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return as_strided(tensor, size, stride, tensor.storage_offset());
}
Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

const Tensor& resize_(const Tensor& tensor, SymIntArrayRef size, Maybe<at::MemoryFormat> format) {
  auto* changed = tensor.unsafeGetTensorImpl();
  changed->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format) changed->empty_tensor_restride(*format);
  const size_t end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size();
  if (end > tensor.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), end);
  return tensor;
}

Tensor& set_at(
    Tensor& tensor, at::Storage storage, c10::SymInt offset, SymIntArrayRef size,
    SymIntArrayRef stride) {
  auto* changed = tensor.unsafeGetTensorImpl();
  changed->set_storage_keep_dtype(std::move(storage));
  changed->set_storage_offset(offset.expect_int());
  changed->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}
Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_at(
      tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}
Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  const int64_t length = storage.nbytes() / tensor.element_size();
  return set_at(tensor, std::move(storage), 0, {length}, {1});
}
bool is_set_to(const Tensor& one, const Tensor& other) {
  return one.storage().data() == other.storage().data() && one.sizes() == other.sizes() &&
      one.storage_offset() == other.storage_offset() && one.strides() == other.strides();
}

void record_stream(Tensor& tensor, at::Stream stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_stream);
}

// A copy keeps the marks of conjugate and negative tensors, as `host_view` does; torch would
// otherwise copy such a tensor to copy it.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace test_device
