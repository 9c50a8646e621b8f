// One communicator of the test device's process group: ranks that exchange memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace test_device {

// The ranks' shared memory is anonymous (memfd), found through /proc and holds atomics
// but no locks: nothing remains of it and nobody is locked out, however a rank ends.
class Communicator {
 public:
  using Slots = std::vector<char*>; // what the ranks have put there, by place
  using Take = std::function<void(const Slots&, int64_t offset, int64_t bytes)>;

  // Blocks the host until all ranks have called it, as making one of NCCL's does.
  Communicator(c10d::Store& store, std::string name, std::vector<int> ranks, int rank);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Runs a collective in the calling thread, chunk by chunk; false if stopped.
  // Where the ranks' calls differ, NCCL hangs or returns nonsense; this raises
  // std::runtime_error.
  bool exchange(
      const std::string& call, int64_t bytes, const char* mine, const Take& take,
      const std::atomic<bool>& is_stopped);
  // Shows others that this rank waits for its device.
  void set_held(bool is_held);
  // The ranks that have not arrived at the call that waits for them.
  std::string missing() const;

  const std::string name;
  const std::vector<int> ranks; // in the group, by place

 private:
  struct Seat;
  Seat& seat(size_t place) const;
  bool await(
      const std::atomic<bool>& is_stopped, std::atomic<int64_t> Seat::* count,
      int64_t round);
  void advance(std::atomic<int64_t>& count);

  size_t place_, size_bytes_;
  char* memory_ = nullptr;
};

} // namespace test_device
