// Operators that other files call or count.
#pragma once

#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>

namespace test_device {

// Runs any operator of the dispatcher on this device: as a task of the current stream where
// torch knows the shapes of its results, else on the host.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// Calls, by operator, that made the host wait.
std::map<std::string, int64_t> host_operator_counts();

} // namespace test_device
