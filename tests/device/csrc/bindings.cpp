// What Python calls.
#include "process_group.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

namespace test_device {
namespace {

using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

void set_device_count(int count) {
  TORCH_CHECK(
      count >= 1 && count <= MAX_DEVICES,
      "test device: expected 1 to ", MAX_DEVICES, " devices, got ", count);
  settings().device_count = count;
}

// Appends a task that waits until the function that this returns is called.
pybind11::object hold(int device, int64_t stream) {
  auto released = std::make_shared<std::promise<void>>();
  enqueue(stream_of(device, stream), [held = released->get_future().share()] { held.wait(); });
  return pybind11::cpp_function([released] { released->set_value(); });
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_hooks();
  m.def("set_delays", [](int64_t main_us, int64_t side_us, uint64_t seed) {
    settings().main_delay_us = main_us;
    settings().side_delay_us = side_us;
    settings().delay_seed = seed;
  });
  m.def("set_speed", [](int device, double kernel_us, double element_ns) {
    settings().kernel_us.at(device) = kernel_us;
    settings().element_ns.at(device) = element_ns;
  });
  m.def("set_memory_bytes", [](int device, size_t bytes) {
    settings().memory_bytes.at(device) = bytes;
  });
  m.def("set_device_count", set_device_count);
  m.def("device_count", [] { return settings().device_count.load(); });
  m.def("current_device", current_device);
  m.def("set_device", exchange_device);
  m.def("default_generator", [](int device) {
    PyObject* made = THPGenerator_Wrap(default_generator(device));
    return pybind11::reinterpret_steal<pybind11::object>(made);
  });
  m.def("is_in_bad_fork", is_in_bad_fork);
  m.def("kernel_count", kernel_count);
  m.def("host_operator_counts", host_operator_counts);
  m.def("make_process_group", make_process_group, NoGil());
  m.def("hold", hold);
  m.def("stop", stop, NoGil());
}

} // namespace
} // namespace test_device
