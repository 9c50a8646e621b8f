// A process group of the test device with NCCL's contract.
//
//   host              current stream       communicator's stream        watchdog
//   allreduce ──────► mark ──────────────► waits for the mark           looks for
//   returns at once                        waits for its turn           late ones
//   wait ───────────► waits for the end ◄─ exchanges with other ranks   and aborts
//
// One collective at a time runs on a device, as NCCL may have it: ranks that use two
// communicators in different orders hang. Dead peers are not noticed. A late collective
// aborts its group and, as torch does under NCCL, ends the process.
#include "communicator.h"
#include "process_group.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdlib>
#include <iostream>
#include <list>
#include <map>
#include <mutex>
#include <numeric>
#include <semaphore>

namespace test_device {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Slots = Communicator::Slots;
using Take = Communicator::Take;
constexpr Milliseconds LOOK(5);
constexpr const char* NAME = "tdccl";

int number_from(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoi(value);
}

// Turns of a device on which so many collectives may run at the same time.
std::counting_semaphore<>& turns_of(int device, int most) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, std::counting_semaphore<>> all;
  std::lock_guard<std::mutex> lock(mutex);
  return all.try_emplace({device, most}, most).first->second;
}

// A collective, for all threads. It has no tensor: to drop one may need the GIL.
struct Job {
  Job(std::string name_, c10::Stream stream_, Milliseconds timeout,
      std::shared_ptr<Communicator> communicator_)
      : name(std::move(name_)), stream(stream_), deadline(Clock::now() + timeout),
        communicator(std::move(communicator_)) {}
  void finish(const std::string& said = "") { // the first call counts
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_done) error = said;
    is_done = true;
    changed.notify_all();
  }
  bool wait_until(Clock::time_point until) {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_until(lock, until, [&] { return is_done.load(); });
  }
  std::string state() const { // for errors
    const std::string before = waits_for.load();
    return c10::str(name, before.empty() ? ": " + communicator->missing() : before);
  }
  const std::string name;
  const c10::Stream stream;
  const Clock::time_point deadline;
  const std::shared_ptr<Communicator> communicator;
  std::atomic<const char*> waits_for = ": its tensors are not computed";
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> is_done = false;
  std::string error; // "" if there is none; written before is_done
};

// What the group shares with the device's threads and the watchdog.
struct State {
  void fail(const std::string& said) {
    std::lock_guard<std::mutex> lock(mutex);
    if (error.empty()) error = said;
    is_aborted = true;
  }
  std::mutex mutex;
  std::list<std::shared_ptr<Job>> pending;
  std::string error;
  std::atomic<bool> is_aborted = false, has_ended = false;
  const int most_at_a_time = number_from("TEST_DEVICE_COLLECTIVES", 1);
};

void run(
    Job& job, const std::string& call, int64_t bytes, const char* mine,
    const Take& take, State& state) {
  auto& turns = turns_of(job.stream.device_index(), state.most_at_a_time);
  job.waits_for = ": another collective runs on its device";
  job.communicator->set_held(true);
  bool has_turn = false;
  while (!state.is_aborted && !has_turn) has_turn = turns.try_acquire_for(LOOK);
  job.communicator->set_held(false);
  job.waits_for = "";
  try {
    if (has_turn && job.communicator->exchange(
                        call, bytes, mine, take, state.is_aborted))
      job.finish();
    else
      job.finish("aborted: " + job.state());
  } catch (const std::exception& error) {
    state.fail(error.what());
    job.finish(error.what());
  }
  if (has_turn) turns.release();
}

// Ends late collectives, and those that are pending when the group is aborted.
void watch(State& state, bool ends_process) {
  while (!state.has_ended) {
    std::string late;
    std::unique_lock<std::mutex> lock(state.mutex);
    state.pending.remove_if([](const auto& job) { return job->is_done.load(); });
    for (const auto& job : state.pending) {
      if (state.is_aborted) job->finish("aborted: " + job->state());
      else if (Clock::now() > job->deadline && late.empty())
        job->finish(late = "timed out: " + job->state());
    }
    lock.unlock();
    if (!late.empty()) {
      state.fail(late);
      std::cerr << NAME << " " << late << std::endl;
      if (ends_process) std::abort();
    }
    std::this_thread::sleep_for(LOOK);
  }
}

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, std::shared_ptr<Job> job, std::shared_ptr<State> state,
      const Tensors& outputs)
      : c10d::Work(rank, type), job_(std::move(job)), state_(std::move(state)),
        end_(mark(job_->stream)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{job_->stream.device()})) {
    const c10::StreamGuard current(job_->stream);
    future_->markCompleted(c10::IValue(outputs)); // waits for the stream, as NCCL's
  }
  bool isCompleted() override { return job_->is_done; }
  bool isSuccess() const override { return job_->is_done && job_->error.empty(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void synchronize() override {
    block(current_stream(job_->stream.device_index()), end_);
  }

  // With a timeout the host waits and, as under NCCL, aborts the group when it is over.
  bool wait(Milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout && !job_->wait_until(Clock::now() + timeout)) {
      job_->finish("timed out in a blocking wait: " + job_->state());
      state_->fail(job_->error);
    }
    if (opType_ == OpType::BARRIER) job_->wait_until(Clock::time_point::max());
    const bool is_wrong = job_->is_done && !job_->error.empty();
    TORCH_CHECK_WITH(DistBackendError, !is_wrong, job_->error);
    return true;
  }

 private:
  const std::shared_ptr<Job> job_;
  const std::shared_ptr<State> state_;
  const Mark end_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

at::Tensor view_of(char* memory, int64_t bytes, at::ScalarType dtype) {
  const int64_t elements = bytes / static_cast<int64_t>(c10::elementSize(dtype));
  return at::from_blob(memory, {elements}, at::TensorOptions(dtype));
}

void reduce_slots(
    ReduceOp::RedOpType how, at::ScalarType dtype, const Slots& slots, char* into,
    int64_t bytes) {
  at::Tensor sum = view_of(into, bytes, dtype);
  sum.copy_(view_of(slots[0], bytes, dtype));
  for (size_t place = 1; place < slots.size(); ++place) {
    const at::Tensor part = view_of(slots[place], bytes, dtype);
    if (how == ReduceOp::PRODUCT) sum.mul_(part);
    else if (how == ReduceOp::MIN) at::minimum_out(sum, sum, part);
    else if (how == ReduceOp::MAX) at::maximum_out(sum, sum, part);
    else sum.add_(part);
  }
  if (how == ReduceOp::AVG) sum.div_(static_cast<int64_t>(slots.size()));
}

char* memory_of(const at::Tensor& tensor) {
  return static_cast<char*>(host_pointer(tensor.data_ptr()));
}

class ProcessGroup final : public c10d::Backend {
 public:
  ProcessGroup(
      c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout)
      : Backend(rank, size), store_(std::move(store)),
        options_(c10::make_intrusive<Options>(NAME, timeout)),
        watchdog_([state = state_] {
          watch(*state, number_from("TEST_DEVICE_ENDS_LATE", 1));
        }) {}
  ~ProcessGroup() override {
    abort();
    state_->has_ended = true;
    watchdog_.join();
  }
  const std::string getBackendName() const override { return NAME; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  // Pending collectives end with an error.
  void abort() override { state_->is_aborted = true; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const ReduceOp::RedOpType how = options.reduceOp;
    TORCH_CHECK(how <= ReduceOp::MAX, NAME, " has no reduction ", int(how));
    const at::ScalarType dtype = tensors.at(0).scalar_type();
    auto take = [how, dtype, into = memory_of(tensors[0])](
                    const Slots& slots, int64_t offset, int64_t bytes) {
      reduce_slots(how, dtype, slots, into + offset, bytes);
    };
    return begin(
        OpType::ALLREDUCE, tensors, tensors[0], c10::str("reduction ", int(how)), take,
        options.timeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto root = static_cast<int>(options.rootRank);
    return begin(
        OpType::BROADCAST, tensors, tensors.at(0), c10::str("from ", root),
        copy_from(root, tensors[0]), options.timeout);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    std::vector<char*> into;
    for (const at::Tensor& each : outputs.at(0)) {
      TORCH_CHECK(each.nbytes() == inputs.at(0).nbytes(), NAME, ": sizes differ");
      into.push_back(memory_of(each));
    }
    auto take = [into](const Slots& slots, int64_t offset, int64_t bytes) {
      for (size_t place = 0; place < slots.size(); ++place)
        memcpy(into[place] + offset, slots[place], bytes);
    };
    return begin(OpType::ALLGATHER, outputs[0], inputs[0], "", take, options.timeout);
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> outputs{output.view(-1).chunk(getSize())};
    Tensors inputs{input};
    return allgather(outputs, inputs, options);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    Tensors one{at::zeros(1, at::Device(TYPE, current_device()))};
    auto nothing = [](const Slots&, int64_t, int64_t) {};
    return begin(OpType::BARRIER, one, one[0], "", nothing, options.timeout);
  }

  // Two ranks have a communicator for their messages, one for both directions.
  WorkPtr send(Tensors& tensors, int to, int /*tag*/) override {
    return message(tensors, to, getRank() < to ? 0 : 1);
  }
  WorkPtr recv(Tensors& tensors, int from, int /*tag*/) override {
    return message(tensors, from, getRank() < from ? 1 : 0);
  }

 private:
  struct Line {
    std::shared_ptr<Communicator> communicator;
    c10::Stream stream;
    int64_t calls = 0;
  };

  static Take copy_from(int root, const at::Tensor& tensor) {
    return [root, into = memory_of(tensor)](
               const Slots& slots, int64_t offset, int64_t bytes) {
      memcpy(into + offset, slots[root], bytes);
    };
  }

  WorkPtr message(Tensors& tensors, int other, int root) {
    return begin(
        OpType::SEND, tensors, tensors.at(0), c10::str("from ", root),
        copy_from(root, tensors[0]), c10d::kUnsetTimeout,
        {std::min(getRank(), other), std::max(getRank(), other)});
  }

  Line& line_of(std::vector<int> ranks, int device) {
    if (ranks.empty()) {
      ranks.resize(getSize());
      std::iota(ranks.begin(), ranks.end(), 0);
    }
    auto found = lines_.find(ranks);
    if (found == lines_.end()) {
      const std::string name = c10::str(NAME, " ", getGroupUid(), " of ranks ", ranks);
      auto made = std::make_shared<Communicator>(*store_, name, ranks, getRank());
      found = lines_.emplace(ranks, Line{made, next_stream(device)}).first;
    }
    return found->second;
  }

  WorkPtr begin(
      OpType kind, const Tensors& outputs, const at::Tensor& input,
      const std::string& detail,
      const Take& take, Milliseconds timeout, const std::vector<int>& ranks = {}) {
    const int device = input.device().index();
    std::unique_lock<std::mutex> lock(calls_);
    TORCH_CHECK_WITH(
        DistBackendError, !state_->is_aborted, NAME, " was aborted ", state_->error);
    Line& line = line_of(ranks, device);
    TORCH_CHECK(line.stream.device() == input.device(), NAME, ": devices differ");
    block(line.stream, mark(current_stream(device)));
    for (const Tensors& used : {outputs, Tensors{input}})
      for (const at::Tensor& each : used) {
        TORCH_CHECK(each.is_non_overlapping_and_dense(), NAME, " needs dense tensors");
        device_allocator()->recordStream(each.storage().data_ptr(), line.stream);
      }
    const auto bytes = static_cast<int64_t>(input.nbytes());
    const std::string call = c10::str(
        c10d::opTypeToString(kind), " ", line.calls++, " of ", bytes, " bytes (",
        input.scalar_type(), " ", detail, ")");
    const bool has_timeout = timeout != c10d::kUnsetTimeout;
    const auto job = std::make_shared<Job>(
        c10::str(call, " by ", line.communicator->name), line.stream,
        has_timeout ? timeout : options_->timeout, line.communicator);
    {
      std::lock_guard<std::mutex> pending(state_->mutex);
      state_->pending.push_back(job);
    }
    const char* mine = memory_of(input);
    launch(line.stream, input.numel(), [job, call, bytes, take, mine, state = state_] {
      run(*job, call, bytes, mine, take, *state);
    });
    return c10::make_intrusive<Work>(getRank(), kind, job, state_, outputs);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::mutex calls_; // held while a call is enqueued
  std::map<std::vector<int>, Line> lines_;
  std::thread watchdog_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    Milliseconds timeout) {
  return c10::make_intrusive<ProcessGroup>(store, rank, size, timeout);
}

} // namespace test_device
