// Operators of models that torch leaves to each accelerator, and its lists for autocast.
#include "device.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/native_dropout_native.h>
#include <torch/library.h>

namespace test_device {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto gates =
      (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cy.tanh(), cy, Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (of_input[0] + of_hidden[0]).sigmoid();
  const auto keep = (of_input[1] + of_hidden[1]).sigmoid();
  const auto fresh = (of_input[2] + reset * of_hidden[2]).tanh();
  return {fresh + keep * (hx - fresh), Tensor()};
}

// The CPU's writes what it has not reduced into its result, which it resizes.
Tensor mse_loss(const Tensor& input, const Tensor& target, int64_t reduction) {
  const auto squares = (input - target).square();
  if (reduction == at::Reduction::Mean) return squares.mean();
  return reduction == at::Reduction::Sum ? squares.sum() : squares;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("mse_loss", mse_loss);
  m.impl("native_dropout", at::native::native_dropout_cpu); // of operators of any device
}

// Autograd sees what the cells are made of: they need no backward operators.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}

} // namespace
} // namespace test_device
