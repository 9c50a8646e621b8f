// The test device's process group, for `torch.distributed.Backend.register_backend`.
#pragma once

#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace test_device {

c10::intrusive_ptr<c10d::Backend> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout);

} // namespace test_device
