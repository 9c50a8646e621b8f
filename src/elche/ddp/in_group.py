"""The state of `elche.DistributedDataParallel` in one process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from torch import nn

from elche.comm.gradients.buckets.bucket_contract import PassOptions
from elche.comm.gradients.graph_capture import refuse_capture
from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.comm.tensors.nested import outputs_in
from elche.comm.transport.process_group import Group
from elche.ddp.buffer_spreader import BufferSpreader
from elche.ddp.forward import (
    on_backward,
    places_of,
    refuse_replaced,
    samples_in,
    unused_of,
)
from elche.ddp.group import TorchGroup
from elche.ddp.model_comparison import (
    Peer,
    agree,
    agreed_order,
    describe,
    kept,
    share_host,
    spread,
    tensors_of,
)
from elche.ddp.norms import WrappedNorms, plain_norms, refuse_converted
from elche.ddp.options import DdpOptions, cap_bytes
from elche.ddp.turns import Turn
from elche.ddp.weighted_reducer import WeightedReducer
from elche.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """What a wrapper brings into each of its groups.

    Attributes:
        module: the model.
        options: what all ranks set alike.
        ignored: names of parameters and buffers that stay local.
        as_views: ``p.grad`` is a view of a bucket.
        wrapper: see :func:`elche.ddp.turns.new_wrapper`.
    """

    module: nn.Module
    options: DdpOptions
    ignored: frozenset[str]
    as_views: bool
    wrapper: int


@final
class ModelInGroup:
    """Its forward passes announce what the reducer is to expect; made by :meth:`form`.

    Args:
        wrapped: the model and its settings.
        group: the process group.
        reducer: of its trained parameters, attached.
        norms: its SyncBatchNorm layers that meet in this group, or None.

    Attributes:
        reducer: as given.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        group: Group,
        reducer: WeightedReducer,
        norms: WrappedNorms | None,
    ) -> None:
        self._wrapped = wrapped
        self._group = group
        self.reducer = reducer
        self._norms = norms
        named = kept(wrapped.module.named_parameters(), wrapped.ignored)
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._places = places_of(wrapped.module, reducer.parameters)
        self._plain_norms = plain_norms(wrapped.module, group)
        options = wrapped.options
        self._searches_graph = (
            options.find_unused_parameters and not options.static_graph
        )

    @staticmethod
    def form(
        wrapped: Wrapped,
        group: Group,
        order: Sequence[int] | None,
        *,
        sync_parameters: bool,
        sync_buffers: bool,
    ) -> ModelInGroup:
        """Compares ranks, spreads the model, allocates buckets; all ranks together.

        Args:
            wrapped: the model and its settings.
            group: all ranks.
            order: of gradients, if this rank has observed one before.
            sync_parameters: all begin with the parameters of rank 0.
            sync_buffers: where they do, with its buffers too.

        Raises:
            ConfigError: the model cannot be reduced.
            MismatchError: ranks differ; the message names the difference.
            CommunicationError: ranks did not come together.
        """
        module, options, ignored = wrapped.module, wrapped.options, wrapped.ignored
        norm_names = list(sync_batchnorm_layers(module))
        settings = {**asdict(options), "SyncBatchNorm": norm_names}
        peers = agree(group, describe(module, ignored, settings))
        turn = Turn(group, wrapped.wrapper, peers[0].number, type(module).__name__)
        if isinstance(group, TorchGroup):
            group.activity = f"reducing {turn.name}"
            share_host(group, peers if options.transport == "auto" else [])
        if sync_parameters:
            spread(group, tensors_of(module, ignored, with_buffers=sync_buffers), 0)
        reducer = _reducer_of(wrapped, group, peers, turn)
        norms = WrappedNorms.bind(module, group, options)
        try:
            reducer.attach(agreed_order(group, order, len(reducer.parameters)))
        except BaseException:
            if norms is not None:
                norms.release()
            raise
        return ModelInGroup(wrapped, group, reducer, norms)

    @property
    def meets_in_forward(self) -> bool:
        """Whether SyncBatchNorm layers wait for the other ranks."""
        return self._norms is not None

    def release(self) -> None:
        """Takes every hook off, and leaves what was formed in the group."""
        self.reducer.detach()
        if self._norms is not None:
            self._norms.release()

    def begin_unreduced(self) -> None:
        """A forward pass begins that no reduction follows."""
        if self._norms is not None:
            self._norms.weigh(None)

    def begin_forward(self, inputs: Any, dim: int) -> float:
        """A forward pass begins whose gradients are reduced; returns what it weighs.

        Args:
            inputs: of the model.
            dim: along which their samples lie.

        Raises:
            ConfigError: a frozen parameter was unfrozen, a parameter replaced, a
                BatchNorm layer converted, or a CUDA graph is being captured.
            CommunicationError: the backward pass before was broken off.
        """
        self.begin_unreduced()
        self.reducer.begin_forward()
        refuse_capture()
        refuse_replaced(self._places, self._wrapped.module)
        refuse_converted(self._plain_norms)
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when the model was wrapped and is not any more;"
                    " call set_group() on every rank after unfreezing"
                )
        by_samples = self._wrapped.options.weight_by == "samples"
        weight = samples_in(inputs, dim) if by_samples else 1.0
        if self._norms is not None:
            given = self.reducer.weight_set
            self._norms.weigh(weight if given is None else given)
        return weight

    def expect_backward(self, output: Any, weight: float, *, reduces: bool) -> None:
        """Arms the reducer for the backward pass of a forward's output.

        Args:
            output: of the model.
            weight: of its samples.
            reduces: False: gradients are accumulated, and only the weight counts.
        """
        reducer, outputs = self.reducer, outputs_in(output)

        def begin() -> None:
            if reduces:
                reducer.enter_backward(weight)
            else:
                reducer.count(weight)

        if on_backward(outputs, begin):
            reducer.expect_backward(weight if reduces else None)
            if reduces and self._searches_graph:
                reducer.expect_unused(unused_of(outputs, reducer.parameters))
        elif reduces:  # an opaque output
            reducer.expect_backward(weight, adds=True)
        else:
            reducer.count(weight)

    def set_weight(self, weight: float) -> None:
        """Sets what this rank weighs in the next reduction.

        Raises:
            ConfigError: SyncBatchNorm layers have weighed the batch already.
        """
        if self._norms is not None and self.reducer.has_counted:
            raise ConfigError(
                "set_weight() came after a forward pass in which SyncBatchNorm layers "
                "have weighed this batch; call it before"
            )
        self.reducer.set_weight(weight)

    def shadow(self) -> None:
        """Takes part until every rank does only that, then takes the last's model."""
        reducer, wrapped = self.reducer, self._wrapped
        last = reducer.last
        while True:
            done = reducer.run_empty(joined=True)
            if len(done.joined) == len(done.weights):
                break
            last = done
        source = last.source if last is not None else None
        with_buffers = wrapped.options.broadcast_buffers
        tensors = tensors_of(wrapped.module, wrapped.ignored, with_buffers=with_buffers)
        spread(self._group, tensors, source or 0)

    def make_static(self) -> None:
        """Every backward uses the parameters that the first one used."""
        self.reducer.make_static()
        self._searches_graph = False


def _reducer_of(
    wrapped: Wrapped, group: Group, peers: Sequence[Peer], turn: Turn
) -> WeightedReducer:
    """The reducer of what is trained now, not attached yet."""
    module, options, ignored = wrapped.module, wrapped.options, wrapped.ignored
    named = kept(module.named_parameters(), ignored)
    trained = [(name, p) for name, p in named if p.requires_grad]
    buffers: BufferSpreader | None = None
    if options.broadcast_buffers and kept(module.named_buffers(), ignored):
        buffers = BufferSpreader(module, ignored, group)
    devices = [peer.device for peer in peers]
    strategy = options.strategy
    return WeightedReducer(
        trained,
        group,
        PassOptions(
            cap_bytes=cap_bytes(options.bucket_cap_mb, trained),
            strategy="synchronous" if strategy == "synchronous" else "overlapped",
            as_views=wrapped.as_views,
            static_graph=options.static_graph,
            staged=len(set(devices)) > 1 and devices[group.rank] != "cpu",
            undefined_is_zero=options.static_graph
            or not options.find_unused_parameters,
        ),
        options.loss_reduction,
        buffers,
        turn,
    )
