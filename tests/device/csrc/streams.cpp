// Streams: a thread for each, its delays and its speed, marks, failures.
#include "device.h"

#include <Python.h>
#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <thread>

namespace test_device {
namespace {

using Lock = std::unique_lock<std::mutex>;
using Microseconds = std::chrono::duration<double, std::micro>;
constexpr int64_t NO_KERNEL = -1;

std::atomic<bool> is_stopping{false}, is_used{false}, is_forked{false};
std::atomic<int64_t> kernels{0};

// The first exception of each device's kernels since its last synchronisation.
struct Failures {
  std::mutex mutex;
  std::array<std::exception_ptr, MAX_DEVICES> first;
};

void raise_failure(int device) {
  Lock lock(forever<Failures>().mutex);
  if (auto failure = std::exchange(forever<Failures>().first[device], nullptr))
    std::rethrow_exception(failure);
}

class Worker {
 public:
  Worker(int device, int id) : device_(device), id_(id) {}

  void put(int64_t elements, Task run) {
    use_in_this_process();
    Lock lock(mutex_);
    if (!is_started_) std::thread([this] { serve(); }).detach();
    is_started_ = true;
    queue_.push_back({elements, std::move(run)});
    queued_.notify_one();
  }

  bool is_started() { return Lock(mutex_), is_started_; }
  bool is_busy() { return Lock(mutex_), is_busy_; }
  bool is_idle() { return Lock(mutex_), queue_.empty() && !is_busy_; }

 private:
  struct Entry {
    int64_t elements; // or NO_KERNEL
    Task run;
  };

  [[noreturn]] void serve() {
    for (;;) {
      Entry entry = next();
      if (entry.elements != NO_KERNEL) delay();
      const auto started = Clock::now();
      try {
        entry.run();
      } catch (...) {
        Lock lock(forever<Failures>().mutex);
        auto& first = forever<Failures>().first[device_];
        if (!first) first = std::current_exception();
      }
      entry.run = nullptr; // frees what it holds before the stream counts as idle
      if (entry.elements != NO_KERNEL) take_time(started, entry.elements);
      Lock lock(mutex_);
      is_busy_ = false;
    }
  }

  Entry next() {
    Lock lock(mutex_);
    queued_.wait(lock, [&] { return !queue_.empty() && !is_stopping; });
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    return entry;
  }

  // With a seed a delay depends on the seed, the stream and the kernel's number alone.
  void delay() {
    kernels++;
    const int64_t longest_us = id_ == 0 ? settings().main_delay_us : settings().side_delay_us;
    const uint64_t seed = settings().delay_seed;
    if (longest_us == 0) return;
    std::seed_seq numbers{seed, uint64_t(device_ * STREAMS + id_), number_++};
    std::minstd_rand engine(numbers);
    const double part = seed == 0 ? 1.0 : std::generate_canonical<double, 31>(engine);
    std::this_thread::sleep_for(Microseconds(part * longest_us));
  }

  // The kernels of a busy stream take their times one after the other, whatever the machine
  // needs for each of them or for waking this thread up.
  void take_time(Clock::time_point started, int64_t elements) {
    const double kernel_us = settings().kernel_us[device_];
    const Microseconds cost(kernel_us + 1e-3 * settings().element_ns[device_] * elements);
    if (cost.count() == 0) return;
    free_at_ = std::max(free_at_, started) + std::chrono::duration_cast<Clock::duration>(cost);
    std::this_thread::sleep_until(free_at_);
  }

  const int device_, id_;
  std::mutex mutex_;
  std::condition_variable queued_;
  std::deque<Entry> queue_;
  bool is_started_ = false, is_busy_ = false;
  uint64_t number_ = 0; // of delayed kernels
  Clock::time_point free_at_;
};

struct Workers : std::vector<std::unique_ptr<Worker>> {
  Workers() {
    for (int n = 0; n < MAX_DEVICES * STREAMS; n++)
      push_back(std::make_unique<Worker>(n / STREAMS, n % STREAMS));
  }
};
Worker& worker(const c10::Stream& stream) {
  return *forever<Workers>().at(stream.device_index() * STREAMS + stream.id());
}

thread_local int device_now = 0;
thread_local std::array<int64_t, MAX_DEVICES> streams_now{};
std::array<std::atomic<int>, MAX_DEVICES> streams_taken{};

} // namespace

void launch(const c10::Stream& stream, int64_t elements, Task task) {
  worker(stream).put(elements, std::move(task));
}
void enqueue(const c10::Stream& stream, Task task) {
  worker(stream).put(NO_KERNEL, std::move(task));
}

Mark mark(const c10::Stream& stream) {
  auto reached = std::make_shared<std::promise<Clock::time_point>>();
  enqueue(stream, [reached] { reached->set_value(Clock::now()); });
  return reached->get_future().share();
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

bool is_idle(const c10::Stream& stream) { return worker(stream).is_idle(); }
void synchronize(const c10::Stream& stream) {
  wait(mark(stream));
  raise_failure(stream.device_index());
}
void synchronize_device(int device) {
  std::vector<Mark> marks;
  for (int id = 0; id < STREAMS; id++)
    if (const auto each = stream_of(device, id); worker(each).is_started())
      marks.push_back(mark(each));
  for (const auto& each : marks) wait(each);
  raise_failure(device);
}

c10::Stream stream_of(int device, int64_t id) {
  const c10::Device place(TYPE, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, place, id);
}
c10::Stream next_stream(int device) {
  return stream_of(device, 1 + streams_taken.at(device)++ % (STREAMS - 1));
}
c10::Stream current_stream(int device) { return stream_of(device, streams_now.at(device)); }
c10::Stream exchange_stream(const c10::Stream& stream) {
  const int device = stream.device_index();
  return stream_of(device, std::exchange(streams_now.at(device), stream.id()));
}
int current_device() { return device_now; }
int exchange_device(int device) {
  TORCH_CHECK(device < settings().device_count, "test device: no device of index ", device);
  return std::exchange(device_now, device < 0 ? device_now : device);
}

int64_t kernel_count() { return kernels; }
bool is_in_bad_fork() { return is_forked; }
void use_in_this_process() {
  TORCH_CHECK(!is_forked, "test device: cannot be used in a forked process, use spawn");
  if (!is_used.exchange(true)) pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
}
void stop() {
  is_stopping = true;
  const auto end = Clock::now() + std::chrono::seconds(1);
  for (const auto& each : forever<Workers>())
    while (each->is_busy() && Clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

} // namespace test_device
