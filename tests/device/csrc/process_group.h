// The test device's process group, for `torch.distributed.Backend.register_backend`, and its
// communicators: ranks that exchange memory.
#pragma once

#include "device.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace test_device {

c10::intrusive_ptr<c10d::Backend> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout);

using Take = std::function<void(const at::Tensor& rows)>; // the ranks' inputs, a row each
constexpr size_t HEAD_BYTES = 1 << 14, SLOT_BYTES = 1 << 27; // sparse

// A seat and a slot for each rank. Their memory is anonymous (memfd), found through /proc, and
// holds atomics but no locks: nothing remains of it and nobody is locked out, however a rank ends.
class Communicator {
 public:
  // Blocks the host until all ranks have called it, as making one of NCCL's does.
  Communicator(c10d::Store& store, std::string name_, std::vector<int> ranks_, int rank)
      : name(std::move(name_)), ranks(std::move(ranks_)),
        place_(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin()),
        size_bytes_(HEAD_BYTES + ranks.size() * SLOT_BYTES) {
    TORCH_CHECK(ranks.size() * sizeof(Seat) <= HEAD_BYTES, "expected at most 128 ranks");
    const auto key = [&](size_t place) { return c10::str(ranks, "/", place); };
    const int file = place_ == 0
        ? memfd_create("test_device_group", MFD_CLOEXEC)
        : open(store.get_to_str(key(0)).c_str(), O_RDWR | O_CLOEXEC);
    const bool is_open = file >= 0 && ftruncate(file, size_bytes_) == 0;
    TORCH_CHECK(is_open, name, ": no shared memory: ", strerror(errno));
    const int flags = MAP_SHARED | MAP_NORESERVE;
    void* mapped = mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, flags, file, 0);
    TORCH_CHECK(mapped != MAP_FAILED, name, ": cannot map memory: ", strerror(errno));
    memory_ = static_cast<char*>(mapped);
    store.set(key(place_), c10::str("/proc/", getpid(), "/fd/", file));
    for (size_t place = 0; place < ranks.size(); place++) store.get_to_str(key(place));
    close(file); // all have mapped it
  }
  ~Communicator() { munmap(memory_, size_bytes_); }

  // Puts this rank's input into its slot and calls `take` with the inputs of all; false if
  // `await` gave up. Where the ranks' calls differ, NCCL hangs or returns nonsense; this throws.
  template <class Await>
  bool exchange(
      const std::string& call, const at::Tensor& input, const Take& take, const Await& await) {
    Seat& own = seat(place_);
    const auto all_are_here = [&] { return missing().empty(); };
    if (!await(all_are_here)) return false; // to have read the slots of the last call
    memcpy(slot(place_), input.data_ptr(), input.nbytes());
    strncpy(own.call, call.c_str(), sizeof(own.call) - 1);
    own.posted++;
    if (!await(all_are_here)) return false;
    for (size_t place = 0; place < ranks.size(); place++)
      if (strcmp(seat(place).call, own.call) != 0)
        throw std::runtime_error(c10::str(
            name, " got different collectives: rank ", ranks[place_], " called ", own.call,
            ", rank ", ranks[place], " ", seat(place).call));
    const int64_t row = SLOT_BYTES / input.element_size(), count = ranks.size();
    take(at::from_blob(slot(0), {count, input.numel()}, {row, 1}, input.options()));
    own.taken++;
    return true;
  }

  // The ranks that have not arrived where this rank waits for them.
  std::vector<int> missing() const {
    const Seat& own = seat(place_);
    const auto count = own.taken < own.posted ? &Seat::posted : &Seat::taken;
    std::vector<int> found;
    for (size_t place = 0; place < ranks.size(); place++)
      if (seat(place).*count < own.posted) found.push_back(ranks[place]);
    return found;
  }

  const std::string name;
  const std::vector<int> ranks; // in the group, by place

 private:
  struct Seat {
    std::atomic<int64_t> posted; // inputs that this rank has put into its slot
    std::atomic<int64_t> taken; // calls for which it needs nobody's slot any more
    char call[112];
  };
  Seat& seat(size_t place) const { return reinterpret_cast<Seat*>(memory_)[place]; }
  char* slot(size_t place) const { return memory_ + HEAD_BYTES + place * SLOT_BYTES; }

  const size_t place_, size_bytes_;
  char* memory_ = nullptr;
};

} // namespace test_device
