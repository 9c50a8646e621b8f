"""`Pipeline`: a model in stages on several devices, trained as if on a single one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, final

import torch
from torch import nn
from typing_extensions import Self

from elche.checkpoint.weight_files import WeightFiles
from elche.pipeline.checkpoints.named_states import (
    GivenOptimizers,
    NamedState,
    Placeholder,
    as_optimizers,
)
from elche.pipeline.checkpoints.pipeline_state import PipelineState
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.setup.builder import PipelineBuilder
from elche.pipeline.setup.building import Split
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.stage import Layer
from elche.pipeline.step.generation import (
    BatchOf,
    Choose,
    Generation,
    greedy,
)
from elche.pipeline.step.gradients import clip_norm, refuse_norm_of_rank, unscale
from elche.pipeline.step.inputs import Call
from elche.pipeline.step.outputs import EvaluationOutput, OutputRanks, StepOutput
from elche.schedule.actions import Schedule, StageAction

Batch = TypeVar("Batch")


@final
class Pipeline:
    """Trains a model cut into stages, each on the rank given by the schedule.

    Gradients equal those of one process on the whole batch, for any microbatch sizes:
    the mean (or sum) over its samples, or over the counts of `weight_of`. With
    `replicas` the batch is the union of all replicas' batches. Every rank builds only
    its own stages: pass factories, or build the model under ``torch.device("meta")``.
    :meth:`step` adds gradients to ``grad``. The user makes an optimizer over
    :meth:`parameters`.

    Call every method that communicates (the constructor, `step`, `evaluate`,
    `generate`, `clip_grad_norm_`, `state_dict`, `close`) on all ranks in the same
    order.

    Args:
        model: any module (cut automatically with `sample`, or at `split_points`), an
            nn.Sequential, or a list of layers or of factories of layers.
        loss_fn: function from one microbatch's output and target to a scalar. None uses
            the ``"loss"`` in the output of a traced model whose batch has `labels`: a
            mean over the labels that the model does not ignore.
        micro_batches: number of microbatches per batch.
        schedule: a name (one of `FIXED_SCHEDULES`, or "auto"), the path of a CSV file,
            or a schedule.
        devices: name of each rank's device; None means the launcher's choice.
        split: function from a module to its layers, see
            `elche.pipeline.setup.building.layers_of`.
        config: further settings as one object; or pass them as options.
        **options: fields of `PipelineConfig`.

    Raises:
        ConfigError: an argument is wrong, here or on another rank.
        MismatchError: ranks disagree about model, schedule or settings.
        CommunicationError: the ranks did not connect.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        *,
        micro_batches: int,
        schedule: str | Schedule = "auto",
        devices: Sequence[str] | None = None,
        split: Split | None = None,
        config: PipelineConfig | None = None,
        **options: Any,
    ) -> None:
        given = (model, loss_fn, micro_batches, schedule, devices, split)
        self._stepping = PipelineBuilder(*given, config, options).build()
        self._state = PipelineState(self._stepping)
        self._nothing = Placeholder(torch.zeros(1, device=self.device))
        self._communicator = self._state.communicator
        self.config = self._stepping.config

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        has_failed = isinstance(error, (Exception, KeyboardInterrupt))
        self._state.close(has_failed)
        if error is not None and has_failed:
            self._communicator.fail(error)
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Pipeline cannot be copied or pickled: it is one rank's end of "
            "connections; copy what state_dict() returns"
        )

    @property
    def rank(self) -> int:
        """This rank's number; ranks are renumbered when a replica is lost."""
        return self._state.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._state.world_size

    @property
    def schedule(self) -> Schedule:
        """The schedule of this replica's ranks."""
        return self._parts.plan.schedule

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._parts.given.device

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage and reads the batch."""
        return self._parts.is_first

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage and reads the target."""
        return self._parts.is_last

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self._stepping.groups.index

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the pipeline that train the model together."""
        return len(self._stepping.groups.ranks)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """This rank's layers, in the model's order."""
        return self._parts.layers

    @property
    def stages(self) -> Mapping[int, StageBackward]:
        """This rank's stages, by index."""
        return self._parts.stages

    @property
    def partition(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return self._parts.plan.partition

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's names, each listed once."""
        return iter(self._parts.named_parameters().items())

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for its optimizer; a dummy if it has none.

        Raises:
            ConfigError: torch's `clip_grad_norm_` iterates over them, which would clip
                by the norm of this rank's gradients alone.
        """
        if len(self._stepping.groups.members) > 1:
            refuse_norm_of_rank(inspect.currentframe())
        yield from self._parts.named_parameters().values() or (self._nothing,)

    def zero_grad(self) -> None:
        """Sets this rank's gradients to None."""
        for one in self.parameters():
            one.grad = None

    def train(self, mode: bool = True) -> None:
        """Sets the training mode of this rank's layers."""
        for layer in self.layers:
            layer.module.train(mode)

    def trace(self) -> list[tuple[StageAction, float, float]]:
        """This rank's actions in the last step: action, begin and end (monotonic)."""
        return list(self._parts.executor.trace)

    def step(
        self,
        batch: Any = None,
        target: Any = None,
        *,
        input_gradients: bool = False,
        loss_scale: float = 1.0,
        outputs: OutputRanks | None = None,
        **keywords: Any,
    ) -> StepOutput:
        """Runs one batch forward and backward; adds to the parameters' gradients.

        Args:
            batch: the batch, read on the first stage's rank; at least one sample. Dense
                tensors and arrays with a row per sample are cut along their first
                dimension. Other values go to all microbatches (see `whole` of
                `PipelineConfig`). Each replica reads its own batch, of any size; a
                replica may have none.
            target: the target, read on the last stage's rank and cut like the batch;
                omitted with ``loss_fn=None``.
            input_gradients: whether to return the batch's gradients.
            loss_scale: factor of all gradients, for float16 (see `unscale_`). The same
                on all ranks.
            outputs: ranks that receive the model's outputs, as in `evaluate`; None for
                none.
            **keywords: arguments for layers whose forward accepts them; pass each on
                every rank with such a layer. Cut like the batch.

        Raises:
            ConfigError: batch, target, loss or a keyword are wrong, or gradients are
                disabled (`torch.no_grad`); on every rank.
            MismatchError: ranks call different methods, or have different loss scales.
            ContributionError: a parameter's gradient is lost; do not step.
            RemoteRankError: another rank failed; the pipeline has ended.
            DeadlineError: a rank is late; the pipeline has ended.
            CommunicationError: a rank has disconnected, or the pipeline was closed.
        """
        scaled = (loss_scale, input_gradients, outputs)
        call = Call("step", batch, target, keywords, *scaled)
        return self._stepping.step(call)

    def evaluate(
        self,
        batch: Any = None,
        target: Any = None,
        *,
        outputs: OutputRanks = "last",
        **keywords: Any,
    ) -> EvaluationOutput:
        """Runs one batch forward in evaluation mode, without gradients.

        Args:
            batch: as in `step`.
            target: as in `step`; without it there is no loss. Pass it on the last
                stage's rank or not at all.
            outputs: ranks that receive the model's outputs: "last" (the last stage's
                rank), "all", or one rank; only within each replica.
            **keywords: as in `step`.

        Raises:
            ConfigError: batch or loss are wrong; on every rank. Others as in `step`.
        """
        call = Call("evaluate", batch, target, keywords, outputs=outputs)
        return self._stepping.evaluate(call)

    def generate(
        self,
        tokens: Any = None,
        *,
        max_new_tokens: int,
        end_token: int | None = None,
        choose: Choose = greedy,
        batch_of: BatchOf = lambda tokens: tokens,
        use_cache: bool = True,
    ) -> torch.Tensor:
        """Continues sequences of tokens with a causal model; on all ranks.

        Each stage caches the keys and values of earlier positions, so each new token
        sends only one position through the stages. This works for transformers models
        cut by `sample=`, and for layers whose forward accepts ``cache=``, a dict of the
        layer's own that is empty at first. With other layers each token reruns the
        whole sequence, and a log line reports it. So it does if the first three tokens
        show that caches change the logits. Several sequences are cut into microbatches,
        which keep all ranks busy.

        Args:
            tokens: [sequences, length], read on the first stage's rank.
            max_new_tokens: most tokens to append; the same on all ranks.
            end_token: token that ends a sequence; the rest is filled with it.
            choose: function from the last position's logits [sequences, vocabulary] to
                tokens, called on the last stage's rank. Greedy by default.
            batch_of: function from tokens to the model's input, if the input is more
                than tokens. With a cache the model receives the last positions of
                tensors [sequences, length, ...], but the whole `attention_mask`.
            use_cache: whether layers may cache. The same on all ranks.

        Returns:
            All tokens, on every rank, on the CPU.

        Raises:
            ConfigError: tokens, settings or the model's output are wrong, on every
                rank; or there are several replicas. Others as in `step`.
        """
        given = (tokens, max_new_tokens, end_token, choose, batch_of, use_cache)
        return Generation(self._stepping, *given).run()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clips the gradients of all stages to a common norm of at most `max_norm`.

        Args:
            max_norm: maximum 2-norm; a shared parameter counts once. The same on all
                ranks.

        Returns:
            The norm before clipping, on every rank.

        Raises:
            ConfigError: max_norm is not a number of at least 0, here or on another
                rank; nothing has changed.
            MismatchError: ranks pass different values; nothing has changed.
            CommunicationError: a rank has disconnected or is late; the pipeline has
                ended.
        """

        def clip() -> float:
            copies = self._stepping.replicas.copies
            return clip_norm(self.parameters(), copies, max_norm, self._communicator)

        return self._communicator.surviving(clip)

    def unscale_(
        self,
        loss_scale: float | torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> bool:
        """Divides the gradients by a loss scale.

        With a scaler, replaces its own `unscale_`, which would only see this rank's
        gradients. Its `step` and `update` then act equally on every rank::

            pipe.step(batch, target, loss_scale=scaler.get_scale())
            pipe.unscale_(scaler, optimizer)
            pipe.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()

        Args:
            loss_scale: the scale given to :meth:`step`; or the GradScaler that provided
                it.
            optimizer: optimizer that the scaler steps.

        Returns:
            True if every gradient on every rank is finite; otherwise do not step.

        Raises:
            ConfigError: the scale is not above 0 and finite, here or on another rank.
            MismatchError: ranks pass different scales.
            CommunicationError: a rank has disconnected or is late; the pipeline has
                ended.
        """
        mine = self.parameters()
        return unscale(mine, loss_scale, optimizer, self._communicator)

    def local_state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank under the model's names."""
        return self._state.local_model()

    def state_dict(self, rank: int | None = None) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the whole model under its own names, on the CPU.

        Args:
            rank: rank that needs the result; None for all. Others get an empty dict.
        """
        return self._state.model(rank)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's part of a state_dict of the whole model.

        Raises:
            ConfigError: a parameter or buffer of this rank is missing or has another
                shape, the state has unknown names, or tied tensors differ in it;
                nothing was loaded here.
        """
        self._state.load_model(state)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads this rank's part of a model from safetensors files; reads only that.

        Values are converted to the model's dtypes. Only one tensor of a file is in
        memory at a time. With a model on the meta device and ``init="load"`` no rank
        ever holds more than its own layers.

        Args:
            path: folder of `save_pretrained` of transformers (with one or several
                files), or of a checkpoint of elche; or a safetensors file.

        Raises:
            CheckpointError: there is no such file, or it cannot be read.
            ConfigError: as `load_state_dict`.
        """
        self._state.load_model(WeightFiles.found_at(Path(path)))

    def optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, rank: int | None = None
    ) -> NamedState:
        """State of an optimizer over the whole model, by parameter name, on the CPU.

        The state loads under any partition, schedule and number of ranks.

        Args:
            optimizer: optimizer over :meth:`parameters`, with the same groups on every
                rank; call this once per optimizer.
            rank: rank that needs the result; None for all. Others get {}.

        Returns:
            Torch's format, with names in place of numbers. A single-process optimizer
            over the whole model loads it by
            `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`.

        Raises:
            ConfigError: the optimizer has a parameter that is not this rank's, here or
                on another rank.
            MismatchError: ranks have different groups.
        """
        return self._state.optimizer(optimizer, rank)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: NamedState
    ) -> None:
        """Loads this rank's part of a result of `optimizer_state_dict`.

        Raises:
            ConfigError: `state` has another format, or the optimizer has a parameter
                that is not this rank's.
            MismatchError: `state` lacks a parameter or a group; nothing was loaded
                here.
        """
        self._state.load_optimizer(optimizer, state)

    @property
    def steps_done(self) -> int:
        """Number of training steps so far, including those before a resume."""
        return self._stepping.steps

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the remaining batches of an epoch, on every rank.

        Yields the batches of `loader`; between them checkpoints (`elche.save`,
        `elche.save_every`) can be made. A resumed run draws the same order and skips
        the batches already done. So do not accumulate gradients over several batches;
        accumulate them over several `step` calls with one batch.
        """
        return self._state.passes.over(loader)

    def register_optimizer(self, optimizer: GivenOptimizers) -> None:
        """Registers the optimizers whose state is saved with the pipeline's.

        Args:
            optimizer: optimizer over :meth:`parameters`, or a list of several; the same
                with the same groups on every rank. () if nothing is trained.

        Raises:
            ConfigError: an argument is not an optimizer.
        """
        self._state.optimizers = as_optimizers(optimizer)

    def close(self) -> None:
        """Closes the connections. Call it on every rank; may be called twice.

        Waits for a checkpoint that is being written.
        """
        self._state.close(has_failed=False)
        self._parts.detach()
        self._communicator.close()

    @property
    def _parts(self) -> Parts:
        return self._stepping.parts
