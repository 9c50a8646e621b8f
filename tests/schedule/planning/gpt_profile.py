"""Layers of a GPT from its size, by counting operations and bytes.

For planning before anything has been measured. Per token and block of width h, at
sequence length s: 24 h^2 operations in the matmuls with parameters (forward; as many
for the input gradients and for the weight gradients) and 4 s h in attention (8 s h
backward, all of it in I). Activations as Korthikanti et al. (Reducing Activation
Recomputation in Large Transformer Models, 2022) count them: 34 h bytes per token in 16
bits, and 5 a s for the attention scores of a heads where they are kept. Operations
outside matmuls are not counted, nor a device's gap to its peak rate: specify the rate
that its matmuls reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from elche.schedule.planning.profile import ANY_KIND, LayerProfile, LayerTimes

_STATE_BYTES = 4  # parameters are held in 32 bits, whatever the compute dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSize:
    """A GPT and its microbatch.

    Attributes:
        blocks: number of transformer blocks.
        hidden: width, h.
        heads: number of attention heads, a.
        vocabulary: size of the vocabulary.
        sequence: tokens per sample, s.
        samples: samples per microbatch.
        bytes_per_value: bytes per activation value; 2 in 16 bits, 4 in 32.
        keeps_scores: whether attention keeps its scores for the backward; flash
            attention does not.
    """

    blocks: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    samples: int = 1
    bytes_per_value: int = 2
    keeps_scores: bool = False

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.samples * self.sequence


def gpt_layers(size: GptSize) -> tuple[LayerProfile, ...]:
    """The embedding, the blocks and the head; times are counts of operations.

    A device's speed is then the operations per second that its matmuls reach.
    """
    hidden, tokens = size.hidden, size.tokens
    message = tokens * hidden * size.bytes_per_value
    matmuls, attention = 24 * hidden**2, 4 * size.sequence * hidden
    scores = 5 * size.heads * size.sequence if size.keeps_scores else 0
    scale = tokens * size.bytes_per_value / 2
    logits = 2 * hidden * size.vocabulary
    embedding = LayerProfile(
        name="embedding",
        times=_times(tokens, 0, 0, 0),
        activation_bytes=8 * tokens,  # the tokens themselves
        output_bytes=message,
        parameter_bytes=_STATE_BYTES * hidden * (size.vocabulary + size.sequence),
    )
    block = LayerProfile(
        name="block",
        times=_times(tokens, matmuls + attention, matmuls + 2 * attention, matmuls),
        activation_bytes=scale * (34 * hidden + scores),
        output_bytes=message,
        parameter_bytes=_STATE_BYTES * (12 * hidden**2 + 13 * hidden),
    )
    head = LayerProfile(
        name="head",
        times=_times(tokens, logits, logits, logits),
        activation_bytes=4 * tokens * size.vocabulary + message,
        output_bytes=4,
        parameter_bytes=_STATE_BYTES * hidden * (size.vocabulary + 2),
    )
    return (embedding, *(block,) * size.blocks, head)


def _times(
    tokens: int, forward: int, inputs: int, weights: int
) -> dict[str, LayerTimes]:
    """Operations of F, I and W of a microbatch, from those per token."""
    times = LayerTimes(
        forward_s=tokens * forward,
        input_gradient_s=tokens * inputs,
        weight_gradient_s=tokens * weights,
    )
    return {ANY_KIND: times}
