// The test device: an accelerator made of threads, for machines that have none.
//
// A stream is a thread with a queue of tasks. Device memory is mapped twice: programs hold an
// address that the host cannot touch (SIGSEGV), and the streams' threads use the second mapping
// of the same memory, `host_pointer`.
//
//   caller's thread             stream 0 (default)        stream 1 .. 32 (pool)
//   operator ── launch ───────► kernel
//   event.record ─ mark ──────► mark ───── block ───────► waits for the mark
//   tensor dies ─ enqueue ────► poisons its block         kernel
//   synchronize ◄─────────────  mark
//
// No task needs Python's GIL, and no task keeps device memory alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>

namespace test_device {

constexpr c10::DeviceType TYPE = c10::DeviceType::PrivateUse1;
constexpr int MAX_DEVICES = 8;
constexpr int STREAMS = 33; // per device: the default one and a pool of 32, as CUDA

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;
// Time at which a stream reached a point of its queue; ready once it has.
using Mark = std::shared_future<Clock::time_point>;

// An object that is never destroyed: streams' threads outlive static destructors.
template <class T>
T& forever() {
  static auto* made = new T;
  return *made;
}

// Every value may change while streams run; kernels read them when they start.
struct Settings {
  Settings() {
    for (auto& each : memory_bytes) each = size_t(1) << 30;
  }
  std::atomic<int> device_count{2};
  // Longest delay before a kernel (µs), on default streams and on all others; with a seed
  // every delay is drawn below it, else it is the same for all.
  std::atomic<int64_t> main_delay_us{0}, side_delay_us{0};
  std::atomic<uint64_t> delay_seed{0};
  // Speed: time that a kernel takes (µs), and what each element adds (ns).
  std::array<std::atomic<double>, MAX_DEVICES> kernel_us{}, element_ns{};
  std::array<std::atomic<size_t>, MAX_DEVICES> memory_bytes{};
};
inline Settings& settings() { return forever<Settings>(); }

// ---- streams.cpp

// Appends a kernel: it is delayed and takes time as `settings` say. Any thread may call this,
// with or without the GIL. The device's next synchronisation raises what `task` throws.
void launch(const c10::Stream& stream, int64_t elements, Task task);
// Appends a task that takes no time of the device: bookkeeping.
void enqueue(const c10::Stream& stream, Task task);

Mark mark(const c10::Stream& stream);
void block(const c10::Stream& stream, Mark mark);
bool is_reached(const Mark& mark);
void wait(const Mark& mark); // releases the GIL where the caller holds it

bool is_idle(const c10::Stream& stream);
// Waits for the stream, then raises what a kernel of its device has thrown.
void synchronize(const c10::Stream& stream);
void synchronize_device(int device);

c10::Stream stream_of(int device, int64_t id); // id 0 is the default stream
c10::Stream next_stream(int device); // of the pool, in turn
c10::Stream current_stream(int device);
c10::Stream exchange_stream(const c10::Stream& stream);
int current_device();
int exchange_device(int device); // returns the previous one; -1 changes nothing

int64_t kernel_count();
// True in a child of a process that had used the device: its streams have no threads.
bool is_in_bad_fork();
// Notes that this process uses the device, or raises in such a child.
void use_in_this_process();
// The process exits: no further task is started.
void stop();

// ---- memory.cpp

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
// True if the pointer lies in pinned memory, which is freed only after what `user` has been
// given by then.
bool is_pinned(const void* pointer, const c10::Stream* user = nullptr);
// Where the streams' threads find the memory of a device pointer.
void* host_pointer(const void* device_pointer);
// A CPU tensor over a device tensor's memory, for the streams' threads; keeps nothing alive.
at::Tensor host_view(const at::Tensor& tensor);

// ---- operators.cpp

// Calls, by operator, that made the host wait.
std::map<std::string, int64_t> host_operator_counts();

// ---- guard.cpp

void register_hooks();
const at::Generator& default_generator(int device); // -1: of the current device

} // namespace test_device
