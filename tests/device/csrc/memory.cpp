// Device memory that the host cannot touch, its allocator in stream order, and pinned
// host memory.
#include "device.h"

#include <ATen/ops/from_blob.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace test_device {
namespace {

constexpr size_t BLOCK_BYTES = 4096; // a page, so that freed blocks can be given back
constexpr int POISON = 0xFF; // NaN in every floating dtype, -1 in integers

// Addresses of a sparse file, handed out once and mapped twice.
class Arena {
 public:
  Arena() {
    file_ = memfd_create("test-device", MFD_CLOEXEC);
    TORCH_CHECK(file_ >= 0 && ftruncate(file_, SIZE) == 0, "test device: no memfd");
    seen_ = map(PROT_NONE);
    host_ = map(PROT_READ | PROT_WRITE);
  }

  char* take(size_t bytes) {
    TORCH_CHECK(used_ + bytes <= SIZE, "test device: all addresses are used up");
    char* block = seen_ + used_;
    used_ += bytes;
    memset(host(block), POISON, bytes);
    return block;
  }

  void release(const char* block, size_t bytes) {
    fallocate(
        file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block - seen_, bytes);
  }

  char* host(const void* block) {
    const auto offset = static_cast<const char*>(block) - seen_;
    TORCH_CHECK(
        offset >= 0 && static_cast<size_t>(offset) < SIZE,
        "test device: not a pointer into device memory");
    return host_ + offset;
  }

 private:
  static constexpr size_t SIZE = size_t(1) << 40;

  char* map(int protection) {
    void* start = mmap(
        nullptr, SIZE, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
    TORCH_CHECK(start != MAP_FAILED, "test device: cannot map its memory");
    return static_cast<char*>(start);
  }

  int file_;
  char *seen_, *host_;
  size_t used_ = 0;
};

Arena& arena() {
  static auto* made = new Arena;
  return *made;
}

struct Block {
  size_t bytes; // rounded up
  int device;
  int64_t stream; // that it was allocated on
  std::set<int64_t> also; // recorded on it by record_stream
};

// Keeps freed blocks for allocations of the same size on the same stream, as the order
// of tasks in a stream allows. A block's memory is poisoned in that order too.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device where(TYPE, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, where};
    use_in_this_process();
    const Block block{
        (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES,
        device,
        current_stream(device).id(),
        {}};
    void* pointer = take(block);
    if (!pointer) { // what is cached, or still awaited by a recorded stream
      synchronize_device(device);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        release_cached(device);
        usage_[device].retries++;
      }
      pointer = take(block);
    }
    if (!pointer) raise_out_of_memory(device, bytes);
    return {pointer, pointer, raw_deleter(), where};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* pointer) {
      static_cast<Allocator*>(device_allocator())->free(pointer);
    };
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    synchronize_device(current_device());
    memcpy(host_pointer(to), host_pointer(from), bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    for (int device = 0; device < settings().device_count; device++) {
      synchronize_device(device);
      std::lock_guard<std::mutex> lock(mutex_);
      release_cached(device);
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(data.get());
    if (found != blocks_.end() && found->second.stream != stream.id())
      found->second.also.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Usage& usage = usage_.at(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto fill = [](auto& stat, size_t current, size_t peak) {
      stat[0].current = static_cast<int64_t>(current);
      stat[0].peak = static_cast<int64_t>(peak);
    };
    fill(stats.allocated_bytes, usage.active, usage.active_peak);
    fill(stats.active_bytes, usage.active, usage.active_peak);
    fill(stats.reserved_bytes, usage.reserved, usage.reserved_peak);
    stats.num_alloc_retries = usage.retries;
    stats.num_ooms = usage.refusals;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    usage_.at(device).retries = usage_.at(device).refusals = 0;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    usage_.at(device).active_peak = usage_.at(device).active;
    usage_.at(device).reserved_peak = usage_.at(device).reserved;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t total = settings().memory_bytes.at(device);
    std::lock_guard<std::mutex> lock(mutex_);
    return {total - std::min(total, usage_.at(device).reserved), total};
  }

 private:
  using Place = std::tuple<int, int64_t, size_t>; // device, stream, bytes
  struct Usage {
    size_t active = 0, active_peak = 0, reserved = 0, reserved_peak = 0;
    int64_t retries = 0, refusals = 0;
  };

  // A cached block or a new one; nullptr where the device's limit forbids it.
  void* take(const Block& block) {
    std::lock_guard<std::mutex> lock(mutex_);
    Usage& usage = usage_[block.device];
    auto& cached = cached_[{block.device, block.stream, block.bytes}];
    void* pointer = nullptr;
    if (!cached.empty()) {
      pointer = cached.back();
      cached.pop_back();
    } else if (usage.reserved + block.bytes <= settings().memory_bytes[block.device]) {
      pointer = arena().take(block.bytes);
      usage.reserved += block.bytes;
      usage.reserved_peak = std::max(usage.reserved_peak, usage.reserved);
    } else {
      return nullptr;
    }
    usage.active += block.bytes;
    usage.active_peak = std::max(usage.active_peak, usage.active);
    blocks_[pointer] = block;
    return pointer;
  }

  void free(void* pointer) {
    if (!pointer || is_in_bad_fork()) return;
    Block block;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      block = std::move(blocks_.at(pointer));
      blocks_.erase(pointer);
      usage_[block.device].active -= block.bytes;
      // Later tasks of its own stream run after the poison, so that it is free for them.
      if (block.also.empty()) cache(pointer, block);
    }
    const auto poison = [pointer, bytes = block.bytes] {
      memset(host_pointer(pointer), POISON, bytes);
    };
    if (block.also.empty()) {
      enqueue(stream_of(block.device, block.stream), poison);
      return;
    }
    // The last of the streams that use it poisons it.
    const std::shared_ptr<void> last(pointer, [this, block, poison](void* freed) {
      poison();
      std::lock_guard<std::mutex> lock(mutex_);
      cache(freed, block);
    });
    block.also.insert(block.stream);
    for (const int64_t id : block.also)
      enqueue(stream_of(block.device, id), [last] {});
  }

  void cache(void* pointer, const Block& block) {
    cached_[{block.device, block.stream, block.bytes}].push_back(pointer);
  }

  void release_cached(int device) {
    for (auto& [place, pointers] : cached_) {
      if (std::get<0>(place) != device) continue;
      const size_t bytes = std::get<2>(place);
      for (void* each : pointers) arena().release(static_cast<char*>(each), bytes);
      usage_[device].reserved -= bytes * pointers.size();
      pointers.clear();
    }
  }

  [[noreturn]] void raise_out_of_memory(int device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    usage_[device].refusals++;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "test device ", device, ": out of memory: tried to allocate ", bytes,
        " bytes, ", usage_[device].active, " of ", settings().memory_bytes[device],
        " are in use");
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::map<Place, std::vector<void*>> cached_;
  std::array<Usage, MAX_DEVICES> usage_;
};

// Page-locked host memory; a block that streams still use is freed when they are done.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::kCPU};
    void* pointer = std::aligned_alloc(BLOCK_BYTES, (bytes / BLOCK_BYTES + 1) * BLOCK_BYTES);
    if (!pointer) throw std::bad_alloc();
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[static_cast<char*>(pointer)] = {bytes, {}};
    return {pointer, pointer, raw_deleter(), c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* pointer) {
      static_cast<PinnedAllocator*>(pinned_allocator())->free(pointer);
    };
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }

  bool contains(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(pointer) != blocks_.end();
  }

  void record(const void* pointer, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find(pointer);
    if (found != blocks_.end())
      found->second.streams.insert({stream.device_index(), stream.id()});
  }

 private:
  struct Used {
    size_t bytes;
    std::set<std::pair<int, int64_t>> streams; // device, stream
  };
  using Blocks = std::map<const char*, Used>;

  Blocks::iterator find(const void* pointer) {
    const auto* at = static_cast<const char*>(pointer);
    auto next = blocks_.upper_bound(at);
    if (next == blocks_.begin()) return blocks_.end();
    --next;
    return at < next->first + next->second.bytes ? next : blocks_.end();
  }

  void free(void* pointer) {
    if (is_in_bad_fork()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const std::shared_ptr<void> last(pointer, std::free);
    const auto found = blocks_.find(static_cast<char*>(pointer));
    for (const auto& [device, id] : found->second.streams)
      enqueue(stream_of(device, id), [last] {});
    blocks_.erase(found);
  }

  std::mutex mutex_;
  Blocks blocks_;
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
  return static_cast<PinnedAllocator*>(pinned_allocator())->contains(pointer);
}

void record_pinned(const void* pointer, const c10::Stream& stream) {
  static_cast<PinnedAllocator*>(pinned_allocator())->record(pointer, stream);
}

void* host_pointer(const void* device_pointer) {
  return arena().host(device_pointer);
}

at::Tensor host_view(const at::Tensor& tensor) {
  void* memory = tensor.numel() == 0 ? nullptr : host_pointer(tensor.data_ptr());
  auto view = at::from_blob(
      memory,
      tensor.sizes(),
      tensor.strides(),
      tensor.options().device(c10::kCPU).requires_grad(false).pinned_memory(false));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

} // namespace test_device
