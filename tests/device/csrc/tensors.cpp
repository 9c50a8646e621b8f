// Tensors: making, copying, viewing and resizing them.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace test_device {
namespace {

using at::Tensor;
using c10::IntArrayRef;
template <class T>
using Maybe = std::optional<T>;

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(
    IntArrayRef size, Maybe<at::ScalarType> dtype, Maybe<at::Layout> /*layout*/,
    Maybe<at::Device> device, Maybe<bool> pin, Maybe<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "test device: only host tensors are pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, device_allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, Maybe<at::ScalarType> dtype,
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
  const bool pinned = is_pinned(host.data_ptr(), &stream);
  // A view without an owner: like a real device, a copy keeps no tensor alive.
  const Tensor memory = at::from_blob(
      host.data_ptr(), host.sizes(), host.strides(),
      host.options().requires_grad(false).pinned_memory(false));
  if (to.is_cpu())
    launch_copy(stream, memory, host_view(from));
  else // pageable memory is read before the call returns
    launch_copy(stream, host_view(to), pinned ? memory : from.clone());
  if (!non_blocking || (to.is_cpu() && !pinned)) synchronize(stream);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) { return tensor.cpu().item(); }

const Tensor& resize_(const Tensor& tensor, IntArrayRef size, Maybe<at::MemoryFormat> format) {
  auto* changed = tensor.unsafeGetTensorImpl();
  changed->set_sizes_contiguous(size);
  if (format) changed->empty_tensor_restride(*format);
  const size_t end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size();
  if (end > tensor.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), end);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  const int64_t length = storage.nbytes() / tensor.element_size();
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {length}, {1});
}

void record_stream(Tensor& tensor, at::Stream stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("record_stream", record_stream);
  // Of any device: they touch no memory.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("is_set_to", at::native::is_set_to);
}

// A copy keeps the marks of conjugate and negative tensors, as `host_view` does; torch would
// copy such a tensor to copy it, without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace
} // namespace test_device
