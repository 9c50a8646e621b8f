"""Gradient reduction over ranks that hold the same parameters, during backward.

These are replicas of a pipeline, and stages that share a parameter. After a stage's
last weight gradient, its gradients are copied into flat buckets, whose all-reduces
start. The step ends when all sums have arrived. A replica without a batch adds zeros.

The buckets take the memory of one more copy of this rank's gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, final

import torch
from torch import nn

from elche.comm.tensors.flat import shaped
from elche.comm.transport.exchange import GlooExchange, open_exchange
from elche.comm.transport.process_group import Group
from elche.devices.streams import host_memory
from elche.errors import CommunicationError, ConfigError
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.replicas.replica_units import Unit
from elche.pipeline.step.executor import StepInput, StepResults

BUCKET_BYTES = 25 << 20
"""Size of a bucket in bytes; as in torch's DistributedDataParallel."""


@final
class GradientBucket:
    """Gradients in one flat buffer, with a flag per parameter that has a gradient.

    Args:
        parameters: parameters of this rank whose dtypes are summed in `dtype`.
        dtype: dtype of the sum.
        group: process group of the ranks that hold these parameters; all of them make
            the bucket.

    Attributes:
        exchange: all-reduce of the buffer.
    """

    def __init__(
        self, parameters: list[nn.Parameter], dtype: torch.dtype, group: Group
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._numel = sum(as_numbers(one.detach()).numel() for one in parameters)
        count, cpu = self._numel + len(parameters), torch.device("cpu")
        self.exchange = open_exchange(group, count, dtype, cpu)
        if isinstance(self.exchange, GlooExchange):
            device = parameters[0].device
            self.exchange.renew(0, lambda: host_memory((count,), dtype, device))

    @torch.no_grad()
    def begin(self, contributes: bool) -> None:
        """Starts the all-reduce of this rank's gradients, or of zeros.

        Raises:
            ConfigError: a gradient is sparse; nothing has started.
            CommunicationError: a connection has failed.
        """
        gradients = [one.grad if contributes else None for one in self._parameters]
        for one in gradients:
            if one is not None and one.layout is not torch.strided:
                raise ConfigError(
                    f"a gradient of shape {list(one.shape)} is sparse, but ranks that "
                    "share a parameter sum dense gradients; build the embedding with "
                    "sparse=False"
                )
        self.exchange.reclaim("the end of the last sum")
        flat = self.exchange.contribution(0)
        like = [as_numbers(one.detach()) for one in self._parameters]
        for view, gradient in zip(
            shaped(flat[: self._numel], like), gradients, strict=True
        ):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(as_numbers(gradient))
        flat[self._numel :] = torch.tensor(
            [one is not None for one in gradients], device="cpu"
        )
        try:
            self.exchange.begin(0)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._group.rank} of {self._group.world_size} that hold a "
                f"stage cannot reduce its gradients: {error}"
            ) from error

    @torch.no_grad()
    def write(self) -> None:
        """Replaces the gradients by the sums; by None if no rank had a gradient."""
        at = self._numel
        present = self._sum(at, at + len(self._parameters)).tolist()
        at = 0
        for one, there in zip(self._parameters, present, strict=True):
            stop = at + as_numbers(one.detach()).numel()
            if not there:
                one.grad = None
            else:
                if one.grad is None:
                    one.grad = torch.empty_like(one)
                numbers = as_numbers(one.grad)
                numbers.copy_(self._sum(at, stop).view(numbers.shape))
            at = stop
        self.exchange.release()

    def _sum(self, start: int, stop: int) -> torch.Tensor:
        found = self.exchange.contribution(0).new_empty(stop - start)
        self.exchange.sum_into(start, stop, found)
        return found


_Waiting: TypeAlias = "deque[tuple[tuple[int, ...], list[GradientBucket]]]"
"""Units of one process group that have not started: their stages, and their buckets."""


@final
class GradientReduction:
    """Sums this rank's gradients over the replicas; see the module.

    Args:
        units: units that this rank holds, in the common order.
        parameters: this rank's parameters, by the units' names.
        groups: process groups by ranks of the units.
        peers: connections to all ranks.

    Attributes:
        copies: ids of the parameters that a lower rank also holds.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[tuple[int, ...], Group],
        peers: StagePeers,
    ) -> None:
        self._peers = peers
        self._units = []
        self._parameters: list[nn.Parameter] = []
        copies: set[int] = set()
        for unit in units:
            mine = [parameters[name] for name in unit.names]
            made = make_buckets(mine, groups[unit.ranks])
            self._units.append((unit, made))
            self._parameters += mine
            copies |= {id(one) for one in mine if unit.ranks[0] != peers.rank}
        self.copies = frozenset(copies)
        self._waiting: list[_Waiting] = []
        self._complete: set[int] = set()

    def stage_is_through(self, stage: int) -> None:
        """Marks a stage's gradients as complete, and starts the units that need them.

        All ranks of a process group reduce its units in the same order. Raises as
        `GradientBucket.begin` does.
        """
        self._complete.add(stage)
        for waiting in self._waiting:
            while waiting and self._complete.issuperset(waiting[0][0]):
                for bucket in waiting.popleft()[1]:
                    bucket.begin(contributes=True)

    def run(
        self,
        carry_out: Callable[[StepInput], StepResults],
        given: StepInput,
        has_batch: bool,
    ) -> StepResults:
        """Carries out this rank's part of a step and replaces the gradients by sums.

        Gradients from before the step are added, and not summed again. A replica
        without a batch only adds zeros.

        Raises:
            DeadlineError: a rank was late for a sum.
            CommunicationError: a connection has failed. Others as `carry_out` raises.
        """
        earlier = [one.grad for one in self._parameters]
        for one in self._parameters:
            one.grad = None
        self._complete, results = set(), StepResults()
        if has_batch:
            lines: dict[tuple[int, ...], _Waiting] = {}
            for unit, buckets in self._units:
                line = lines.setdefault(unit.ranks, deque())
                line.append((unit.stages_on(self._peers.rank), buckets))
            self._waiting = list(lines.values())
            results = carry_out(given)
        else:
            for bucket in (one for _, buckets in self._units for one in buckets):
                bucket.begin(contributes=False)
        self._take_sums(given.timeout_s)
        for one, before in zip(self._parameters, earlier, strict=True):
            if before is not None:
                one.grad = before if one.grad is None else before + one.grad
        return results

    def _take_sums(self, timeout_s: float) -> None:
        """Waits for all sums; then writes them into the gradients."""
        for unit, buckets in self._units:
            named = " and ".join(map(str, unit.stages_on(self._peers.rank)))
            what = f"the sum of the gradients of stage {named}"
            for one in buckets:
                poll, end = one.exchange.poll, partial(one.exchange.wait, what)
                self._peers.wait(poll, end, unit.ranks, what, timeout_s)
        for one in (one for _, buckets in self._units for one in buckets):
            one.write()


def make_buckets(
    parameters: Sequence[nn.Parameter], group: Group
) -> list[GradientBucket]:
    """Groups parameters into buckets by the dtype of the sum, in order.

    Only a single parameter may exceed a bucket's size. Half precision is summed in
    float32, complex numbers as two real ones.
    """
    made: list[GradientBucket] = []
    for dtype in (torch.float32, torch.float64):
        mine, held_bytes = list[nn.Parameter](), 0
        for one in parameters:
            is_wide = one.dtype in (torch.float64, torch.complex128)
            if is_wide != (dtype is torch.float64):
                continue
            nbytes = as_numbers(one.detach()).numel() * dtype.itemsize
            if mine and held_bytes + nbytes > BUCKET_BYTES:
                made.append(GradientBucket(mine, dtype, group))
                mine, held_bytes = [], 0
            mine.append(one)
            held_bytes += nbytes
        if mine:
            made.append(GradientBucket(mine, dtype, group))
    return made


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """View of the tensor, with complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
