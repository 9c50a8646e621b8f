// Chunks through shared memory: all ranks post one, all take them, and so on.
#include "communicator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace test_device {
namespace {

constexpr int64_t CHUNK_BYTES = 1 << 17; // 2^15 floats: torch uses no more threads
constexpr size_t HEAD_BYTES = 1 << 14; // the pulse and the seats
constexpr size_t SEAT_BYTES = 128;
constexpr timespec LOOK{0, 5'000'000}; // how often a wait looks whether it is stopped

} // namespace

struct Communicator::Seat {
  std::atomic<int64_t> posted; // chunks that this rank has put into its slot
  std::atomic<int64_t> taken; // chunks for which it needs nobody's slot any more
  std::atomic<bool> is_held;
  char call[96];
};

Communicator::Communicator(
    c10d::Store& store, std::string name_, std::vector<int> ranks_, int rank)
    : name(std::move(name_)), ranks(std::move(ranks_)),
      place_(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin()),
      size_bytes_(HEAD_BYTES + ranks.size() * CHUNK_BYTES) {
  static_assert(sizeof(Seat) <= SEAT_BYTES);
  TORCH_CHECK((ranks.size() + 1) * SEAT_BYTES <= HEAD_BYTES, "expected < 128 ranks");
  const auto key = [&](size_t place) { return c10::str(ranks, "/", place); };
  const int memory = place_ == 0
      ? memfd_create("test_device_group", MFD_CLOEXEC)
      : open(store.get_to_str(key(0)).c_str(), O_RDWR | O_CLOEXEC);
  const bool is_open = memory >= 0 && ftruncate(memory, size_bytes_) == 0;
  TORCH_CHECK(is_open, name, ": no shared memory: ", strerror(errno));
  void* mapped = mmap(
      nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory,
      0);
  TORCH_CHECK(mapped != MAP_FAILED, name, ": cannot map memory: ", strerror(errno));
  memory_ = static_cast<char*>(mapped);
  store.set(key(place_), c10::str("/proc/", getpid(), "/fd/", memory));
  for (size_t place = 0; place < ranks.size(); ++place) store.get_to_str(key(place));
  close(memory); // all have mapped it
}

Communicator::~Communicator() {
  munmap(memory_, size_bytes_);
}

Communicator::Seat& Communicator::seat(size_t place) const {
  return *reinterpret_cast<Seat*>(memory_ + (place + 1) * SEAT_BYTES);
}

// The pulse, a futex in the first bytes, changes whenever a count does.
void Communicator::advance(std::atomic<int64_t>& count) {
  auto* pulse = reinterpret_cast<std::atomic<uint32_t>*>(memory_);
  count.fetch_add(1);
  pulse->fetch_add(1);
  syscall(SYS_futex, pulse, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool Communicator::await(
    const std::atomic<bool>& is_stopped, std::atomic<int64_t> Seat::* count,
    int64_t round) {
  auto* pulse = reinterpret_cast<std::atomic<uint32_t>*>(memory_);
  while (!is_stopped) {
    const uint32_t seen = *pulse;
    size_t place = 0;
    while (place < ranks.size() && seat(place).*count >= round) ++place;
    if (place == ranks.size()) return true;
    syscall(SYS_futex, pulse, FUTEX_WAIT, seen, &LOOK, nullptr, 0);
  }
  return false;
}

bool Communicator::exchange(
    const std::string& call, int64_t bytes, const char* mine, const Take& take,
    const std::atomic<bool>& is_stopped) {
  Seat& own = seat(place_);
  Slots slots;
  for (size_t place = 0; place < ranks.size(); ++place)
    slots.push_back(memory_ + HEAD_BYTES + place * CHUNK_BYTES);
  int64_t offset = 0;
  do {
    const int64_t part = std::min(CHUNK_BYTES, bytes - offset);
    const int64_t round = own.posted + 1;
    if (!await(is_stopped, &Seat::taken, round - 1)) return false;
    if (mine != nullptr) memcpy(slots[place_], mine + offset, part);
    call.copy(own.call, sizeof(own.call) - 1);
    advance(own.posted);
    if (!await(is_stopped, &Seat::posted, round)) return false;
    for (size_t place = 0; place < ranks.size(); ++place) {
      const std::string other = seat(place).call;
      if (other != own.call)
        throw std::runtime_error(c10::str(
            name, " got different collectives: rank ", ranks[place_], " called ", call,
            ", rank ", ranks[place], " ", other));
    }
    take(slots, offset, part);
    advance(own.taken);
    offset += part;
  } while (offset < bytes);
  return true;
}

void Communicator::set_held(bool is_held) {
  seat(place_).is_held = is_held;
}

std::string Communicator::missing() const {
  const Seat& own = seat(place_);
  const int64_t round = own.posted;
  const auto count = own.taken < round ? &Seat::posted : &Seat::taken;
  std::string found;
  for (size_t place = 0; place < ranks.size(); ++place) {
    const Seat& other = seat(place);
    if (other.*count >= round) continue;
    found += c10::str(found.empty() ? "" : ", ", "rank ", ranks[place], " is missing");
    if (other.is_held)
      found += " (its device runs another collective: do all ranks use their groups"
               " in the same order?)";
  }
  return found;
}

} // namespace test_device
