// Operators of models that torch leaves to each accelerator: convolution, recurrent
// cells, dropout.
#include "operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace test_device {
namespace {

using torch::jit::Stack;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

void convolution(const c10::OperatorHandle& /*op*/, Stack* stack) {
  static const auto same =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run(same, stack);
}

void convolution_backward(const c10::OperatorHandle& /*op*/, Stack* stack) {
  static const auto same =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // It has one argument more, the sizes of the bias, behind the first three of ten.
  const int64_t channels = torch::jit::peek(*stack, 0, 10).toTensor().size(1);
  const bool has_bias = stack->back().toBoolList().get(2);
  const auto sizes = has_bias ? c10::IValue(std::vector<int64_t>{channels}) : c10::IValue();
  stack->insert(stack->end() - 7, sizes);
  run(same, stack);
}

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto gates =
      (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid();
  const auto cell = gates[2].tanh(), out = gates[3].sigmoid();
  const auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const MaybeTensor& grad_hy, const MaybeTensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto zeros = at::zeros_like(cy), squashed = cy.tanh();
  const auto of_h = grad_hy && grad_hy->defined() ? *grad_hy : zeros;
  const auto of_c = (grad_cy && grad_cy->defined() ? *grad_cy : zeros) +
      of_h * out * (1 - squashed * squashed);
  const auto grad_gates = at::cat(
      {of_c * cell * in * (1 - in), of_c * cx * forget * (1 - forget),
       of_c * in * (1 - cell * cell), of_h * squashed * out * (1 - out)},
      1);
  return {grad_gates, of_c * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (of_input[0] + of_hidden[0]).sigmoid();
  const auto keep = (of_input[1] + of_hidden[1]).sigmoid();
  const auto fresh = (of_input[2] + reset * of_hidden[2]).tanh();
  const auto workspace = at::cat({reset, keep, fresh, hx, of_hidden[2]}, 1);
  return {fresh + keep * (hx - fresh), workspace};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &reset = saved[0], &keep = saved[1], &fresh = saved[2], &hx = saved[3];
  const auto of_fresh = grad * (1 - keep) * (1 - fresh * fresh);
  const auto of_keep = grad * (hx - fresh) * keep * (1 - keep);
  const auto of_reset = of_fresh * saved[4] * reset * (1 - reset);
  const auto of_input = at::cat({of_reset, of_keep, of_fresh}, 1);
  const auto of_hidden = at::cat({of_reset, of_keep, of_fresh * reset}, 1);
  const auto bias = [&](const Tensor& gates) {
    return has_bias ? gates.sum(0) : Tensor();
  };
  return {of_input, of_hidden, grad * keep, bias(of_input), bias(of_hidden)};
}

std::tuple<Tensor, Tensor> native_dropout(
    const Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::ones_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask};
  mask.bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// The CPU's writes what it has not reduced into its result, which it resizes.
Tensor mse_loss(const Tensor& input, const Tensor& target, int64_t reduction) {
  const auto squares = (input - target).square();
  if (reduction == at::Reduction::Mean) return squares.mean();
  return reduction == at::Reduction::Sum ? squares.sum() : squares;
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using torch::CppFunction;
  const auto forward = CppFunction::makeFromBoxedFunction<&convolution>;
  const auto backward = CppFunction::makeFromBoxedFunction<&convolution_backward>;
  m.impl("convolution_overrideable", forward());
  m.impl("convolution_backward_overrideable", backward());
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("native_dropout", native_dropout);
  m.impl("mse_loss", mse_loss);
}

} // namespace test_device
