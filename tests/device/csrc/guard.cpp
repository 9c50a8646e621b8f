// What torch asks an accelerator: device, streams, events, generators, hooks.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace test_device {
namespace {

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

c10::Device device_of(int index) {
  return {TYPE, static_cast<c10::DeviceIndex>(index)};
}

// An event is the mark of its last record, on the heap; torch holds the pointer.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device getDevice() const override {
    return device_of(current_device());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_of(exchange_device(device.index()));
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings().device_count.load());
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return next_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return next_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(
      const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }

  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex /*device*/,
      const c10::EventFlag /*flag*/) const override {
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) test_device::block(stream, *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override {
    return !event || is_reached(*static_cast<Mark*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait(*static_cast<Mark*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from && to, "test device: both events must be recorded before");
    const auto &start = *static_cast<Mark*>(from), &end = *static_cast<Mark*>(to);
    TORCH_CHECK(
        is_reached(start) && is_reached(end),
        "test device: both events must be complete before their time is read");
    return std::chrono::duration<double, std::milli>(end.get() - start.get()).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Draws as a CPU generator does, so that a seed gives the CPU's numbers.
struct Generator final : public c10::GeneratorImpl {
  explicit Generator(int device, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl(
            device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    return new Generator(device().index(), host.clone());
  }

  at::Generator host;
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(settings().device_count.load());
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(
      const c10::Storage& storage, size_t bytes) const override {
    auto& changed = const_cast<c10::Storage&>(storage);
    const int previous = exchange_device(storage.device().index());
    const auto stream = current_stream(current_device());
    auto data = device_allocator()->allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes()))
      launch(stream, 0, [kept,
                         to = host_pointer(data.get()),
                         from = host_pointer(storage.data())] {
        memcpy(to, from, kept);
      });
    exchange_device(previous);
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
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int d = 0; d < MAX_DEVICES; d++) made->push_back(at::make_generator<Generator>(d));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator host_generator(const at::Generator& generator) {
  return generator.get<Generator>()->host;
}

} // namespace test_device
