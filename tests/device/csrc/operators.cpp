// Operators: any CPU kernel as a task of a stream, and what cannot be one.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>

namespace test_device {
namespace {

using at::Tensor;
using torch::jit::Stack;

std::mutex counts_mutex;
std::map<std::string, int64_t> host_operators;

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// The argument with what `replace` returns for each of its tensors.
template <class Replace>
c10::IValue with_tensors(const c10::IValue& value, Replace replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorList()) list.push_back(replace(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> each : value.toOptionalTensorList())
      list.push_back(each ? std::optional(replace(*each)) : std::nullopt);
    return list;
  }
  return value;
}

// The same for all arguments; `type` also replaces the device that a factory is given.
template <class Replace>
Stack with_tensors(const Stack& arguments, c10::DeviceType type, Replace replace) {
  Stack result;
  for (const auto& each : arguments)
    result.push_back(
        each.isDevice() ? c10::IValue(c10::Device(type)) : with_tensors(each, replace));
  return result;
}

template <class Visit>
void for_tensors(const Stack& arguments, Visit visit) {
  with_tensors(arguments, TYPE, [&](const Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

// What a real device checks as well: one device, and of host tensors only numbers and indices.
int device_of_arguments(const c10::OperatorHandle& op, const Stack& arguments) {
  std::optional<c10::Device> found;
  for (const auto& each : arguments)
    if (each.isDevice() && each.toDevice().has_index()) found = each.toDevice();
  const bool takes_indices = op.schema().name().find("index") != std::string::npos;
  for_tensors(arguments, [&](const Tensor& tensor) {
    if (is_here(tensor) && !found) found = tensor.device();
  });
  for_tensors(arguments, [&](const Tensor& tensor) {
    TORCH_CHECK(
        is_here(tensor) ? *found == tensor.device() : tensor.dim() == 0 || takes_indices,
        "Expected all tensors to be on the same device, got one on ", tensor.device(), " in ",
        op.schema().name());
  });
  return found ? found->index() : current_device();
}

// Results as meta tensors. Nothing where torch cannot tell their shapes without the data, or
// where the call is wrong, which the call on the host then says.
std::optional<Stack> shapes_of(const c10::OperatorHandle& op, const Stack& arguments) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  Stack shapes = with_tensors(arguments, c10::kMeta, [](const Tensor& tensor) {
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
  const size_t count = op.schema().returns().size();
  std::vector<Tensor> results;
  bool are_complete = true; // then torch has checked the shapes, or the kernel will
  for (size_t r = 0; r < count; r++) {
    results.push_back(written_argument(op.schema(), arguments, r));
    are_complete &= results[r].defined() && results[r].numel() > 0;
  }
  if (are_complete) return results;
  const auto shapes = shapes_of(op, arguments);
  if (!shapes) return std::nullopt;
  for (size_t r = 0; r < count; r++) {
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

// Puts the generator that draws for the device's own one into the arguments; true if the
// operator takes one.
bool takes_generator(const c10::FunctionSchema& schema, Stack& arguments, int device) {
  const auto optional = c10::OptionalType::create(c10::GeneratorType::get());
  bool found = false;
  for (size_t a = 0; a < arguments.size(); a++) {
    if (!schema.arguments()[a].real_type()->isSubtypeOf(*optional)) continue;
    found = true;
    auto& value = arguments[a];
    value = host_generator(value.isGenerator() ? value.toGenerator() : default_generator(device));
  }
  return found;
}

// The arguments as the stream's thread takes them.
Stack on_host(const Stack& arguments) {
  return with_tensors(arguments, c10::kCPU, [](const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (is_here(tensor)) return host_view(tensor);
    Tensor copy = tensor.clone(); // the caller may change it after the call
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  });
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
  Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const int device = device_of_arguments(op, arguments);
  const c10::DeviceGuard guard(stream_of(device, 0).device());
  std::optional<std::vector<Tensor>> results;
  // The state of a generator changes when the call is made, on every device.
  if (!takes_generator(op.schema(), arguments, device))
    results = results_of(op, arguments, device);
  if (!results) {
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    return run_on_host(op, stack);
  }
  int64_t elements = 0;
  for_tensors(arguments, [&](const Tensor& each) { elements += each.numel(); });
  std::vector<Tensor> fresh; // where new results go
  for (size_t r = 0; r < results->size(); r++) {
    const auto& result = (*results)[r];
    const bool is_new = result.defined() && !op.schema().returns()[r].alias_info();
    fresh.push_back(is_new ? host_view(result) : Tensor());
    if (is_new) elements += result.numel();
    stack->emplace_back(result);
  }
  auto call = [op, host = on_host(arguments), fresh]() mutable {
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

std::map<std::string, int64_t> host_operator_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return host_operators;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

} // namespace test_device
