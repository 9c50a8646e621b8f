"""`elche.DistributedDataParallel`: torch's wrapper for ranks of unequal speed.

Replace the import, and a torchrun script trains as before, also under `elche run`::

    torch.distributed.init_process_group("gloo")
    model = elche.DistributedDataParallel(model)

It is torch's own class with a communication hook. Ranks are weighted by their batch
sizes, a rank without a batch calls :meth:`~DistributedDataParallel.join_step`, and
ranks on the CPU of one host reduce in shared memory.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal, NoReturn, final

import torch
from torch import distributed as dist
from torch import nn

from elche.comm.gradients.gradient_hooks import ParameterWatch
from elche.comm.norm.norm_scope import NormScope
from elche.comm.norm.sync_batch_norm import bind_sync_batchnorm, sync_batchnorm_layers
from elche.comm.tensors.nested import outputs_in
from elche.ddp.group import TorchGroup, as_group
from elche.ddp.model_checks import (
    cap_mb,
    compare,
    refuse_arguments,
    refuse_changes,
    refuse_converted,
)
from elche.ddp.pass_weights import OUTSIDE, PassWeights, samples_in
from elche.ddp.reduction import (
    BufferBroadcast,
    DdpReduction,
    Reduced,
    WeightedReduction,
)
from elche.devices.streams import refuse_capture
from elche.errors import CommunicationError, ConfigError
from elche.session.process import process
from elche.session.sharing import waiting
from elche.torch_internals.groups import (
    COMM_HOOKS,
    IGNORED_BY_DDP,
    push_all_rebuilt,
    rebuild_buckets,
    zero_buckets,
)
from elche.torch_internals.passes import graph_task_id, queue_callback

OF_HOOK = (
    *("_dtypes", "_group", "_named", "_norms"),
    *("_passes", "_reduction", "_trained", "_watch"),
)
"""Attributes that a copy of the wrapper rebuilds instead of copying."""
_DTYPE = attrgetter("dtype")
_SIGNATURE = inspect.signature(nn.parallel.DistributedDataParallel)


@final
class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with gradients weighted by samples.

    torch's arguments keep their meaning, except for these:

    Args:
        module: the model; the same on every rank.
        *given: torch's further arguments by position.
        dim: batch dimension of the inputs.
        broadcast_buffers: after a backward in which a rank wrote buffers, broadcast
            those of the lowest rank that had a batch (usually rank 0, as in torch).
        process_group: a torch process group, or None for the default group.
        bucket_cap_mb: bucket capacity (MiB). None: a sixteenth of the model, between 2
            and 25 MiB.
        static_graph: as in torch; the first backward must not be in :meth:`no_sync`.
        loss_reduction: ``"mean"``: a loss is the mean over the samples of its forward
            pass, and gradients are those of the mean over the union of all batches;
            ``"sum"``: a loss is a sum, and gradients are those of the sum.
        weight_by: ``"samples"`` weights a rank by its batch size, the first tensor's
            size along ``dim`` (:meth:`set_weight` overrides it, e.g. for lists);
            ``"ranks"`` weights all ranks equally, as torch does.
        strategy: ``"overlapped"`` sends buckets during backward, ``"synchronous"`` at
            its end; ``"none"`` disables the reduction.
        timeout_s: deadline of each wait for gradients; None: the process group's.
        transport: ``"auto"`` reduces in shared memory if all ranks compute on the CPU
            of one host; ``"gloo"`` always uses the process group.
        **options: torch's arguments by name.

    Raises:
        ConfigError: an argument is wrong, or the model cannot be reduced.
        MismatchError: ranks differ; the message names the difference.
        CommunicationError: a rank did not arrive in time.
    """

    def __init__(
        self,
        module: nn.Module,
        *given: Any,
        loss_reduction: Literal["mean", "sum"] = "mean",
        weight_by: Literal["samples", "ranks"] = "samples",
        strategy: Literal["overlapped", "synchronous", "none"] = "overlapped",
        timeout_s: float | None = None,
        transport: Literal["auto", "gloo"] = "auto",
        **options: Any,
    ) -> None:
        refuse_arguments(options)
        try:
            of_torch = _SIGNATURE.bind(module, *given, **options).arguments
        except TypeError as error:
            raise TypeError(f"elche.DistributedDataParallel: {error}") from None
        refuse_arguments(of_torch)  # by position
        buffers = map(of_torch.get, ("forward_sync_buffers", "broadcast_buffers"))
        settings = {
            "loss_reduction": loss_reduction,
            "weight_by": weight_by,
            "strategy": strategy,
            "transport": transport,
            "find_unused_parameters": of_torch.get("find_unused_parameters", False),
            "static_graph": of_torch.get("static_graph", False),
            "keeps_buffers": next((each for each in buffers if each is not None), True),
            "bucket_cap_mb": of_torch.get("bucket_cap_mb"),
        }
        group = as_group(of_torch.get("process_group"), timeout_s)
        ignored = frozenset(getattr(module, IGNORED_BY_DDP, ()))
        compare(group, module, ignored, settings)
        of_torch["process_group"] = group.torch_group
        if settings["bucket_cap_mb"] is None and "bucket_cap_mb_list" not in of_torch:
            of_torch["bucket_cap_mb"] = cap_mb(module)
        super().__init__(**of_torch)
        self._settings = settings
        self._norms: NormScope | None = None
        is_alone = strategy == "none" or group.world_size == 1
        if not is_alone and sync_batchnorm_layers(module):
            self._norms = bind_sync_batchnorm(module, group.sibling())
        self._attach(group)

    def _attach(self, group: TorchGroup) -> None:
        """Builds the reduction and registers its hook, without communication."""
        settings, module = self._settings, self.module
        ignored = frozenset(self.parameters_to_ignore)
        self._group = group
        self._named = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in ignored
        }
        self._trained = list(self._named.values())
        # torch's reducer keeps these: gradients of a converted model would be rounded.
        self._dtypes = list(map(_DTYPE, self._trained))
        self._watch = ParameterWatch(module)
        is_mean = settings["loss_reduction"] == "mean"
        kept = [name for name, _ in module.named_buffers() if name not in ignored]
        buffers = None
        if settings["keeps_buffers"] and kept:
            buffers = BufferBroadcast(module, ignored, group)
        self._passes = PassWeights(self._trained, is_mean=is_mean)
        self._reduction = WeightedReduction(
            group,
            self._passes,
            buffers,
            is_mean=is_mean,
            has_float16=any(p.dtype is torch.float16 for p in self._trained),
            overlaps=settings["strategy"] == "overlapped",
        )
        self._reduction.at_end = weakref.WeakMethod(self._queue_rebuild)
        super().register_comm_hook(self._reduction, _reduce)
        process.weighs_gradients |= settings["strategy"] != "none"

    @property
    def last_reduction(self) -> DdpReduction | None:
        """Weights and wait time of the last reduction."""
        return self._reduction.last

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model and, if gradients are enabled, prepares for its backward.

        Raises:
            ConfigError: a trained parameter is not reduced, or a CUDA graph is being
                captured.
            CommunicationError: an earlier reduction failed or was aborted.
        """
        if self._settings["strategy"] == "none":
            with self.no_sync():
                return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        is_again = graph_task_id() != OUTSIDE and self._passes.current is not None
        if is_again or not torch.is_grad_enabled():
            if self._norms is not None and not is_again:
                self._norms.weigh(None)
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._check()
        weight = 1.0
        if self._settings["weight_by"] == "samples":
            weight = samples_in((inputs, kwargs), self.dim)
        if self._norms is not None:
            given = self._passes.given
            seen = weight if given is None else given
            is_mean = self._settings["loss_reduction"] == "mean"
            self._norms.weigh(seen if is_mean else float(seen > 0))
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        outputs = outputs_in(output)
        is_lost = self.training and all(each.grad_fn is None for each in outputs)
        if is_lost and self._passes.expected is not None:
            raise ConfigError(
                "no output of the model is a tensor with a gradient, so two forward "
                "passes are alike; return tensors, or run backward before the next "
                "forward"
            )
        begin = self._expect_again if self.require_backward_grad_sync else None
        if begin is not None:
            self._reduction.is_armed = True
        self._passes.expect(weight, outputs, begin)
        return output

    def _check(self) -> None:
        """Refuses a forward pass whose gradients would not be reduced."""
        if self._reduction.is_under_way:
            raise CommunicationError(
                f"the last backward pass was interrupted on rank {self._group.rank}, "
                "or its reduction failed; restart the ranks from a checkpoint"
            )
        refuse_capture()
        has_dtypes = list(map(_DTYPE, self._trained)) == self._dtypes
        if not (has_dtypes and self._watch.is_same):
            refuse_converted(self._named, self._dtypes)
            ignored = frozenset(self.parameters_to_ignore)
            refuse_changes(self._group, self.module, self._named, ignored)
            self._watch = ParameterWatch(self.module)
        first = self._reduction.last is None
        if self.static_graph and first and not self.require_backward_grad_sync:
            raise ConfigError(
                "static_graph=True learns the graph from the first backward pass, "
                "which must not be in no_sync(); reduce the first one"
            )

    def _expect_again(self) -> None:
        """Prepares torch's reducer for a further backward of the same forward."""
        if self._reduction.is_armed or self._reduction.is_under_way:
            return
        if self.find_unused_parameters or self.static_graph:
            raise ConfigError(
                "find_unused_parameters and static_graph expect one backward pass "
                "after each forward pass; run the forward pass again, or leave them out"
            )
        self.reducer.prepare_for_backward([])
        self._reduction.is_armed = True

    def set_weight(self, weight: float) -> None:
        """Sets this rank's weight in the next backward pass, e.g. its tokens, or 0.

        Args:
            weight: replaces the batch size; all ranks use the same unit. Under
                :meth:`no_sync`, set it for each pass. With `elche.SyncBatchNorm`
                layers, which use it in the forward pass, set it before that.

        Raises:
            ConfigError: the weight is negative or not finite, or is set too late.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"expected a weight of at least 0, got {weight!r}")
        if self._norms is not None and self._passes.expected is not None:
            raise ConfigError(
                "set_weight() came after a forward pass in which SyncBatchNorm layers "
                "have weighed this batch; call it before"
            )
        self._passes.given = float(weight)

    def join_step(self) -> DdpReduction | None:
        """Joins this step's reduction without a batch.

        ``p.grad`` gets the same value as on the other ranks, so that the optimizer
        steps match. Gradients accumulated under :meth:`no_sync` are contributed.

        Returns:
            The reduction with each rank's weight; None with ``strategy="none"``.

        Raises:
            ConfigError: the model has SyncBatchNorm layers, which need an empty batch.
            CommunicationError: the reduction failed, or a rank timed out.
        """
        if self._settings["strategy"] == "none":
            return None
        self._refuse_absence()
        if self.static_graph:
            raise ConfigError(
                "join_step() does not know which parameters a static graph uses; run "
                "the model on an empty batch (x[:0]) and backward from out.sum()"
            )
        reduction, used = self._reduction, [p.grad is not None for p in self._trained]
        reduction.is_joining = True
        try:
            begun = [self._send(bucket) for bucket in zero_buckets(self.reducer)]
        finally:
            reduction.is_joining = False
        absent = set()
        if self.find_unused_parameters:  # torch's all-reduce of the used ones
            message = torch.tensor(used, dtype=torch.int32, device=self.device)
            self._group.all_reduce(message, "agreeing on unused parameters")
            counts = zip(self._trained, message.tolist(), strict=True)
            absent = {id(parameter) for parameter, count in counts if not count}
        for bucket, future in begun:  # a user's hook may return another tensor
            bucket.buffer().copy_(future.wait())
            for parameter, total in zip(
                bucket.parameters(), bucket.gradients(), strict=True
            ):
                if id(parameter) in absent:
                    continue
                if parameter.grad is None:
                    parameter.grad = total.clone()
                else:
                    parameter.grad.copy_(total)
        push_all_rebuilt(self.reducer)
        self._rebuild()
        return reduction.last

    def _send(self, bucket: dist.GradBucket) -> tuple[dist.GradBucket, Reduced]:
        """Reduces a bucket's accumulated gradients; done when the last bucket is."""
        for parameter, part in zip(
            bucket.parameters(), bucket.gradients(), strict=True
        ):
            if parameter.grad is not None:
                part.copy_(parameter.grad)
        return bucket, _reduce(self._reduction, bucket)

    def _queue_rebuild(self) -> None:
        """Reorders buckets after the first backward pass, not in the next forward pass.

        So a forward pass never waits for other ranks. The callback is queued from
        another callback to run after torch's reducer has finished the backward pass.
        """
        if graph_task_id() != OUTSIDE:  # as in the first pass of a static graph
            queue_callback(lambda: queue_callback(self._rebuild))

    def _rebuild(self) -> None:
        """Reorders buckets once by the order of gradients; a collective call."""
        try:
            self._reduction.at_end = None
            rebuild_buckets(self.reducer)
        except RuntimeError as error:
            text = f"ordering buckets failed on rank {self._group.rank}: {error}"
            raise self._group.on_failure(text, ()) from error

    def _refuse_absence(self) -> None:
        if self._norms is not None:
            raise ConfigError(
                "a rank without a batch enters SyncBatchNorm layers with an empty "
                "batch: run the model on x[:0] and backward from out.sum(), on the "
                "same number of steps everywhere, in place of join_step() and join()"
            )

    def join_hook(self, **kwargs: Any) -> Any:
        """Weighted hook for torch's ``Join``; see :meth:`join`.

        Raises:
            ConfigError: the model has SyncBatchNorm layers, which need an empty batch.
        """
        self._refuse_absence()
        hook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        ends, reduction = hook.post_hook, self._reduction
        reduction.divides_by_world = kwargs.get("divide_by_initial_world_size", True)
        reduction.at_end = None  # torch's forward rebuilds buckets

        def end(is_last_joiner: bool) -> None:
            reduction.divides_by_world = False
            ends(is_last_joiner)

        hook.post_hook = end
        return hook

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Registers a hook that reduces in place of elche's exchange.

        It receives weighted gradients whose mean over the ranks is the gradient, as
        torch's own hooks expect.

        Raises:
            ConfigError: a hook is already registered.
        """
        if self._reduction.user_hook is not None:
            raise ConfigError("a communication hook was registered before")
        self._reduction.user_hook = state, hook

    def _register_buffer_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses buffer hooks: torch would call them before a forward pass.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "buffers are broadcast after a backward pass, without hooks; give "
            "forward_sync_buffers=False and broadcast them in the loop"
        )

    def will_sync_module_buffers(self) -> bool:
        """Returns False: buffers are broadcast after backward, not before forward."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without hook and group, which a copy rebuilds."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        group = self._group
        for name in OF_HOOK:
            state.pop(name)
        state[COMM_HOOKS] = []
        state["at_hosts"] = group.timeout_s, group.shares_host, group.pids
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        timeout_s, shares_host, pids = state.pop("at_hosts")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        group = as_group(None, timeout_s)
        group.shares_host = shares_host
        group.pids = pids
        self._norms = None
        self._attach(group)


def _reduce(state: WeightedReduction, bucket: dist.GradBucket) -> Reduced:
    with waiting(bucket.buffer().device):
        return state.reduce(bucket)


_reduce.__annotations__.clear()  # torch refuses those that are strings
