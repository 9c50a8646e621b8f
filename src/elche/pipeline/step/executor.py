"""Executor of one rank's part of a lowered schedule.

It runs the actions in the schedule's order. The transport receives messages in the
background; the executor only waits for a message when a computation needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from elche.comm.transport.messages import Address, Message
from elche.comm.transport.point_to_point import PointToPoint
from elche.errors import ConfigError
from elche.pipeline.cutting.own_loss import OwnLoss
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.stage import LayerCaches
from elche.pipeline.trees import as_plain, flatten, map_tensors, unflatten
from elche.schedule.actions import Kind, Schedule, StageAction
from elche.torch_internals.batches import tree_leaves

_FORWARD_KINDS = frozenset({Kind.FORWARD, Kind.SEND_F, Kind.RECV_F})
_DIRECTIONS = {Kind.SEND_F: 0, Kind.RECV_F: 0, Kind.SEND_B: 1, Kind.RECV_B: 1}


@dataclass(frozen=True)
class StepInput:
    """Input of this rank's stages in one step.

    Attributes:
        inputs: input of each microbatch, on the rank of the first stage.
        targets: target of each microbatch, on the rank of the last stage.
        keywords: arguments of each microbatch for the layers of this rank.
        weights: weight of each microbatch's loss in the step's loss, including the loss
            scale.
        input_gradients: whether to return the gradients of the inputs.
        keeps_outputs: whether training also returns the outputs.
        microbatches: number of microbatches with samples; None means all in the
            schedule.
        timeout_s: deadline (s) of each wait.
        caches: caches of this rank's layers during generation; None means no caches.
    """

    inputs: Sequence[Any] = ()
    targets: Sequence[Any] = ()
    keywords: Sequence[Mapping[str, Any]] = ()
    weights: Sequence[float] = ()
    input_gradients: bool = False
    keeps_outputs: bool = False
    microbatches: int | None = None
    timeout_s: float = 300.0
    caches: LayerCaches | None = None


@dataclass
class StepResults:
    """Results of one rank's part of a step.

    Attributes:
        losses: unweighted losses by microbatch, on the rank of the last stage.
        outputs: outputs by microbatch, on the rank of the last stage; only in
            evaluation, and in steps with `keeps_outputs`.
        input_gradients: gradients by microbatch, one per input tensor that can have
            one; on the rank of the first stage.
    """

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    input_gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)


@final
@dataclass
class Executor:
    """One rank's stages and the messages between them.

    Attributes:
        rank: this rank.
        schedule: the lowered schedule.
        stages: this rank's stages by index.
        transport: messages to other ranks; None if one rank holds all stages.
        loss_fn: function of output and target; called on the last stage.
        device: this rank's device.
        trace: actions of the last step, with begin and end (time.monotonic()).
        after_stage: callback in training for each stage with complete gradients.
    """

    rank: int
    schedule: Schedule
    stages: Mapping[int, StageBackward]
    transport: PointToPoint | None
    loss_fn: Callable[[Any, Any], Any]
    device: torch.device
    trace: list[tuple[StageAction, float, float]] = field(default_factory=list)
    after_stage: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self._actions = self.schedule.actions[self.rank]
        self._through = _stages_through(self._actions)

    def finished_at(self, stage: int) -> int:
        """Position in this rank's actions at which a stage's gradients are complete."""
        return next(at for at, stages in self._through.items() if stage in stages)

    def train(self, given: StepInput) -> StepResults:
        """Runs the schedule and adds gradients to the parameters' ``grad``."""
        for stage in self.stages.values():
            stage.begin_step()
        run = _Run(self, given, is_training=True)
        self._carry_out(run, self._actions)
        for stage in self.stages.values():
            stage.end_step()
        return run.results

    @torch.no_grad()
    def evaluate(self, given: StepInput) -> StepResults:
        """Runs only the schedule's forwards, without gradients."""
        run = _Run(self, given, is_training=False)
        forwards = [one for one in self._actions if one.kind in _FORWARD_KINDS]
        self._carry_out(run, forwards)
        return run.results

    def _carry_out(self, run: _Run, actions: Sequence[StageAction]) -> None:
        """Runs actions, except those of microbatches without samples in this step.

        This cannot deadlock if the complete list does not: the remaining actions keep
        their order, and sends are dropped together with their receives. Stages are
        reported complete at their positions in the complete list, because replicas sum
        in that order.
        """
        self.trace = []
        count = run.given.microbatches
        for position, one in enumerate(actions):
            if count is None or one.microbatch < count:
                started_s = time.monotonic()
                run.do(one)
                self.trace.append((one, started_s, time.monotonic()))
            if run.is_training and self.after_stage is not None:
                for stage in self._through.get(position, ()):
                    self.after_stage(stage)
        if self.transport is not None:
            self.transport.flush(run.given.timeout_s)

    def address(self, one: StageAction) -> Address:
        """Destination of a send, or source of a receive."""
        forwards = one.kind in (Kind.SEND_F, Kind.RECV_F)
        sends = one.kind in (Kind.SEND_F, Kind.SEND_B)
        other = one.stage + (1 if forwards == sends else -1)
        sender = one.stage if sends else other
        count = self.schedule.num_microbatches
        tag = (2 * sender + _DIRECTIONS[one.kind]) * count + one.microbatch
        what = "activation" if forwards else "gradient"
        return Address(
            rank=self.schedule.placement[other],
            tag=tag,
            what=f"the {what} of microbatch {one.microbatch} between stages "
            f"{min(one.stage, other)} and {max(one.stage, other)} ({one})",
        )

    def loss(self, value: Any, target: Any, microbatch: int) -> torch.Tensor:
        """Computes the loss of one microbatch."""
        found = self.loss_fn(value, target)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            is_tensor = isinstance(found, torch.Tensor)
            shown = f"shape {list(found.shape)}" if is_tensor else type(found).__name__
            raise ConfigError(
                f"expected loss_fn to return a scalar tensor, got {shown} for "
                f"microbatch {microbatch}; take the mean or the sum over samples"
            )
        if found.is_complex():
            raise ConfigError(
                f"expected loss_fn to return a real number, got {found.dtype} for "
                f"microbatch {microbatch}"
            )
        return found.reshape(())


def _stages_through(actions: Sequence[StageAction]) -> dict[int, list[int]]:
    """Stages whose gradients are complete, by position in the actions.

    The position is after a stage's last backward and after the messages that follow it,
    because other ranks wait for those.
    """
    last = {
        one.stage: place
        for place, one in enumerate(actions)
        if one.kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT)
    }
    found: dict[int, list[int]] = {}
    for stage, place in last.items():
        while place + 1 < len(actions) and not actions[place + 1].is_compute:
            place += 1
        found.setdefault(place, []).append(stage)
    return found


def _zero(value: Any, loss: torch.Tensor) -> torch.Tensor:
    """Loss of zero with zero gradients; 0 * NaN would be NaN."""
    tensors = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
    parts = [one.reshape(-1)[:0].sum() for one in tensors if one.requires_grad]
    return sum((one.to(loss.dtype) for one in parts), loss.detach().new_zeros(()))


@final
class _Run:
    """A step in progress on one rank."""

    def __init__(self, owner: Executor, given: StepInput, is_training: bool) -> None:
        self.given, self.is_training = given, is_training
        self.results = StepResults()
        self._owner = owner
        self._last_stage = owner.schedule.num_stages - 1
        self._split = {
            (one.stage, one.microbatch)
            for one in owner.schedule.actions[owner.rank]
            if one.kind is Kind.BACKWARD_INPUT
        }
        self._outgoing: dict[tuple[int, int, int], Message] = {}

    def do(self, one: StageAction) -> None:
        """Executes one action."""
        kind = one.kind
        if kind is Kind.FORWARD:
            self._forward(one)
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            self._send(one)
        if kind in (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD):
            self._backward_input(one)
        if kind in (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD):
            self._owner.stages[one.stage].backward_weight(one.microbatch)

    def _forward(self, one: StageAction) -> None:
        stage, microbatch = one.stage, one.microbatch
        runner = self._owner.stages[stage]
        given = self._input(one)
        words = dict(self.given.keywords[microbatch]) if self.given.keywords else {}
        if self.is_training:
            is_split = (stage, microbatch) in self._split
            value = runner.forward(microbatch, given, words, is_split)
        else:
            value = runner.stage.run(
                *(unflatten(given.structure, given.tensors), microbatch, words),
                self.given.caches,
            )
        if stage == self._last_stage:
            self._finish(runner, microbatch, value)
        elif self.is_training:
            self._outgoing[stage, 0, microbatch] = runner.keep(microbatch, value)
        else:
            tensors, structure = flatten(value, f"the output of stage {stage}")
            message = Message(tuple(tensors), structure, (False,) * len(tensors))
            self._outgoing[stage, 0, microbatch] = message

    def _finish(self, runner: StageBackward, microbatch: int, value: Any) -> None:
        """Computes the last stage's loss, which has no outgoing message."""
        if not self.is_training or self.given.keeps_outputs:
            plain = map_tensors(as_plain(value), torch.Tensor.detach)
            self.results.outputs[microbatch] = plain
        loss_fn, target = self._owner.loss_fn, None
        if not isinstance(loss_fn, OwnLoss):
            if not self.given.targets:
                return
            target = self.given.targets[microbatch]
        elif loss_fn(value) is None:
            if self.is_training:
                raise ConfigError("the model returned no 'loss'; give it labels")
            return
        loss = self._owner.loss(value, target, microbatch)
        self.results.losses[microbatch] = loss.detach()
        if not self.is_training:
            return
        if not loss.requires_grad:
            raise ConfigError(
                f"the loss of microbatch {microbatch} depends on no parameter that "
                "requires a gradient; expected trainable layers, and a loss_fn that "
                "does not detach the output"
            )
        if not self.given.weights[microbatch]:
            loss = _zero(value, loss)
        runner.keep(microbatch, loss)

    def _input(self, one: StageAction) -> Message:
        if one.stage > 0:
            return self._incoming(one, one.stage - 1, Kind.RECV_F)
        value = self.given.inputs[one.microbatch]
        tensors, structure = flatten(value, "the batch")
        wanted = self.given.input_gradients
        needs = tuple(
            wanted and (t.is_floating_point() or t.is_complex()) for t in tensors
        )
        return Message(tuple(tensors), structure, needs)

    def _incoming(self, one: StageAction, stage: int, kind: Kind) -> Message:
        """Input of this action from another stage, moved to this rank's device."""
        owner = self._owner
        if owner.schedule.placement[stage] == owner.rank:
            return self._outgoing.pop((stage, _DIRECTIONS[kind], one.microbatch))
        address = owner.address(StageAction(one.stage, kind, one.microbatch))
        assert owner.transport is not None, "the schedule is for as many ranks as run"
        message = owner.transport.receive(address, self.given.timeout_s)
        moved = tuple(tensor.to(owner.device) for tensor in message.tensors)
        return Message(moved, message.structure, message.needs_grad)

    def _send(self, one: StageAction) -> None:
        way, owner = _DIRECTIONS[one.kind], self._owner
        message = self._outgoing.pop((one.stage, way, one.microbatch))
        assert owner.transport is not None, "the schedule is for as many ranks as run"
        owner.transport.send(owner.address(one), message, self.given.timeout_s)

    def _gradients(self, one: StageAction) -> list[torch.Tensor | None]:
        if one.stage < self._last_stage:
            message = self._incoming(one, one.stage + 1, Kind.RECV_B)
            tensors = iter(message.tensors)
            return [next(tensors) if there else None for there in message.needs_grad]
        loss = self.results.losses[one.microbatch]
        return [torch.full_like(loss, self.given.weights[one.microbatch])]

    def _backward_input(self, one: StageAction) -> None:
        runner = self._owner.stages[one.stage]
        found = runner.backward_input(one.microbatch, self._gradients(one))
        if one.stage == 0:
            self.results.input_gradients[one.microbatch] = found
            return
        there = tuple(gradient is not None for gradient in found)
        tensors = tuple(gradient for gradient in found if gradient is not None)
        self._outgoing[one.stage, 1, one.microbatch] = Message(tensors, None, there)
