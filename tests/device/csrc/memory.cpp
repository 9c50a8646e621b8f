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
size_t in_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Addresses of a sparse file, each used once and mapped twice.
class Arena {
 public:
  char* take(size_t bytes) {
    TORCH_CHECK(used_ + bytes <= SIZE, "test device: all addresses are used up");
    char* block = seen_ + std::exchange(used_, used_ + bytes);
    memset(host(block), POISON, bytes);
    return block;
  }
  void release(const void* block, size_t bytes) {
    const auto offset = static_cast<const char*>(block) - seen_;
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
  }
  char* host(const void* block) {
    const size_t offset = static_cast<const char*>(block) - seen_; // huge where negative
    TORCH_CHECK(offset < SIZE, "test device: not a pointer into device memory");
    return host_ + offset;
  }

 private:
  static constexpr size_t SIZE = size_t(1) << 40;
  char* map(int protection) {
    TORCH_CHECK(file_ >= 0 && ftruncate(file_, SIZE) == 0, "test device: no memfd");
    void* start = mmap(nullptr, SIZE, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
    TORCH_CHECK(start != MAP_FAILED, "test device: cannot map its memory");
    madvise(start, SIZE, MADV_DONTDUMP); // a core dump would have this size
    return static_cast<char*>(start);
  }

  const int file_ = memfd_create("test-device", MFD_CLOEXEC);
  char *const seen_ = map(PROT_NONE), *const host_ = map(PROT_READ | PROT_WRITE);
  size_t used_ = 0;
};
Arena& arena() { return forever<Arena>(); }

struct Block {
  StreamId own; // stream that it was allocated on
  size_t bytes;
  std::set<StreamId> streams; // that use it
};

// Runs `last` when the streams have done what they were given so far: in the thread of the
// last of them, or in this one. No lock may be held.
void after(const std::set<StreamId>& streams, Task last) {
  const std::shared_ptr<void> all(nullptr, [run = std::move(last)](void*) { run(); });
  for (const auto& [device, id] : streams) enqueue(stream_of(device, id), [all] {});
}

// Keeps freed blocks for allocations of the same size on the same stream, as the order of
// tasks in a stream allows. A block's memory is poisoned in that order too.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const auto stream = current_stream(device);
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, stream.device()};
    use_in_this_process();
    const StreamId own{device, stream.id()};
    const Block block{own, in_pages(bytes), {own}};
    void* pointer = take(block);
    if (!pointer) { // frees what is cached, and what recorded streams still use
      release_cached(device);
      pointer = take(block);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, pointer, "test device ", device, ": out of memory: tried to allocate ",
        bytes, " bytes, limit ", settings().memory_bytes[device]);
    return {pointer, pointer, raw_deleter(), stream.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* pointer) { forever<Allocator>().free(pointer); };
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "test device: no lazy copies");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    for (int device = 0; device < settings().device_count; device++) release_cached(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(mutex_);
    const auto found = blocks_.find(data.get());
    if (found != blocks_.end())
      found->second.streams.emplace(stream.device_index(), stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return Lock(mutex_), stats_.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {} // nobody reads them
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(mutex_);
    auto& all = stats_.at(device);
    for (auto* each : {&all.allocated_bytes, &all.active_bytes, &all.reserved_bytes})
      (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t reserved = getDeviceStats(device).reserved_bytes[0].current;
    const size_t total = settings().memory_bytes.at(device);
    return {total - std::min(total, reserved), total};
  }

 private:
  // A cached block or a new one; nullptr where the device's limit forbids it.
  void* take(const Block& block) {
    Lock lock(mutex_);
    auto& stats = stats_[block.own.first];
    auto& cached = cached_[{block.own, block.bytes}];
    if (cached.empty()) {
      const size_t reserved = stats.reserved_bytes[0].current + block.bytes;
      if (reserved > settings().memory_bytes[block.own.first]) return nullptr;
      cached.push_back(arena().take(block.bytes));
      stats.reserved_bytes[0].increase(block.bytes);
    }
    void* pointer = cached.back();
    cached.pop_back();
    stats.allocated_bytes[0].increase(block.bytes);
    stats.active_bytes[0].increase(block.bytes);
    blocks_.emplace(pointer, block);
    return pointer;
  }

  void free(void* pointer) {
    if (is_in_bad_fork()) return;
    Lock lock(mutex_);
    const Block block = blocks_.extract(pointer).mapped();
    auto& stats = stats_[block.own.first];
    stats.allocated_bytes[0].decrease(block.bytes);
    stats.active_bytes[0].decrease(block.bytes);
    const auto poison = [pointer, block] { memset(host_pointer(pointer), POISON, block.bytes); };
    const auto cache = [=, this] { cached_[{block.own, block.bytes}].push_back(pointer); };
    if (block.streams.size() == 1) { // later tasks of its stream run after the poison
      enqueue(stream_of(block.own.first, block.own.second), poison);
      return cache();
    }
    lock.unlock();
    after(block.streams, [this, poison, cache] {
      poison();
      Lock lock(mutex_);
      cache();
    });
  }

  void release_cached(int device) {
    synchronize_device(device);
    Lock lock(mutex_);
    for (auto& [place, pointers] : cached_) {
      if (place.first.first != device) continue;
      for (void* each : pointers) arena().release(each, place.second);
      stats_[device].reserved_bytes[0].decrease(place.second * pointers.size());
      pointers.clear();
    }
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_; // in use
  std::map<std::pair<StreamId, size_t>, std::vector<void*>> cached_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, MAX_DEVICES> stats_;
};

// Page-locked host memory; a block that streams still use is freed when they are done.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::kCPU};
    void* pointer = std::aligned_alloc(PAGE, in_pages(bytes));
    if (!pointer) throw std::bad_alloc();
    Lock lock(mutex_);
    blocks_.emplace(pointer, Block{{}, bytes, {}});
    return {pointer, pointer, raw_deleter(), c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* pointer) { forever<PinnedAllocator>().free(pointer); };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }

  // True if the pointer lies in pinned memory; `stream`, if any, uses that from now on.
  bool find(const void* pointer, const c10::Stream* stream) {
    Lock lock(mutex_);
    auto found = blocks_.upper_bound(const_cast<void*>(pointer));
    if (found == blocks_.begin()) return false;
    auto& [start, block] = *--found;
    if (static_cast<const char*>(pointer) >= static_cast<char*>(start) + block.bytes) return false;
    if (stream) block.streams.emplace(stream->device_index(), stream->id());
    return true;
  }

 private:
  void free(void* pointer) {
    if (is_in_bad_fork()) return;
    Lock lock(mutex_);
    const Block block = blocks_.extract(pointer).mapped();
    lock.unlock();
    after(block.streams, [pointer] { std::free(pointer); });
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
};

} // namespace

c10::DeviceAllocator* device_allocator() { return &forever<Allocator>(); }
c10::Allocator* pinned_allocator() { return &forever<PinnedAllocator>(); }
bool is_pinned(const void* pointer, const c10::Stream* user) {
  return forever<PinnedAllocator>().find(pointer, user);
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
