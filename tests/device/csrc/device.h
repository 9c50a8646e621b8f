// The test device: an accelerator made of threads, for machines that have none.
//
// A stream is a thread with a queue of tasks. Device memory is mapped twice: programs
// hold an address that the host cannot touch (SIGSEGV), and the streams' threads use
// the second mapping of the same memory, `host_pointer`.
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
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>

namespace test_device {

constexpr c10::DeviceType TYPE = c10::DeviceType::PrivateUse1;
constexpr int MAX_DEVICES = 8;
constexpr int STREAMS = 33; // per device: the default one and a pool of 32, as CUDA

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;
// Time at which a stream reached a point of its queue; ready once it has.
using Mark = std::shared_future<Clock::time_point>;

// Every value may change while streams run; kernels read them when they start.
struct Settings {
  std::atomic<int> device_count{2};
  // Longest delay before a kernel (µs), on default streams and on all others; with a
  // seed every delay is drawn below it, else it is the same for all.
  std::atomic<int64_t> main_delay_us{0}, side_delay_us{0};
  std::atomic<uint64_t> delay_seed{0};
  // Speed: time that a kernel takes (µs), and what each element adds (ns).
  std::array<std::atomic<double>, MAX_DEVICES> kernel_us{}, element_ns{};
  std::array<std::atomic<size_t>, MAX_DEVICES> memory_bytes{};
};
Settings& settings();

// ---- streams.cpp

// Appends a kernel: it is delayed and takes time as `settings` say. Any thread may call
// this, with or without the GIL. An exception of `task` is raised by the device's next
// synchronisation.
void launch(const c10::Stream& stream, int64_t elements, Task task);
// Appends a task that takes no time of the device: bookkeeping.
void enqueue(const c10::Stream& stream, Task task);

Mark mark(const c10::Stream& stream);
void block(const c10::Stream& stream, Mark mark);
bool is_reached(const Mark& mark);
// Waits without the GIL, also where the caller holds it.
void wait(const Mark& mark);

bool is_idle(const c10::Stream& stream);
// Waits for the stream, then raises what a kernel of its device has raised.
void synchronize(const c10::Stream& stream);
void synchronize_device(int device);

c10::Stream stream_of(int device, int64_t id); // id 0 is the default stream
c10::Stream next_stream(int device); // of the pool, in turn
int current_device();
int exchange_device(int device); // returns the previous one; -1 changes nothing
c10::Stream current_stream(int device);
c10::Stream exchange_stream(const c10::Stream& stream);

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
bool is_pinned(const void* pointer);
// Pinned memory is freed only after what `stream` has been given so far.
void record_pinned(const void* pointer, const c10::Stream& stream);
// Where the streams' threads find the memory of a device pointer.
void* host_pointer(const void* device_pointer);
// A CPU tensor over the memory of a device tensor, of which it keeps nothing alive; for
// the streams' threads.
at::Tensor host_view(const at::Tensor& tensor);

// ---- guard.cpp

void register_hooks();
// Default generator of a device (-1: the current one).
const at::Generator& default_generator(int device);
// The CPU generator that draws for a generator of this device.
at::Generator host_generator(const at::Generator& generator);

} // namespace test_device
