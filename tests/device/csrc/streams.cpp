// Streams: a thread per stream, its delays and its speed, marks, failures.
#include "device.h"

#include <Python.h>
#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace test_device {
namespace {

using Microseconds = std::chrono::duration<double, std::micro>;
constexpr int64_t NO_KERNEL = -1;

std::atomic<bool> is_stopping{false}, is_used{false}, is_forked{false};
std::atomic<int64_t> kernels{0};

// The first exception of each device's kernels since its last synchronisation.
struct Failures {
  std::mutex mutex;
  std::array<std::exception_ptr, MAX_DEVICES> first;
};
// Threads outlive static destructors, so that nothing here is ever destroyed.
Failures& failures() {
  static auto* all = new Failures;
  return *all;
}

void raise_failure(int device) {
  std::exception_ptr failure;
  {
    std::lock_guard<std::mutex> lock(failures().mutex);
    std::swap(failure, failures().first[device]);
  }
  if (failure) std::rethrow_exception(failure);
}

// A number in [0, 1) that depends on all three alone (SplitMix64).
double drawn(uint64_t seed, uint64_t stream, uint64_t number) {
  uint64_t z = seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03 + number;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

class Worker {
 public:
  Worker(int device, int id) : device_(device), id_(id) {}

  void put(int64_t elements, Task run) {
    use_in_this_process();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_started_) {
      is_started_ = true;
      std::thread([this] { serve(); }).detach();
    }
    queue_.push_back({elements, std::move(run)});
    queued_.notify_one();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !is_busy_;
  }

  bool is_started() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_started_;
  }

  bool is_busy() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_busy_;
  }

 private:
  struct Entry {
    int64_t elements; // or NO_KERNEL
    Task run;
  };

  [[noreturn]] void serve() {
    for (;;) {
      Entry entry = next();
      const auto started = Clock::now();
      if (entry.elements != NO_KERNEL) delay();
      try {
        entry.run();
      } catch (...) {
        std::lock_guard<std::mutex> lock(failures().mutex);
        auto& first = failures().first[device_];
        if (!first) first = std::current_exception();
      }
      entry.run = nullptr; // frees what it holds before the stream counts as idle
      if (entry.elements != NO_KERNEL) take_time(started, entry.elements);
      std::lock_guard<std::mutex> lock(mutex_);
      is_busy_ = false;
    }
  }

  Entry next() {
    std::unique_lock<std::mutex> lock(mutex_);
    queued_.wait(lock, [&] { return !queue_.empty() && !is_stopping; });
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    return entry;
  }

  void delay() {
    const auto& all = settings();
    const int64_t longest_us = id_ == 0 ? all.main_delay_us : all.side_delay_us;
    const uint64_t seed = all.delay_seed;
    kernels++;
    if (longest_us == 0) return;
    const uint64_t stream = device_ * STREAMS + id_;
    const double part = seed == 0 ? 1.0 : drawn(seed, stream, number_++);
    std::this_thread::sleep_for(Microseconds(part * longest_us));
  }

  // The kernels of a busy stream take their times one after the other, whatever the
  // machine needs for each of them or for waking this thread up.
  void take_time(Clock::time_point started, int64_t elements) {
    const auto& all = settings();
    const Microseconds cost(
        all.kernel_us[device_] + 1e-3 * all.element_ns[device_] * elements);
    if (cost.count() == 0) return;
    const auto last = std::chrono::duration_cast<Clock::duration>(cost);
    free_at_ = std::max(free_at_, started) + last;
    std::this_thread::sleep_until(free_at_);
  }

  const int device_, id_;
  std::mutex mutex_;
  std::condition_variable queued_;
  std::deque<Entry> queue_;
  bool is_started_ = false, is_busy_ = false;
  uint64_t number_ = 0;
  Clock::time_point free_at_;
};

Worker& worker(int device, int64_t id) {
  static auto* all = [] {
    auto* made = new std::array<std::array<Worker*, STREAMS>, MAX_DEVICES>;
    for (int d = 0; d < MAX_DEVICES; d++)
      for (int s = 0; s < STREAMS; s++) (*made)[d][s] = new Worker(d, s);
    return made;
  }();
  return *all->at(device).at(id);
}

Worker& worker(const c10::Stream& stream) {
  return worker(stream.device_index(), stream.id());
}

thread_local int device_now = 0;
thread_local std::array<int64_t, MAX_DEVICES> streams_now{};
std::array<std::atomic<int>, MAX_DEVICES> streams_taken{};

} // namespace

Settings& settings() {
  static auto* all = [] {
    auto* made = new Settings;
    for (auto& bytes : made->memory_bytes) bytes = size_t(1) << 30;
    return made;
  }();
  return *all;
}

void launch(const c10::Stream& stream, int64_t elements, Task task) {
  worker(stream).put(elements, std::move(task));
}

void enqueue(const c10::Stream& stream, Task task) {
  worker(stream).put(NO_KERNEL, std::move(task));
}

Mark mark(const c10::Stream& stream) {
  auto reached = std::make_shared<std::promise<Clock::time_point>>();
  Mark result = reached->get_future().share();
  enqueue(stream, [reached] { reached->set_value(Clock::now()); });
  return result;
}

void block(const c10::Stream& stream, Mark mark) {
  enqueue(stream, [mark = std::move(mark)] { mark.wait(); });
}

bool is_reached(const Mark& mark) {
  return mark.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void wait(const Mark& mark) {
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  mark.wait();
  if (state) PyEval_RestoreThread(state);
}

bool is_idle(const c10::Stream& stream) {
  return worker(stream).is_idle();
}

void synchronize(const c10::Stream& stream) {
  wait(mark(stream));
  raise_failure(stream.device_index());
}

void synchronize_device(int device) {
  std::vector<Mark> marks;
  for (int id = 0; id < STREAMS; id++)
    if (worker(device, id).is_started()) marks.push_back(mark(stream_of(device, id)));
  for (const auto& each : marks) wait(each);
  raise_failure(device);
}

c10::Stream stream_of(int device, int64_t id) {
  const c10::Device at(TYPE, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, at, id);
}

c10::Stream next_stream(int device) {
  return stream_of(device, 1 + streams_taken.at(device)++ % (STREAMS - 1));
}

int current_device() {
  return device_now;
}

int exchange_device(int device) {
  const int previous = device_now;
  TORCH_CHECK(
      device < settings().device_count, "test device: no device of index ", device);
  if (device >= 0) device_now = device;
  return previous;
}

c10::Stream current_stream(int device) {
  return stream_of(device, streams_now.at(device));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const auto previous = current_stream(stream.device_index());
  streams_now.at(stream.device_index()) = stream.id();
  return previous;
}

int64_t kernel_count() {
  return kernels;
}

bool is_in_bad_fork() {
  return is_forked;
}

void use_in_this_process() {
  TORCH_CHECK(
      !is_forked, "test device: cannot be used in a forked process, use spawn");
  if (!is_used.exchange(true))
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
}

void stop() {
  is_stopping = true;
  const auto end = Clock::now() + std::chrono::seconds(1);
  for (int device = 0; device < MAX_DEVICES; device++)
    for (int id = 0; id < STREAMS; id++)
      while (worker(device, id).is_busy() && Clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

} // namespace test_device
