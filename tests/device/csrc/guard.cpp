// What torch asks an accelerator: device, streams, events, generators, hooks.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace test_device {
namespace {

using c10::Device, c10::DeviceIndex, c10::Stream;

int index_of(Device device) { return device.has_index() ? device.index() : current_device(); }
Device device_of(int index) { return {TYPE, static_cast<DeviceIndex>(index)}; }

// An event is the mark of its last record, on the heap; torch holds the pointer.
Mark& mark_of(void* event) { return *static_cast<Mark*>(event); }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  Device getDevice() const override { return device_of(current_device()); }
  Device exchangeDevice(Device to) const override { return device_of(exchange_device(to.index())); }
  void setDevice(Device to) const override { exchange_device(to.index()); }
  void uncheckedSetDevice(Device to) const noexcept override { exchange_device(to.index()); }
  DeviceIndex deviceCount() const noexcept override { return settings().device_count; }

  Stream getStream(Device on) const override { return current_stream(index_of(on)); }
  Stream getDefaultStream(Device on) const override { return stream_of(index_of(on), 0); }
  Stream getStreamFromGlobalPool(Device on, bool) const override {
    return next_stream(index_of(on));
  }
  Stream getNewStream(Device on, int) const override { return next_stream(index_of(on)); }
  Stream exchangeStream(Stream to) const override { return exchange_stream(to); }
  bool queryStream(const Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag)
      const override {
    if (!*event) *event = new Mark;
    mark_of(*event) = mark(stream);
  }
  void block(void* event, const Stream& stream) const override {
    if (event) test_device::block(stream, mark_of(event));
  }
  bool queryEvent(void* event) const override { return !event || is_reached(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) wait(mark_of(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  // Torch has checked that both are complete.
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    const auto time = mark_of(to).get() - mark_of(from).get();
    return std::chrono::duration<double, std::milli>(time).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A CPU generator of this device, so that a seed gives the CPU's numbers.
struct Generator final : public at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = device_of(device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->set_state(*get_state());
    return made;
  }
};

struct Generators : std::vector<at::Generator> {
  Generators() {
    for (int device = 0; device < MAX_DEVICES; device++)
      push_back(at::make_generator<Generator>(device));
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return settings().device_count; }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex to) const override { exchange_device(to); }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return exchange_device(to); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchange_device(to); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const int previous = exchange_device(storage.device().index());
    auto data = device_allocator()->allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes())) {
      void *to = host_pointer(data.get()), *from = host_pointer(storage.data());
      launch(current_stream(current_device()), 0, [=] { memcpy(to, from, kept); });
    }
    exchange_device(previous);
    auto& changed = const_cast<c10::Storage&>(storage);
    changed.set_data_ptr_noswap(std::move(data));
    changed.set_nbytes(bytes);
  }
};

} // namespace

void register_hooks() {
  c10::SetAllocator(TYPE, device_allocator(), 1);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

const at::Generator& default_generator(int device) {
  return forever<Generators>().at(device < 0 ? current_device() : device);
}

} // namespace test_device
