// A process group of the test device with NCCL's contract.
//
//   host              current stream       communicator's stream
//   allreduce ──────► mark ──────────────► waits for the mark
//   returns at once                        waits for its turn on the device
//   wait ───────────► waits for the end ◄─ exchanges with other ranks, or is late and aborts
//
// One collective at a time runs on a device, as NCCL may have it: ranks that use two
// communicators in different orders hang. Dead peers are not noticed. A late collective
// aborts its group and, as torch does under NCCL, ends the process.
#include "process_group.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <iostream>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

namespace test_device {
namespace {

using namespace std::chrono_literals;
using c10d::OpType;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
constexpr const char* NAME = "tdccl";

int number_from(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value ? std::atoi(value) : otherwise;
}

// What the host and the streams' threads know of a group.
struct State {
  void fail(const std::string& said) { // the first call counts
    std::lock_guard<std::mutex> lock(mutex);
    if (error_.empty()) error_ = said;
    is_aborted = true;
  }
  std::string error() {
    std::lock_guard<std::mutex> lock(mutex);
    return error_;
  }
  std::atomic<bool> is_aborted = false;
  const int most_at_a_time = number_from("TEST_DEVICE_COLLECTIVES", 1);
  const bool ends_late = number_from("TEST_DEVICE_ENDS_LATE", 1);

 private:
  std::mutex mutex;
  std::string error_;
};

// A collective. It has only host views of tensors: to drop another may need the GIL.
struct Job {
  std::string state() const { // for errors
    std::string said = c10::str(name, " by ", communicator->name, waits_for.load());
    for (const int rank : communicator->missing()) said += c10::str(": rank ", rank, " is missing");
    return said + " (do all ranks use their groups in the same order?)";
  }
  const std::string name;
  const int device;
  const std::shared_ptr<Communicator> communicator;
  const std::shared_ptr<State> group;
  const Clock::time_point deadline;
  std::atomic<const char*> waits_for{": its tensors are not computed"};
  std::atomic<bool> is_done{false};
};

// Runs a collective in its stream's thread.
void run(Job& job, const at::Tensor& input, const Take& take) {
  static std::array<std::atomic<int>, MAX_DEVICES> running;
  const auto await = [&](const auto& is_ready) {
    auto pause = 20us;
    while (!is_ready()) {
      if (!job.group->is_aborted && Clock::now() > job.deadline) {
        job.group->fail("timed out: " + job.state());
        std::cerr << NAME << " " << job.group->error() << std::endl;
        if (job.group->ends_late) std::abort();
      }
      if (job.group->is_aborted) return false;
      std::this_thread::sleep_for(pause);
      if (pause < 2ms) pause += pause / 8;
    }
    return true;
  };
  job.waits_for = ": another collective runs on its device";
  const bool has_turn = await([&] {
    const bool is_free = running[job.device]++ < job.group->most_at_a_time;
    if (!is_free) running[job.device]--;
    return is_free;
  });
  if (has_turn) job.waits_for = "";
  try {
    job.is_done = has_turn && job.communicator->exchange(job.name, input, take, await);
  } catch (const std::exception& error) {
    job.group->fail(error.what());
  }
  if (has_turn) running[job.device]--;
  if (!job.is_done) job.group->fail("aborted: " + job.state());
}

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, const c10::Stream& stream, std::shared_ptr<Job> job,
       const Tensors& outputs)
      : c10d::Work(rank, type), job_(std::move(job)), end_(mark(stream)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{stream.device()})) {
    const c10::StreamGuard current(stream);
    future_->markCompleted(c10::IValue(outputs)); // waits for the stream, as NCCL's
  }
  bool isCompleted() override { return is_reached(end_); }
  bool isSuccess() const override { return is_reached(end_) && job_->is_done; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void synchronize() override { block(current_stream(job_->device), end_); }

  // With a timeout the host waits and, as under NCCL, aborts the group when it is over.
  bool wait(Milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout && end_.wait_for(timeout) != std::future_status::ready)
      job_->group->fail("timed out in a blocking wait: " + job_->state());
    if (opType_ == OpType::BARRIER) end_.wait();
    const bool is_wrong = job_->group->is_aborted && !isSuccess();
    TORCH_CHECK_WITH(DistBackendError, !is_wrong, job_->group->error());
    return true;
  }

 private:
  const std::shared_ptr<Job> job_;
  const Mark end_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A tensor's memory as the streams' threads see it, in one dimension.
at::Tensor flat(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), NAME, " needs dense tensors");
  return at::from_blob(host_pointer(tensor.data_ptr()), {tensor.numel()}, tensor.scalar_type());
}

class ProcessGroup final : public c10d::Backend {
 public:
  ProcessGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout)
      : Backend(rank, size), store_(std::move(store)),
        options_(c10::make_intrusive<Options>(NAME, timeout)) {}
  ~ProcessGroup() override { abort(); }
  const std::string getBackendName() const override { return NAME; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  // Pending collectives end with an error.
  void abort() override { state_->is_aborted = true; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, NAME, " has no reduction but sums");
    const auto take = [into = flat(tensors.at(0))](const at::Tensor& rows) {
      into.copy_(rows.sum(0, false, rows.scalar_type()));
    };
    return begin(OpType::ALLREDUCE, tensors, tensors[0], 0, take, options.timeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    return begin(
        OpType::BROADCAST, tensors, tensors.at(0), root, copy_row(root, tensors[0]),
        options.timeout);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    Tensors into;
    for (const at::Tensor& each : outputs.at(0)) into.push_back(flat(each));
    const auto take = [into](const at::Tensor& rows) {
      for (size_t place = 0; place < into.size(); place++)
        into[place].copy_(rows[static_cast<int64_t>(place)]);
    };
    return begin(OpType::ALLGATHER, outputs[0], inputs.at(0), 0, take, options.timeout);
  }
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> outputs{output.view(-1).chunk(getSize())};
    Tensors inputs{input};
    return allgather(outputs, inputs, options);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    const auto one = at::zeros(1, at::Device(TYPE, current_device()));
    return begin(OpType::BARRIER, {one}, one, 0, [](const at::Tensor&) {}, options.timeout);
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

  static Take copy_row(int root, const at::Tensor& tensor) {
    return [root, into = flat(tensor)](const at::Tensor& rows) { into.copy_(rows[root]); };
  }

  WorkPtr message(Tensors& tensors, int other, int root) {
    return begin(
        OpType::SEND, tensors, tensors.at(0), root, copy_row(root, tensors[0]),
        c10d::kUnsetTimeout, {std::min(getRank(), other), std::max(getRank(), other)});
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

  // Enqueues a collective; `detail` is what must be the same on all ranks as well.
  WorkPtr begin(
      OpType kind, const Tensors& outputs, const at::Tensor& input, int detail, const Take& take,
      Milliseconds timeout, const std::vector<int>& ranks = {}) {
    const int device = input.device().index();
    const std::lock_guard<std::mutex> lock(calls_);
    TORCH_CHECK_WITH(
        DistBackendError, !state_->is_aborted, NAME, " was aborted ", state_->error());
    TORCH_CHECK(input.nbytes() <= SLOT_BYTES, NAME, " takes at most ", SLOT_BYTES, " bytes");
    Line& line = line_of(ranks, device);
    TORCH_CHECK(line.stream.device() == input.device(), NAME, ": devices differ");
    block(line.stream, mark(current_stream(device)));
    for (const at::Tensor& each : outputs) each.record_stream(line.stream);
    input.record_stream(line.stream);
    const std::string name = c10::str(
        c10d::opTypeToString(kind), " ", line.calls++, " of ", input.nbytes(), " bytes (",
        input.scalar_type(), " ", detail, ")");
    const auto after = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
    const std::shared_ptr<Job> job(
        new Job{name, device, line.communicator, state_, Clock::now() + after});
    launch(line.stream, input.numel(), [job, view = flat(input), take] { run(*job, view, take); });
    return c10::make_intrusive<Work>(getRank(), kind, line.stream, job, outputs);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::mutex calls_; // held while a call is enqueued
  std::map<std::vector<int>, Line> lines_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout) {
  return c10::make_intrusive<ProcessGroup>(store, rank, size, timeout);
}

} // namespace test_device
