"""Manual control: several models in one group, with explicit gradient reductions.

For GANs, reinforcement learning and progressive training, where no loader defines a
step::

    group = elche.init_group()
    generator = elche.Replica.wrap(Generator(), group, name="generator")
    critic = elche.Replica.wrap(Critic(), group, name="critic")
    ...
    loss.backward()
    critic.weighted_all_reduce_gradients(len(batch))
    optimizer.step()

`elche run` and torchrun start one rank per device. A plain script is a single-rank run
without further processes or sockets, in which every call returns at once. All calls are
collective, in the same order on every rank; errors name a rank that is out of step,
dead or late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, final

import torch
from torch import nn

from elche.by_hand.manual_run import ManualRun
from elche.by_hand.replica_calls import Structure, announce, check_gradients
from elche.cadence.call_shares import FACTS
from elche.comm.gradients.gradient_messages import GradientMessage, make_messages
from elche.comm.norm.norm_scope import NormScope
from elche.comm.norm.sync_batch_norm import bind_sync_batchnorm
from elche.comm.tensors.equal_tensors import average, broadcast_bits, differing
from elche.comm.tensors.unshareable import unshareable_module
from elche.comm.transport.process_group import Group
from elche.config import RunConfig
from elche.config_checks import check_choice
from elche.config_parts import TransportConfig, TransportKind
from elche.devices.choice import CPU
from elche.errors import ConfigError, MismatchError
from elche.runtime.process.environment import read_placement
from elche.runtime.process.launcher_watch import watch_launcher
from elche.session.process import current_run, process, watch_exit
from elche.session.sharing import waiting

BUFFER_RULES = ("mean", "first")
PLAIN_MEAN = "all_reduce_gradients"


def init_group(*, timeout_s: float = 300.0, transport: TransportKind = "auto") -> Group:
    """Joins the other ranks in a run without a loader.

    The run ends when the interpreter exits. A second call returns the same group.

    Args:
        timeout_s: deadline of every wait for another rank.
        transport: transport kind, as in `elche.config.TransportConfig`.

    Returns:
        The process group of all ranks; in a plain script, of one rank.

    Raises:
        ConfigError: a run of `elche.setup` is active, or an argument is wrong.
        MismatchError: ranks disagree about the arguments.
        RemoteRankError: another rank failed meanwhile.
        CommunicationError: a rank did not join in time.
    """
    if current_run() is not None:
        raise ConfigError(
            "an elche.setup run is active and reduces gradients itself; call "
            "elche.shutdown() first"
        )
    config = RunConfig(timeout_s=timeout_s, transport=TransportConfig(kind=transport))
    if process.manual is None:
        placement = read_placement()
        watch_launcher(placement.rank)
        if placement.world_size > 1:
            watch_exit()
        process.manual = ManualRun.start(placement, config)
    return process.manual.group


@final
class Replica:
    """This rank's copy of a model that all ranks hold; made by :meth:`wrap`.

    The model may change between calls, identically on every rank: freeze, unfreeze,
    grow. Its layout is compared before every reduction. Each rank initializes new
    parameters by itself; :meth:`sync_params` makes them equal.

    Collective calls raise MismatchError if the models differ, ProtocolError if ranks
    make different calls, and CommunicationError if a rank has died or timed out.

    Attributes:
        model: this rank's copy of the model.
        group: process group of all ranks.
        name: model name for error messages.
    """

    def __init__(self, model: nn.Module, group: Group, name: str) -> None:
        self.model = model
        self.group = group
        self.name = name
        self._structure = Structure(model)
        self._messages: list[GradientMessage] = []
        self._scope = NormScope()
        self._is_stale = True
        process.weighs_gradients = True

    @staticmethod
    def wrap(
        model: nn.Module, group: Group | None = None, *, name: str = "model"
    ) -> Replica:
        """Checks that all ranks hold the same model, and broadcasts rank 0's values.

        The `elche.SyncBatchNorm` layers of the model normalise over this group.

        Args:
            model: this rank's copy of the model, on its device.
            group: process group of all ranks; None: the one of :func:`init_group`.
            name: model name for error messages, unique per model.

        Raises:
            MismatchError: the models differ; the error names the tensors.
            ConfigError: `model` is not a module, or has tensors that cannot be shared.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(f"expected model to be a torch.nn.Module, got {model!r}")
        if fault := unshareable_module(model):
            raise ConfigError(f"{name}: {fault}")
        replica = Replica(model, init_group() if group is None else group, name)
        replica.sync_params()
        return replica

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return self.group.world_size

    def sync_params(self) -> None:
        """Broadcasts rank 0's parameters and buffers bit for bit; a collective call."""
        what = self._announce("sync_params")[0]
        if self.world_size > 1:
            tensors = [*self.model.parameters(), *self.model.buffers()]
            broadcast_bits(self.group, tensors, what)

    @torch.no_grad()
    def sync_buffers(self, rule: str = "mean") -> None:
        """Makes the buffers equal on all ranks.

        Args:
            rule: ``"mean"`` averages floating-point buffers over the ranks and
                broadcasts rank 0's other buffers; ``"first"`` broadcasts all of
                rank 0's buffers.

        Raises:
            ConfigError: the rule is unknown.
        """
        check_choice("rule", rule, BUFFER_RULES)
        what = self._announce(f"sync_buffers({rule!r})")[0]
        if self.world_size == 1:
            return
        buffers = list(self.model.buffers())
        averaged = [b for b in buffers if rule == "mean" and b.is_floating_point()]
        chosen = {id(buffer) for buffer in averaged}
        broadcast_bits(self.group, [b for b in buffers if id(b) not in chosen], what)
        average(self.group, averaged, what)

    def all_reduce_gradients(self) -> None:
        """Makes every ``p.grad`` the plain mean over the ranks.

        Use it with equal batches, between backward and the optimizer's step. A missing
        gradient counts as zeros. A parameter keeps ``grad=None`` if no rank has a
        gradient for it.

        Raises:
            ConfigError: a gradient is sparse, or the parts of `elche.share` differ.
        """
        self._reduce(PLAIN_MEAN, [1.0] * self.world_size)

    def weighted_all_reduce_gradients(
        self, batch_counts: Sequence[float] | float
    ) -> None:
        """Makes every ``p.grad`` the mean over ranks, weighted by their batch counts.

        With batch sizes as counts and mean losses, this is the gradient of the mean
        over the union batch.

        Args:
            batch_counts: samples (or batches) of each rank, or this rank's own count as
                one number. A rank with count zero is ignored, even if its gradients
                are not finite.

        Raises:
            ConfigError: there is not one count per rank, a count is negative or not
                finite, or all are zero.
            MismatchError: ranks give different counts, or the models differ.
        """
        counts = _checked_counts(batch_counts, self.rank, self.world_size)
        self._reduce("weighted_all_reduce_gradients", counts)

    def weigh_losses(self, weight: float | None) -> None:
        """Sets the weight of this rank's next losses in SyncBatchNorm layers.

        Set it before the backward pass. By default (None) a loss is weighted by the
        elements of its batch. This suits mean losses with
        :meth:`weighted_all_reduce_gradients` by samples. Set 1.0 on every rank for sum
        losses, and for :meth:`all_reduce_gradients` after unequal batches. Set 0.0 to
        ignore a batch.

        Raises:
            ConfigError: the weight is negative or not finite.
        """
        self._scope.weigh(weight)

    def check_equal(self) -> None:
        """Checks that parameters and buffers are bit-identical on all ranks.

        Raises:
            MismatchError: names the tensors that differ.
        """
        self._announce("check_equal")
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        wrong = [named[index][0] for index in differing(self.group, named)]
        if wrong:
            raise MismatchError(
                f"{self.name}: ranks hold different values in {', '.join(wrong[:5])}"
                f"{' and more' if len(wrong) > 5 else ''}; take the same optimizer "
                "steps on every rank, or call sync_params"
            )

    def _reduce(self, call: str, counts: Sequence[float]) -> None:
        check_gradients(self.model)
        what, rows = self._announce(call, counts)
        if call == PLAIN_MEAN and process.shares.is_unequal:
            raise ConfigError(
                f"{what}: parts of elche.share differ, so the plain mean over ranks "
                "is not the gradient of the batch; call weighted_all_reduce_gradients "
                "with the samples of this rank's part (or 1.0 for losses that are sums)"
            )
        known = _agreed_counts(what, rows)
        total = sum(known)
        if total <= 0 or math.isinf(total):
            raise ConfigError(
                f"{what}: expected a count above 0 on at least one rank, got {known}, "
                f"whose sum is {total}"
            )
        if self.world_size > 1:
            with waiting(self._device):
                for message in self._messages:
                    message.begin(known[self.rank] / total)
                for message in self._messages:
                    message.exchange.wait(what)
                for message in self._messages:
                    message.write()

    def _announce(
        self, call: str, values: Sequence[float] | None = None
    ) -> tuple[str, list[list[float]]]:
        """Checks that all ranks make this call on equal models; returns their values.

        Rebuilds messages and SyncBatchNorm groups if a rank's model has changed.
        """
        what = f"{call} of {self.name!r}"
        values = [0.0] * self.world_size if values is None else values
        self._is_stale |= self._structure.refresh()
        if self.world_size == 1:
            return what, [list(values)]
        values = [*process.shares.facts(), *values]
        with waiting(self._device):
            is_stale, rows = announce(
                self.group, what, self._structure, values, is_stale=self._is_stale
            )
        process.shares.report([row[:FACTS] for row in rows])
        if is_stale:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self._messages = []  # frees their memory
            self._messages = make_messages(trained, self.group)
            weight = self._scope.loss_weight
            self._scope = bind_sync_batchnorm(self.model, self.group) or NormScope()
            self._scope.weigh(weight)
            self._is_stale = False
        return what, [row[FACTS:] for row in rows]

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), CPU)


UNKNOWN = -1.0
"""Placeholder for the other ranks' counts if each rank passes only its own."""


def _checked_counts(
    batch_counts: Sequence[float] | float, rank: int, world_size: int
) -> list[float]:
    if isinstance(batch_counts, torch.Tensor):
        batch_counts = batch_counts.tolist()
    is_own = isinstance(batch_counts, Real)
    listed: Any = [batch_counts] if is_own else batch_counts
    try:
        given = [math.fsum((count,)) for count in listed]  # refuses strings
    except TypeError as error:
        raise ConfigError(
            "expected a batch count per rank, or this rank's own as one number, got "
            f"{batch_counts!r}"
        ) from error
    counts = given
    if is_own:
        counts = [UNKNOWN] * world_size
        counts[rank] = given[0]
    elif len(given) != world_size:
        raise ConfigError(
            f"expected a batch count per rank ({world_size}), got {len(given)}"
        )
    if any(not math.isfinite(count) or count < 0 for count in given):
        raise ConfigError(f"expected batch counts of at least 0, got {batch_counts!r}")
    return counts


def _agreed_counts(what: str, rows: Sequence[Sequence[float]]) -> list[float]:
    """Returns one count per rank from every rank's row of counts."""
    if any(UNKNOWN in row for row in rows):
        return [row[rank] for rank, row in enumerate(rows)]
    for rank, row in enumerate(rows):
        if row != rows[0]:
            raise MismatchError(
                f"{what}: rank 0 gives the counts {list(rows[0])}, rank {rank} "
                f"{list(row)}; pass one list on every rank, or each rank's own count"
            )
    return list(rows[0])
