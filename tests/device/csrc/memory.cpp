// Device memory that the host cannot touch, its allocator in stream order, pinned memory.
#include "device.h"

#include <ATen/ops/from_blob.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace test_device {
namespace {

using Lock = std::unique_lock<std::mutex>;
using StreamId = std::pair<int, int64_t>; // device, stream
constexpr size_t PAGE = 4096; // blocks are whole pages, so that freed ones can be given back
constexpr int POISON = 0xFF; // NaN in every floating dtype, -1 in integers

// Addresses of a sparse file, each used once and mapped twice.
class Arena {
 public:
  Arena() {
    TORCH_CHECK(file_ >= 0 && ftruncate(file_, SIZE) == 0, "test device: no memfd");
    seen_ = map(PROT_NONE);
    host_ = map(PROT_READ | PROT_WRITE);
  }

  char* take(size_t bytes) {
    TORCH_CHECK(used_ + bytes <= SIZE, "test device: all addresses are used up");
    char* block = seen_ + std::exchange(used_, used_ + bytes);
    memset(host(block), POISON, bytes);
    return block;
  }
  void release(const char* block, size_t bytes) {
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block - seen_, bytes);
  }
  char* host(const void* block) {
    const size_t offset = static_cast<const char*>(block) - seen_; // huge where negative
    TORCH_CHECK(offset < SIZE, "test device: not a pointer into device memory");
    return host_ + offset;
  }

 private:
  static constexpr size_t SIZE = size_t(1) << 40;
  char* map(int protection) {
    void* start = mmap(nullptr, SIZE, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
    TORCH_CHECK(start != MAP_FAILED, "test device: cannot map its memory");
    madvise(start, SIZE, MADV_DONTDUMP); // a core dump would have this size
    return static_cast<char*>(start);
  }

  const int file_ = memfd_create("test-device", MFD_CLOEXEC);
  char *seen_, *host_;
  size_t used_ = 0;
};
Arena& arena() {
  static auto* made = new Arena;
  return *made;
}

struct Block {
  StreamId stream; // that it was allocated on
  size_t bytes; // rounded up
  std::set<int64_t> also{}; // streams that record_stream named
};

// Keeps freed blocks for allocations of the same size on the same stream, as the order of
// tasks in a stream allows. A block's memory is poisoned in that order too.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device where(TYPE, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, where};
    use_in_this_process();
    const Block block{{device, current_stream(device).id()}, (bytes + PAGE - 1) / PAGE * PAGE};
    void* pointer = take(block);
    if (!pointer) { // frees what is cached, and what recorded streams still use
      release_cached(device);
      pointer = take(block);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, pointer, "test device ", device, ": out of memory: tried to allocate ",
        bytes, " bytes, limit ", settings().memory_bytes[device]);
    return {pointer, pointer, raw_deleter(), where};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* pointer) { static_cast<Allocator*>(device_allocator())->free(pointer); };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    synchronize_device(current_device());
    memcpy(host_pointer(to), host_pointer(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    for (int device = 0; device < settings().device_count; device++) release_cached(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(mutex_);
    const auto found = blocks_.find(data.get());
    if (found != blocks_.end() && found->second.stream.second != stream.id())
      found->second.also.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto& usage = usage_.at(device);
    for (auto* each : {&stats.allocated_bytes[0], &stats.active_bytes[0]}) {
      each->current = usage.active;
      each->peak = usage.active_peak;
    }
    stats.reserved_bytes[0].current = usage.reserved;
    stats.reserved_bytes[0].peak = usage.reserved_peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {} // it keeps none
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(mutex_);
    usage_.at(device).active_peak = usage_.at(device).active;
    usage_.at(device).reserved_peak = usage_.at(device).reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(mutex_);
    const size_t total = settings().memory_bytes.at(device);
    return {total - std::min<size_t>(total, usage_.at(device).reserved), total};
  }

 private:
  struct Usage {
    int64_t active = 0, active_peak = 0, reserved = 0, reserved_peak = 0; // bytes
  };

  // A cached block or a new one; nullptr where the device's limit forbids it.
  void* take(const Block& block) {
    Lock lock(mutex_);
    Usage& usage = usage_[block.stream.first];
    auto& cached = cached_[{block.stream, block.bytes}];
    void* pointer = nullptr;
    if (!cached.empty()) {
      pointer = cached.back();
      cached.pop_back();
    } else {
      if (usage.reserved + block.bytes > settings().memory_bytes[block.stream.first])
        return nullptr;
      pointer = arena().take(block.bytes);
      usage.reserved += block.bytes;
      usage.reserved_peak = std::max(usage.reserved_peak, usage.reserved);
    }
    usage.active += block.bytes;
    usage.active_peak = std::max(usage.active_peak, usage.active);
    blocks_.emplace(pointer, block);
    return pointer;
  }

  void free(void* pointer) {
    if (is_in_bad_fork()) return;
    Lock lock(mutex_);
    const Block block = blocks_.extract(pointer).mapped();
    usage_[block.stream.first].active -= block.bytes;
    const auto poison = [pointer, block] { memset(host_pointer(pointer), POISON, block.bytes); };
    const auto [device, own] = block.stream;
    if (block.also.empty()) { // later tasks of its stream run after the poison
      enqueue(stream_of(device, own), poison);
      cached_[{block.stream, block.bytes}].push_back(pointer);
      return;
    }
    // The last of the streams that use it poisons it.
    const std::shared_ptr<void> last(pointer, [this, block, poison](void* freed) {
      poison();
      Lock lock(mutex_);
      cached_[{block.stream, block.bytes}].push_back(freed);
    });
    auto streams = block.also;
    streams.insert(own);
    for (const int64_t id : streams) enqueue(stream_of(device, id), [last] {});
    lock.unlock(); // `last` may end here
  }

  void release_cached(int device) {
    synchronize_device(device);
    Lock lock(mutex_);
    for (auto& [place, pointers] : cached_) {
      if (place.first.first != device) continue;
      for (void* each : pointers) arena().release(static_cast<char*>(each), place.second);
      usage_[device].reserved -= place.second * pointers.size();
      pointers.clear();
    }
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_; // in use
  std::map<std::pair<StreamId, size_t>, std::vector<void*>> cached_;
  std::array<Usage, MAX_DEVICES> usage_;
};

// Page-locked host memory; a block that streams still use is freed when they are done.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::kCPU};
    void* pointer = std::aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
    if (!pointer) throw std::bad_alloc();
    Lock lock(mutex_);
    blocks_.emplace(pointer, Used{bytes, {}});
    return {pointer, pointer, raw_deleter(), c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* pointer) { static_cast<PinnedAllocator*>(pinned_allocator())->free(pointer); };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }

  // Whether the pointer lies in pinned memory; `stream`, if any, uses that from now on.
  bool find(const void* pointer, const c10::Stream* stream) {
    Lock lock(mutex_);
    auto found = blocks_.upper_bound(const_cast<void*>(pointer));
    if (found == blocks_.begin()) return false;
    --found;
    const auto offset = static_cast<const char*>(pointer) - static_cast<char*>(found->first);
    if (static_cast<size_t>(offset) >= found->second.bytes) return false;
    if (stream) found->second.streams.emplace(stream->device_index(), stream->id());
    return true;
  }

 private:
  struct Used {
    size_t bytes;
    std::set<StreamId> streams;
  };

  void free(void* pointer) {
    if (is_in_bad_fork()) return;
    Lock lock(mutex_);
    const auto block = blocks_.extract(pointer);
    const std::shared_ptr<void> last(pointer, std::free);
    for (const auto& [device, id] : block.mapped().streams)
      enqueue(stream_of(device, id), [last] {});
  }

  std::mutex mutex_;
  std::map<void*, Used> blocks_;
};

} // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* made = new Allocator;
  return made;
}
c10::Allocator* pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return made;
}
bool is_pinned(const void* pointer) {
  return static_cast<PinnedAllocator*>(pinned_allocator())->find(pointer, nullptr);
}
void record_pinned(const void* pointer, const c10::Stream& stream) {
  static_cast<PinnedAllocator*>(pinned_allocator())->find(pointer, &stream);
}

void* host_pointer(const void* device_pointer) { return arena().host(device_pointer); }
at::Tensor host_view(const at::Tensor& tensor) {
  auto view = at::from_blob(
      tensor.numel() == 0 ? nullptr : host_pointer(tensor.data_ptr()), tensor.sizes(),
      tensor.strides(), tensor.options().device(c10::kCPU).requires_grad(false));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

} // namespace test_device
