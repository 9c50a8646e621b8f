"""`elche.DistributedDataParallel`: torch's, for ranks that are not equal.

Replace the import, and a script for torchrun trains as before, under `elche run` too::

    torch.distributed.init_process_group("gloo")
    model = elche.DistributedDataParallel(model)

What torch's has no answer for is added: ranks weigh by the samples of their batches, a
rank without a batch calls :meth:`~DistributedDataParallel.join_step`, and the group may
change under the wrapper (:meth:`~DistributedDataParallel.set_group`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import BucketInfo
from elche.comm.gradients.buckets.bucket_contract import Strategy
from elche.comm.transport.process_group import Group
from elche.ddp.group import TorchGroup, as_group
from elche.ddp.in_group import ModelInGroup, Wrapped
from elche.ddp.options import (
    DdpOptions,
    input_device,
    moved,
    refuse_unsupported,
)
from elche.ddp.turns import new_wrapper
from elche.ddp.weighted_reducer import DdpReduction, LossReduction
from elche.errors import CommunicationError, ConfigError
from elche.torch_internals.groups import IGNORED_BY_DDP


@final
class DistributedDataParallel(nn.Module):
    """Data parallelism whose gradients weigh by samples.

    Where torch's wrapper has an argument, it means the same; where it has not:

    Args:
        module: the model; the same on every rank. ``state_dict`` has its keys behind
            ``module.``, as torch's wrapper has. Hand ``.module`` to what looks for
            torch's class (``torch.distributed.checkpoint.state_dict`` does).
        device_ids: None, or the one CUDA device of the module: inputs are moved there.
        output_device: accepted and unused, as in torch for one device per process.
        dim: the dimension of a batch along which its samples lie.
        broadcast_buffers: buffers that a rank wrote are overwritten, after backward, by
            those of the lowest rank that had a batch (rank 0, as in torch). With False
            they stay local, and are not equal at the start either.
        init_sync: parameters and buffers begin as rank 0 has them.
        process_group: a torch process group, an elche Group, or None for the default.
        bucket_cap_mb: most MiB of gradients in one message; 0: each parameter has its
            own. None: a sixteenth of the model, from 2 to 25 MiB.
        find_unused_parameters: the graph is searched in every forward, so that
            parameters without a gradient do not hold up their bucket until the end of
            backward. They are handled in any case.
        check_reduction: accepted and unused, as in torch.
        gradient_as_bucket_view: ``p.grad`` is a view of a bucket: no copy, but what is
            kept by reference is overwritten two backward passes later.
        static_graph: every backward uses the parameters that the first one used; one
            may then get gradients several times in a backward (reentrant checkpoints).
        forward_sync_buffers: torch's new name: as ``broadcast_buffers``, but buffers
            begin as rank 0 has them in any case.
        loss_reduction: ``"mean"``: a rank's loss is the mean over its samples, and
            gradients are those of the mean over the union of all batches; ``"sum"``: a
            rank's loss is a sum, and gradients are those of the sum over the union.
        weight_by: ``"samples"`` weighs a rank by its batch, the first tensor's size
            along ``dim`` (:meth:`set_weight` overrides it: for lists of samples, say);
            ``"ranks"`` weighs all alike, as torch does.
        strategy: ``"overlapped"`` sends buckets during backward, ``"synchronous"`` at
            its end; with ``"none"`` nothing is reduced.
        timeout_s: deadline of each wait; None: the process group's.
        transport: ``"auto"`` sums in shared memory where all ranks compute on the CPU
            of one host; ``"gloo"`` always through the process group.
        **unsupported: other arguments of torch's wrapper, refused by name; those that
            only make it faster (``batched_grad_copy``,
            ``skip_all_reduce_unused_params``) are accepted and unused.

    Attributes:
        module: the model.
        require_backward_grad_sync: False inside :meth:`no_sync`.

    Raises:
        ConfigError: an argument is wrong, or the model cannot be reduced.
        MismatchError: ranks differ; the message names the difference.
        CommunicationError: ranks did not come together.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        forward_sync_buffers: bool | None = None,
        loss_reduction: LossReduction = "mean",
        weight_by: Literal["samples", "ranks"] = "samples",
        strategy: Strategy | Literal["none"] = "overlapped",
        timeout_s: float | None = None,
        transport: Literal["auto", "gloo"] = "auto",
        **unsupported: Any,
    ) -> None:
        super().__init__()
        refuse_unsupported(unsupported)
        given = forward_sync_buffers, broadcast_buffers
        keeps_buffers = next((value for value in given if value is not None), True)
        self._options = DdpOptions(
            broadcast_buffers=keeps_buffers,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            loss_reduction=loss_reduction,
            weight_by=weight_by,
            strategy=strategy,
            transport=transport,
        )
        self.device_ids = input_device(module, device_ids, output_device)
        self.dim = dim
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = True
        self.parameters_to_ignore: set[str] = set(getattr(module, IGNORED_BY_DDP, ()))
        self.module = module
        self._timeout_s = timeout_s
        self._group: Group | None = as_group(process_group, timeout_s)
        self._in_group: ModelInGroup | None = None
        self._wrapper: int | None = None
        self._order: list[int] | None = None
        begins_equal = keeps_buffers or forward_sync_buffers is not None
        self._form(init_sync, init_sync and begins_equal)

    @property
    def process_group(self) -> Any:
        """The group, as it was given."""
        group = self._group
        return group.torch_group if isinstance(group, TorchGroup) else group

    @property
    def buckets(self) -> tuple[BucketInfo, ...]:
        """Buckets in the order of reduction: capacity, names, shapes, bytes.

        The reverse of definition at first, then as gradients appeared in the first
        backward.
        """
        return self._built.reducer.buckets

    @property
    def last_reduction(self) -> DdpReduction | None:
        """Weights and waits of the last reduction."""
        return self._built.reducer.last

    @property
    def extra_bytes(self) -> int:
        """Memory held beside the model and its gradients."""
        return self._built.reducer.extra_bytes

    @property
    def _built(self) -> ModelInGroup:
        if self._in_group is None:
            raise CommunicationError(
                "this wrapper has no working group: it is a copy, or set_group() "
                "failed before; call set_group() on every rank to train it"
            )
        return self._in_group

    @property
    def find_unused_parameters(self) -> bool:
        """As given."""
        return self._options.find_unused_parameters

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are kept equal."""
        return self._options.broadcast_buffers

    @property
    def static_graph(self) -> bool:
        """As given, or set by ``_set_static_graph()``."""
        return self._options.static_graph

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return next(self.module.parameters()).device

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model; where gradients are enabled, expects its backward.

        Raises:
            ConfigError: a frozen parameter was unfrozen, a parameter replaced, or a
                CUDA graph is being captured.
            CommunicationError: the backward pass before was broken off.
        """
        if self.device_ids:
            inputs, kwargs = moved(inputs, kwargs, self.device_ids[0])
        evaluates = self._in_group is None and not self.training
        reduces_nothing = self._options.strategy == "none" or evaluates
        if reduces_nothing or not torch.is_grad_enabled():
            if self._in_group is not None:
                self._in_group.begin_unreduced()
            return self.module(*inputs, **kwargs)
        in_group = self._built
        weight = in_group.begin_forward((inputs, kwargs), self.dim)
        output = self.module(*inputs, **kwargs)
        reduces = self.require_backward_grad_sync
        in_group.expect_backward(output, weight, reduces=reduces)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in it accumulate gradients on this rank only.

        They are reduced, and weigh, with the next backward of a forward outside.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def set_weight(self, weight: float) -> None:
        """Sets what this rank weighs in the next reduction: tokens, say, or 0.

        Args:
            weight: of all that has been accumulated by then; the unit is the same on
                all ranks. Without it samples are counted. With `elche.SyncBatchNorm`
                layers it must be set before the step's first forward pass, in which
                they weigh.

        Raises:
            ConfigError: it is negative or not finite, or comes too late.
            CommunicationError: the wrapper is a copy, or lost its group.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"expected a weight of at least 0, got {weight!r}")
        self._built.set_weight(float(weight))

    def join_step(self) -> DdpReduction | None:
        """Takes part in this step's reduction without a batch.

        ``p.grad`` becomes what it becomes on the other ranks, so that the same
        optimizer step follows. What was accumulated under :meth:`no_sync` is
        contributed.

        Returns:
            What each rank weighed; None with ``strategy="none"``.

        Raises:
            ConfigError: the model has SyncBatchNorm layers, which want an empty batch.
            CommunicationError: it failed, or a rank did not arrive in time.
        """
        if self._options.strategy == "none":
            return None
        self._refuse_absence()
        reducer = self._built.reducer
        reducer.begin_forward()
        return reducer.run_empty()

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Around a loop that may have more batches on some ranks than on others.

        A rank whose loop is over takes part in the others' reductions until all are
        through, then takes the model of the last that trained.

        Args:
            divide_by_initial_world_size: gradients are divided by all ranks, so that
                every sample counts as before; else by those that still train.
            enable: False: does nothing.
            throw_on_early_termination: raise on all ranks when one is through.

        Raises:
            ConfigError: the model has SyncBatchNorm layers, which want an empty batch.
            CommunicationError: one is through, and that was to be raised; or a
                reduction failed, or a rank did not arrive in time.
        """
        if not enable or self._options.strategy == "none":
            yield
            return
        self._refuse_absence()
        in_group = self._built
        reducer = in_group.reducer
        reducer.divides_by_world = divide_by_initial_world_size
        reducer.refuses_joined = throw_on_early_termination
        try:
            yield
            in_group.shadow()
        finally:
            reducer.divides_by_world = reducer.refuses_joined = False

    def _refuse_absence(self) -> None:
        """A rank without a batch cannot meet others in the middle of the model."""
        if self._in_group is not None and self._in_group.meets_in_forward:
            raise ConfigError(
                "a rank without a batch takes part in SyncBatchNorm layers by an empty "
                "one: run the model on x[:0] and backward from out.sum(), on the same "
                "number of steps everywhere, in place of join_step() and join()"
            )

    def set_group(self, process_group: Any = None, *, sync: bool = True) -> None:
        """Goes on in another group, with all its ranks; the module stays.

        After a failed reduction, ``p.grad`` holds what this rank had computed: zero it
        and redo the step. Also for parameters that were frozen or unfrozen.

        Args:
            process_group: the new group; None: the present one, for a copy the
                default one.
            sync: parameters and buffers become those of the new rank 0.

        Raises:
            ConfigError: inside a backward pass, or the group is none.
            MismatchError: ranks differ; the message names the difference.
            CommunicationError: ranks did not come together.
        """
        if self._in_group is not None:
            self._order = self._in_group.reducer.order or self._order
            self._in_group.release()
            self._in_group = None
        if process_group is not None or self._group is None:
            self._group = as_group(process_group, self._timeout_s)
        self._form(sync, sync and self._options.broadcast_buffers)

    def _form(self, sync_parameters: bool, sync_buffers: bool) -> None:
        """Takes the model into the group, together with all ranks."""
        assert self._group is not None
        if self._wrapper is None:
            self._wrapper = new_wrapper()
        self._in_group = ModelInGroup.form(
            Wrapped(
                module=self.module,
                options=self._options,
                ignored=frozenset(self.parameters_to_ignore),
                as_views=self.gradient_as_bucket_view,
                wrapper=self._wrapper,
            ),
            self._group,
            self._order,
            sync_parameters=sync_parameters,
            sync_buffers=sync_buffers,
        )

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """As torch's: names that stay local; call it before wrapping."""
        setattr(module, IGNORED_BY_DDP, list(params_and_buffers_to_ignore))

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refused: reductions are elche's own.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("communication hooks of torch's DDP cannot be registered")

    def join_hook(self, **_: Any) -> None:
        """Refused: torch's ``Join`` context cannot shadow elche's reductions.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "torch's Join context cannot shadow this wrapper's reductions; use "
            "`with model.join():`, or join_step() for a step without a batch"
        )

    def _set_static_graph(self) -> None:
        """As torch's: ``static_graph=True`` from now on; before the first backward."""
        self._built.make_static()
        self._options = replace(self._options, static_graph=True)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is in no group: it evaluates, and trains after :meth:`set_group`."""
        absent = {"_group": None, "_in_group": None, "_wrapper": None}
        return {**self.__dict__, **absent}
