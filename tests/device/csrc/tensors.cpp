// Tensors: making, copying, viewing and resizing them.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace test_device {
namespace {

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "test device: only host tensors are pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(at::kStrided) == at::kStrided,
      "test device: no sparse tensors, got the layout ", *layout);
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, device_allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "test device: only host tensors are pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), KEYS, c10::dtype_or_default(dtype));
}

void launch_copy(
    const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from) {
  launch(stream, to.numel(), [to, from] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  });
}

// As between two CUDA devices: on the source's stream, after what the target's stream
// has been given, and before what it is given later.
void copy_between(const at::Tensor& from, const at::Tensor& to) {
  const auto source = current_stream(from.device().index());
  const auto target = current_stream(to.device().index());
  if (source != target) block(source, mark(target));
  launch_copy(source, host_view(to), host_view(from));
  if (source != target) block(target, mark(source));
}

at::Tensor copy_from(
    const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  const bool is_upload = from.is_cpu(), is_download = to.is_cpu();
  if (!is_upload && !is_download) {
    copy_between(from, to);
    return to;
  }
  const auto& host = is_upload ? from : to;
  const auto stream = current_stream((is_upload ? to : from).device().index());
  const bool pinned = is_pinned(host.data_ptr());
  // A view without an owner: like a real device, a copy keeps no tensor alive.
  auto memory = at::from_blob(
      host.data_ptr(),
      host.sizes(),
      host.strides(),
      host.options().requires_grad(false).pinned_memory(false));
  if (is_download) {
    launch_copy(stream, memory, host_view(from));
  } else { // pageable memory is read before the call returns
    launch_copy(stream, host_view(to), pinned ? memory : from.clone());
  }
  if (pinned) record_pinned(host.data_ptr(), stream);
  const bool returns_early = non_blocking && (is_upload || pinned);
  if (!returns_early) synchronize(stream);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return tensor.cpu().item();
}

at::Tensor as_strided(
    const at::Tensor& tensor,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor,
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional(offset->expect_int()) : std::nullopt);
}

at::Tensor reshape_alias(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(tensor, size, stride, tensor.storage_offset());
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

const at::Tensor& resize_(
    const at::Tensor& tensor,
    c10::SymIntArrayRef size,
    std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage_offset(
    at::Tensor& tensor,
    at::Storage storage,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* changed = tensor.unsafeGetTensorImpl();
  changed->set_storage_keep_dtype(std::move(storage));
  changed->set_storage_offset(offset.expect_int());
  changed->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage_offset(
      tensor,
      source.storage(),
      source.storage_offset(),
      source.sym_sizes(),
      source.sym_strides());
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return set_storage_offset(tensor, std::move(storage), 0, {length}, {1});
}

bool is_set_to(const at::Tensor& one, const at::Tensor& other) {
  return one.storage().data() == other.storage().data() &&
      one.storage_offset() == other.storage_offset() && one.sizes() == other.sizes() &&
      one.strides() == other.strides();
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
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
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_stream);
}

// A copy reads and writes what is conjugate or negative by itself, as `host_view`
// keeps these marks; without this, torch would first copy such a tensor.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace test_device
