"""Several replicas of a small model in one process, one per device, driven by threads.

For notebooks and small models: no launcher, no other process. The batch is split over
the devices, each replica runs forward and backward in a thread of its own, and the
gradients are summed on the first device, weighted by the samples that each replica
really had, or by what these are said to weigh. One optimizer steps there; the others
copy. What Python itself computes is not parallel: for anything larger use a process per
device (`elche run`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from typing_extensions import Self

from elche.comm.sync_batch_norm import sync_batchnorm_layers
from elche.errors import ConfigError
from elche.runtime.batch_weights import BatchWeights, WeightOf
from elche.runtime.environment import check_device
from elche.runtime.replica_buffers import FollowedBuffers
from elche.runtime.replica_checks import (
    check_loss_fn,
    check_model,
    check_optimizer,
    check_places,
    copied,
)
from elche.runtime.replica_threads import LossFunction, Part, ReplicaThreads
from elche.runtime.transfer import batch_length, map_batch
from elche.torch_internals import accumulated_hooks, gradient_hooks, version

Gradients = list[tuple[nn.Parameter, torch.Tensor | None]]


@final
class LocalReplicas:
    """A model and its copies on other devices of this process.

    ::

        replicas = elche.LocalReplicas(model, devices=["cuda:0", "cuda:1"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            loss = replicas.train_step(batch, loss_fn, optimizer)
        replicas.close()

    Args:
        model: the model; it becomes the first replica, on the first device, and stays
            the one that is trained, saved and evaluated. It may change between steps.
        devices: a device per replica; the same one may stand there twice.
        shares: parts of a batch per replica, in any unit; equal if None.
        weight_of: what a part of a batch weighs in the mean over the batch, where that
            is not its samples: what the loss is a mean over (tokens, say); see
            `elche.setup`. Of parts that weigh 0 nothing is computed.
        timeout_s: deadline of a step.

    Attributes:
        devices: of the replicas.

    Raises:
        ConfigError: a device does not exist, shares do not fit the devices, or the
            model cannot be copied: it has no values yet, or gradient hooks, or
            SyncBatchNorm layers bound to other processes.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[str | torch.device],
        *,
        shares: Sequence[float] | None = None,
        weight_of: WeightOf | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if isinstance(devices, str):
            raise ConfigError(f"expected a list of devices, got {devices!r}")
        if not devices:
            raise ConfigError("expected at least one device, got none")
        self.devices = tuple(check_device(str(device)) for device in devices)
        given = [1.0] * len(devices) if shares is None else [float(s) for s in shares]
        self._shares = _checked_shares(given, len(devices))
        self._weights = None if weight_of is None else BatchWeights(weight_of, 0)
        self._model = model
        self._copies: list[nn.Module] = []
        self._signature: object = None
        self._versions: list[int] = []
        self._buffers = FollowedBuffers(nn.Module())
        self._threads = ReplicaThreads(self.devices, timeout_s)
        self._rebuild()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def replicas(self) -> list[nn.Module]:
        """All replicas, the model itself first."""
        return [self._model, *self._copies]

    @property
    def shares(self) -> tuple[float, ...]:
        """Parts of a batch per replica; they sum to one."""
        return self._shares

    @shares.setter
    def shares(self, shares: Sequence[float]) -> None:
        self._shares = _checked_shares([float(s) for s in shares], len(self.devices))

    def train_step(
        self, batch: Any, loss_fn: LossFunction, optimizer: torch.optim.Optimizer
    ) -> torch.Tensor:
        """One optimizer step on a batch, as one device would take it.

        Args:
            batch: tensors (in tuples, lists or dicts) with samples in dimension 0.
            loss_fn: called with a replica and its part; the mean loss over its samples.
            optimizer: of the model's own parameters. One that takes a closure (LBFGS)
                steps with one that calls :meth:`backward`.

        Returns:
            The mean loss over the batch, detached, on the first device.

        Raises:
            ConfigError: the batch is empty or its parts differ in length, ``weight_of``
                fails or returns what is no weight, ``loss_fn``
                takes other arguments, the loss is no scalar or was not computed with
                the replica, the optimizer is not the model's or wants a closure, or
                a replica has been moved to another device.
            DeadlineError: a device did not finish in time.
        """
        check_optimizer(optimizer, self._model)
        loss = self.backward(batch, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        self.sync_params()
        return loss

    def backward(self, batch: Any, loss_fn: LossFunction) -> torch.Tensor:
        """Forward and backward on all devices, added up in the model's ``p.grad``.

        See :meth:`train_step` for arguments, result and errors. Gradients that are
        there already stay, as in any backward pass. Copies take over what has changed
        of the model's parameters; after writing to ``p.data`` call :meth:`sync_params`.
        """
        check_loss_fn(loss_fn)
        length = _length(batch)
        if not length:
            raise ConfigError("the batch is empty; expected at least one sample")
        self._follow()
        work = self._divided(batch, length, loss_fn)
        active = list(work)
        if not active:
            return torch.zeros((), device=self.devices[0])
        before = _take_gradients(self._model)
        try:
            losses = self._threads.run(work)
            added = [_take_gradients(replica) for replica in self.replicas]
            _expect_own_gradients([added[index] for index in active])
        except BaseException:
            self._signature = None  # a thread may be at work on a copy still
            raise
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
        self._add_gradients(added)
        self._average_buffers(active)
        first = self.devices[0]
        return torch.stack([losses[index].to(first) for index in active]).sum()

    def _divided(
        self, batch: Any, length: int, loss_fn: LossFunction
    ) -> dict[int, Part]:
        """Each replica's part of a batch, but for those that weigh nothing."""
        work: dict[int, Part] = {}
        start, total = 0, 0.0
        for index, count in enumerate(split_exactly(length, self._shares)):
            stop = start + count
            if count:
                part, weight = _part(batch, start, stop, length), float(count)
                if self._weights is not None:
                    weight = self._weights.of(part, f"samples {start} to {stop - 1}")
                if weight:
                    work[index] = Part(self.replicas[index], part, loss_fn, weight)
                total += weight
            start = stop
        return {
            index: replace(part, weight=part.weight / total)
            for index, part in work.items()
        }

    @torch.no_grad()
    def sync_params(self) -> None:
        """Copies the model's parameters and buffers to the other replicas.

        A buffer that a replica holds in another shape (a cache that grows) is its own.
        """
        for replica in self._copies:
            pairs = zip(self._model.parameters(), replica.parameters(), strict=True)
            for tensor, target in (*pairs, *_held_alike([self._model, replica])):
                target.copy_(tensor)
        self._versions = _versions(self._model)

    def close(self) -> None:
        """Ends the threads. The model stays usable."""
        self._threads.close()

    def _follow(self) -> None:
        """Lets the copies follow a model that was frozen, unfrozen or grown."""
        if self._signature != _signature(self._model):
            self._rebuild()
        else:
            self._buffers.follow(self._copies)
            if self._versions != _versions(self._model):
                self.sync_params()
        for replica in self._copies:
            for module, other in zip(
                self._model.modules(), replica.modules(), strict=True
            ):
                other.training = module.training
        check_places(self.replicas, self.devices)

    def _rebuild(self) -> None:
        """Makes the copies anew."""
        check_model(self._model)
        bound = [
            name
            for name, layer in sync_batchnorm_layers(self._model).items()
            if layer.spans_ranks
        ]
        if bound:
            raise ConfigError(
                f"SyncBatchNorm {bound[0]!r} spans other processes; replicas in one "
                "process cannot take part in that"
            )
        for name, parameter in self._model.named_parameters():
            if gradient_hooks(parameter) or accumulated_hooks(parameter):
                raise ConfigError(
                    f"{name} has a gradient hook, which a copy of the model would not "
                    "have; change gradients after backward(), or use a process per "
                    "device"
                )
        self._model.to(self.devices[0])
        before = _take_gradients(self._model)
        try:
            self._copies = copied(self._model, self.devices[1:])
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
        self._signature = _signature(self._model)
        self._versions = _versions(self._model)
        self._buffers = FollowedBuffers(self._model)

    @torch.no_grad()
    def _add_gradients(self, added: Sequence[Gradients]) -> None:
        """Adds the replicas' gradients, weighted already, to the model's."""
        for gradients in added:
            for parameter, (_, gradient) in zip(
                self._model.parameters(), gradients, strict=True
            ):
                if gradient is None:
                    continue
                gradient = gradient.to(parameter.device)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)

    @torch.no_grad()
    def _average_buffers(self, active: Sequence[int]) -> None:
        """Float buffers become their plain mean over replicas that had samples.

        Other buffers become those of the first of them; what replicas do not hold alike
        stays each one's own.
        """
        for same in _held_alike(self.replicas):
            own = same[0]
            values = [same[index].to(own.device) for index in active]
            if own.is_floating_point() and len(values) > 1:
                if any(not torch.equal(value, values[0]) for value in values):
                    own.copy_(torch.stack([v.double() for v in values]).mean(0))
            elif values[0] is not own:
                own.copy_(values[0])


def _held_alike(replicas: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Buffers that all replicas hold in one shape and dtype, one after another."""
    first, *others = (dict(replica.named_buffers()) for replica in replicas)
    for name, buffer in first.items():
        same = [buffer, *(held[name] for held in others if name in held)]
        forms = {(each.shape, each.dtype) for each in same}
        if len(same) == len(replicas) and len(forms) == 1:
            yield same


def split_exactly(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to ``shares`` that sum to ``total``.

    Largest remainders first; of equal ones the first.
    """
    exact = [total * share for share in shares]
    counts = [int(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _checked_shares(shares: list[float], count: int) -> tuple[float, ...]:
    if len(shares) != count:
        raise ConfigError(f"expected a share per device ({count}), got {len(shares)}")
    total = sum(shares)
    if any(not math.isfinite(share) or share < 0 for share in shares) or total <= 0:
        raise ConfigError(
            f"expected shares of at least 0 with a positive sum, got {shares}"
        )
    return tuple(share / total for share in shares)


def _part(batch: Any, start: int, stop: int, length: int) -> Any:
    """Samples ``start`` to ``stop`` of every tensor in a batch."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return tensor
        if len(tensor) != length:
            raise ConfigError(
                f"expected every tensor of the batch to have {length} samples in "
                f"dimension 0, got {list(tensor.shape)}"
            )
        return tensor[start:stop]

    def refuse(item: Any) -> Any:
        raise ConfigError(
            f"cannot split {type(item).__name__}; expected tensors in tuples, lists "
            "or dicts"
        )

    return map_batch(batch, cut, refuse)


def _length(batch: Any) -> int:
    if isinstance(batch, torch.Tensor) and not batch.dim():
        return 0
    return batch_length(batch)


def _signature(model: nn.Module) -> object:
    tensors = tuple(
        (id(tensor), tensor.requires_grad, tuple(tensor.shape), tensor.dtype)
        for tensor in model.parameters()
    )
    return tensors, tuple(map(id, model.modules()))


def _versions(model: nn.Module) -> list[Any]:
    """What every change in place raises: an optimizer's step, a loaded state."""
    return [version(p) for p in model.parameters()]


def _expect_own_gradients(taken: Sequence[Gradients]) -> None:
    """Refuses losses that were computed with another model than the replica."""
    for gradients in taken:
        if all(gradient is None for _, gradient in gradients):
            raise ConfigError(
                "a replica's parameters got no gradient from its loss; compute the "
                "loss with the replica that loss_fn is given, not with another model"
            )


def _take_gradients(model: nn.Module) -> Gradients:
    """A model's gradients, which it has no more."""
    taken = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in taken:
        parameter.grad = None
    return taken
