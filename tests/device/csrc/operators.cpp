// Operators: any CPU kernel as a task of a stream, and what cannot be one.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <map>
#include <mutex>

namespace test_device {
namespace {

using torch::jit::Stack;

std::mutex counts_mutex;
std::map<std::string, int64_t> host_operators;

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TYPE;
}

// Calls `replace` for each tensor of an argument and returns the argument with what it
// returned.
template <class Replace>
c10::IValue with_tensors(const c10::IValue& value, Replace replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorList()) list.push_back(replace(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> each : value.toOptionalTensorList())
      list.push_back(each ? std::optional(replace(*each)) : std::nullopt);
    return list;
  }
  return value;
}

// The arguments with their tensors replaced, and the device that a factory names.
template <class Replace>
Stack with_tensors(const Stack& arguments, c10::DeviceType factory, Replace replace) {
  Stack result;
  for (const auto& each : arguments)
    result.push_back(
        each.isDevice() ? c10::IValue(c10::Device(factory))
                        : with_tensors(each, replace));
  return result;
}

template <class Visit>
void for_tensors(const Stack& arguments, Visit visit) {
  for (const auto& each : arguments)
    with_tensors(each, [&](const at::Tensor& tensor) {
      visit(tensor);
      return tensor;
    });
}

// What a real device checks as well: one device, and host tensors only as numbers.
int device_of_arguments(const c10::OperatorHandle& op, const Stack& arguments) {
  std::optional<c10::Device> found;
  for (const auto& each : arguments)
    if (each.isDevice()) found = each.toDevice();
  for_tensors(arguments, [&](const at::Tensor& tensor) {
    if (is_here(tensor) && !found) found = tensor.device();
  });
  // Indices may lie on the host, as CUDA permits.
  const bool takes_host_indices = op.schema().name().find("index") != std::string::npos;
  for_tensors(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (found && tensor.device() == *found)) return;
    TORCH_CHECK(
        tensor.is_cpu() && (tensor.dim() == 0 || takes_host_indices),
        "Expected all tensors to be on the same device, but found at least two, ",
        tensor.device(), " and ", found ? found->str() : "none", ", in ",
        op.schema().name());
  });
  return found && found->has_index() ? found->index() : current_device();
}

// A number of Python's promotes no dtypes, and remains one when it is copied.
at::Tensor as_number(at::Tensor copy, const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const at::Tensor meta = at::detail::empty_strided_meta(
      tensor.sizes(), tensor.strides(), tensor.scalar_type());
  return as_number(meta, tensor);
}

// Results as meta tensors. Nothing where torch cannot tell their shapes without the
// data, or where the call is wrong, which the call on the host then says.
std::optional<Stack> shapes_of(const c10::OperatorHandle& op, Stack meta) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  try {
    op.callBoxedForDispatchKey(c10::DispatchKey::Meta, meta);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return meta;
}

// The tensors that the call returns: an argument that it writes, or a new one.
std::vector<at::Tensor> results_of(
    const c10::FunctionSchema& schema,
    const Stack& arguments,
    const Stack& shapes,
    int device) {
  std::vector<at::Tensor> results;
  for (size_t r = 0; r < shapes.size(); r++) {
    const auto* alias = schema.returns()[r].alias_info();
    const at::Tensor shape = shapes[r].toTensor();
    at::Tensor result;
    if (alias) {
      for (size_t a = 0; a < arguments.size(); a++) {
        const auto* written = schema.arguments()[a].alias_info();
        if (written && written->isWrite() && *written == *alias)
          result = arguments[a].toTensor();
      }
      if (result.sizes() != shape.sizes()) result.resize_(shape.sizes());
    } else if (shape.defined()) {
      result = at::empty_strided(
          shape.sizes(), shape.strides(), shape.options().device(TYPE, device));
    }
    results.push_back(result);
  }
  return results;
}

bool returns_tensors_only(const Stack& shapes) {
  for (const auto& each : shapes)
    if (!each.isTensor()) return false;
  return true;
}

// Waits for the stream, and calls the CPU's kernel on copies of the arguments.
void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  {
    std::lock_guard<std::mutex> lock(counts_mutex);
    host_operators[op.schema().name()]++;
  }
  at::native::cpu_fallback(op, stack);
}

} // namespace

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const Stack arguments(stack->end() - count, stack->end());
  const int device = device_of_arguments(op, arguments);
  const c10::DeviceGuard guard(stream_of(device, 0).device());
  bool is_random = false;
  for (size_t a = 0; a < count; a++) {
    const auto& type = *schema.arguments()[a].real_type();
    if (!type.isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) continue;
    is_random = true;
    const auto& value = arguments[a];
    (*stack)[stack->size() - count + a] = host_generator(
        value.isGenerator() ? value.toGenerator() : default_generator(device));
  }
  for (const auto& each : schema.returns())
    TORCH_CHECK_NOT_IMPLEMENTED(
        !each.alias_info() || each.alias_info()->isWrite(),
        "test device: no view of this kind: ", schema.name());
  // The state of a generator changes when the call is made, on every device.
  std::optional<Stack> shapes;
  Stack meta = with_tensors(arguments, c10::kMeta, on_meta);
  if (!is_random) shapes = shapes_of(op, meta);
  if (!shapes || !returns_tensors_only(*shapes)) return run_on_host(op, stack);
  auto results = results_of(schema, arguments, *shapes, device);

  int64_t elements = 0;
  Stack host = with_tensors(arguments, c10::kCPU, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    elements += tensor.numel();
    if (is_here(tensor)) return host_view(tensor);
    return as_number(tensor.clone(), tensor); // which the caller may change after it
  });
  std::vector<at::Tensor> fresh; // where new results go
  for (size_t r = 0; r < results.size(); r++) {
    const bool is_new = results[r].defined() && !schema.returns()[r].alias_info();
    fresh.push_back(is_new ? host_view(results[r]) : at::Tensor());
    if (is_new) elements += results[r].numel();
  }
  launch(current_stream(device), elements, [op, host, fresh]() mutable {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(host);
    for (size_t r = 0; r < fresh.size(); r++)
      if (fresh[r].defined()) fresh[r].copy_(host[r].toTensor());
  });
  torch::jit::drop(*stack, count);
  for (auto& each : results) stack->emplace_back(std::move(each));
}

std::map<std::string, int64_t> host_operator_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return host_operators;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

} // namespace test_device
