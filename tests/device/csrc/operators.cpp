// Operators: any CPU kernel as a task of a stream, and what cannot be one.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>

namespace test_device {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

std::mutex counts_mutex;
std::map<std::string, int64_t> host_operators;

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// The arguments with what `replace` returns for each tensor, and with the type of the device
// that a factory is given.
template <class Replace>
Stack replaced(const Stack& arguments, c10::DeviceType type, Replace replace) {
  Stack result;
  for (const IValue& each : arguments) {
    if (each.isTensor()) {
      result.emplace_back(replace(each.toTensor()));
    } else if (each.isDevice()) {
      result.emplace_back(c10::Device(type));
    } else if (each.isTensorList() || each.isOptionalTensorList()) {
      const auto list = each.toList().copy();
      for (size_t n = 0; n < list.size(); n++)
        if (const IValue item = list.get(n); item.isTensor()) list.set(n, replace(item.toTensor()));
      result.emplace_back(list);
    } else {
      result.push_back(each);
    }
  }
  return result;
}

std::vector<Tensor> tensors_of(const Stack& arguments) {
  std::vector<Tensor> found;
  replaced(arguments, TYPE, [&](const Tensor& tensor) {
    if (tensor.defined()) found.push_back(tensor);
    return tensor;
  });
  return found;
}

// What a real device checks as well: one device, and of host tensors only numbers and indices.
int device_of_arguments(
    const std::string& name, const Stack& arguments, const std::vector<Tensor>& tensors) {
  std::optional<c10::Device> found;
  for (const auto& each : arguments)
    if (each.isDevice() && each.toDevice().has_index()) found = each.toDevice();
  for (const Tensor& each : tensors)
    if (is_here(each) && !found) found = each.device();
  const bool takes_indices = name.find("index") != std::string::npos;
  for (const Tensor& each : tensors)
    TORCH_CHECK(
        is_here(each) ? *found == each.device() : each.dim() == 0 || takes_indices,
        "Expected all tensors to be on the same device, got one on ", each.device(), " in ", name);
  return found ? found->index() : current_device();
}

// Results as meta tensors. Nothing where torch cannot tell their shapes without the data, or
// where the call is wrong, which the call on the host then says.
std::optional<Stack> shapes_of(const c10::OperatorHandle& op, const Stack& arguments) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  Stack shapes = replaced(arguments, c10::kMeta, [](const Tensor& tensor) {
    if (!is_here(tensor)) return tensor; // numbers stay where torch can read them
    return Tensor(at::detail::empty_strided_meta(
        tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  });
  try {
    op.callBoxedForDispatchKey(c10::DispatchKey::Meta, shapes);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (auto& each : shapes) {
    if (each.isNone()) each = Tensor();
    if (!each.isTensor()) return std::nullopt;
  }
  return shapes;
}

// The argument that the call writes and returns as its result `r`; none if that is new.
Tensor written_argument(const c10::FunctionSchema& schema, const Stack& arguments, size_t r) {
  const auto* alias = schema.returns()[r].alias_info();
  if (!alias) return {};
  TORCH_CHECK_NOT_IMPLEMENTED(
      alias->isWrite(), "test device: no view of this kind: ", schema.name());
  for (size_t a = 0; a < arguments.size(); a++) {
    const auto* written = schema.arguments()[a].alias_info();
    if (written && *written == *alias) return arguments[a].toTensor();
  }
  return {};
}

// The tensors that the call returns, as yet without their values, or nothing where it has to
// run on the host.
std::optional<std::vector<Tensor>> results_of(
    const c10::OperatorHandle& op, const Stack& arguments, int device) {
  std::vector<Tensor> results;
  bool are_complete = true; // then torch has checked the shapes, or the kernel will
  for (size_t r = 0; r < op.schema().returns().size(); r++) {
    results.push_back(written_argument(op.schema(), arguments, r));
    are_complete &= results[r].defined() && results[r].numel() > 0;
  }
  if (are_complete) return results;
  const auto shapes = shapes_of(op, arguments);
  if (!shapes) return std::nullopt;
  for (size_t r = 0; r < results.size(); r++) {
    const Tensor shape = (*shapes)[r].toTensor();
    if (!shape.defined()) continue;
    if (!results[r].defined())
      results[r] = at::empty_strided(
          shape.sizes(), shape.strides(), shape.options().device(TYPE, device));
    else if (results[r].sizes() != shape.sizes())
      results[r].resize_(shape.sizes());
  }
  return results;
}

// Waits for the stream, and calls the CPU's kernel on copies of the arguments.
void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  {
    std::lock_guard<std::mutex> lock(counts_mutex);
    host_operators[op.schema().name()]++;
  }
  at::native::cpu_fallback(op, stack);
}

// Runs an operator that draws, with a CPU generator in the place of the device's: on the host,
// as the state changes when the call is made, on every device. False if it does not draw.
bool draw(const c10::OperatorHandle& op, Stack* stack, int device) {
  const auto optional = c10::OptionalType::create(c10::GeneratorType::get());
  const auto& arguments = op.schema().arguments();
  const auto found = std::find_if(arguments.begin(), arguments.end(), [&](const auto& each) {
    return each.real_type()->isSubtypeOf(*optional);
  });
  if (found == arguments.end()) return false;
  IValue& value = *(stack->end() - (arguments.end() - found));
  at::Generator own = value.isGenerator() ? value.toGenerator() : default_generator(device);
  at::Generator draws = at::detail::createCPUGenerator();
  draws.set_state(own.get_state());
  value = draws;
  run_on_host(op, stack);
  own.set_state(draws.get_state());
  return true;
}

// An argument as the stream's thread takes it.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (is_here(tensor)) return host_view(tensor);
  Tensor copy = tensor.clone(); // the caller may change it after the call
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// Runs any operator: as a task of the current stream where torch knows the shapes of its
// results, else on the host.
void run(const c10::OperatorHandle& op, Stack* stack) {
  const Stack arguments(stack->end() - op.schema().arguments().size(), stack->end());
  const auto tensors = tensors_of(arguments);
  const int device = device_of_arguments(op.schema().name(), arguments, tensors);
  const c10::DeviceGuard guard(stream_of(device, 0).device());
  if (draw(op, stack, device)) return;
  const auto results = results_of(op, arguments, device);
  if (!results) return run_on_host(op, stack);
  torch::jit::drop(*stack, arguments.size());
  int64_t elements = 0;
  for (const Tensor& each : tensors) elements += each.numel();
  std::vector<Tensor> fresh; // where new results go
  for (size_t r = 0; r < results->size(); r++) {
    const auto& result = (*results)[r];
    const bool is_new = result.defined() && !op.schema().returns()[r].alias_info();
    fresh.push_back(is_new ? host_view(result) : Tensor());
    if (is_new) elements += result.numel();
    stack->emplace_back(result);
  }
  auto call = [op, host = replaced(arguments, c10::kCPU, on_host), fresh]() mutable {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(host);
    for (size_t r = 0; r < fresh.size(); r++) {
      if (!fresh[r].defined()) continue;
      const Tensor made = host[r].toTensor();
      if (made.numel() == 0) continue; // the CPU saves no statistics in evaluation
      TORCH_CHECK_NOT_IMPLEMENTED(
          made.sizes() == fresh[r].sizes(), "test device: the CPU's ", op.schema().name(),
          " returned the shape ", made.sizes(), ", torch foresaw ", fresh[r].sizes());
      fresh[r].copy_(made);
    }
  };
  launch(current_stream(device), elements, std::move(call));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}
// Without these, torch asks for kernels of the device's own, or calls the CPU's kernels of
// losses with a result that they enlarge for a while, which a view of device memory cannot be.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name :
       {"convolution", "convolution_backward", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

} // namespace

std::map<std::string, int64_t> host_operator_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return host_operators;
}

} // namespace test_device
