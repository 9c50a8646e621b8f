"""`Pipeline`: a model in stages on several devices, trained as if it were on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, final

import torch
from torch import nn
from typing_extensions import Self

from elche.pipeline.checkpoints.named_states import (
    GivenOptimizers,
    NamedState,
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
    CachedLayers,
    Choose,
    Generation,
    greedy,
)
from elche.pipeline.step.gradients import clip_norm, unscale
from elche.pipeline.step.inputs import Call
from elche.pipeline.step.outputs import EvaluationOutput, OutputRanks, StepOutput
from elche.schedule.actions import Schedule, StageAction

Batch = TypeVar("Batch")


@final
class Pipeline:
    """Trains a model cut into stages, each on the rank that the schedule places it on.

    Gradients are those of one process on the whole batch: the mean (or sum) over its
    samples, whatever the microbatches' sizes; with `replicas` on the union of the
    replicas' batches. Every rank builds its own stages alone:
    give factories, or build the model under ``torch.device("meta")``. After
    :meth:`step` the gradients are in ``grad``; the optimizer is the user's, over
    :meth:`parameters`.

    Call every method that communicates (the constructor, `step`, `evaluate`,
    `generate`, `clip_grad_norm_`, `state_dict`, `close`) on all ranks in the same
    order.

    Args:
        model: any module (with `sample` it is cut by itself, or at `split_points`), an
            nn.Sequential, or a list of layers or of factories of layers.
        loss_fn: of output and target of one microbatch; returns a scalar.
        micro_batches: how many parts a batch is cut into.
        schedule: a name (one of `FIXED_SCHEDULES`, or "auto"), the path of a CSV file,
            or a schedule.
        devices: name of each rank's device; None takes what the launcher says.
        split: cuts a module into layers by hand, see
            `elche.pipeline.setup.building.layers_of`.
        config: further settings as one value; or give them as options.
        **options: fields of `PipelineConfig`.

    Raises:
        ConfigError: an argument is wrong, here or on another rank.
        MismatchError: ranks disagree about model, schedule or settings.
        CommunicationError: the ranks did not come together.
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
        self._cached = CachedLayers(self._parts)
        self._communicator, self._groups = self._state.communicator, self._state.groups
        self.config = self._stepping.config
        self.rank, self.world_size = self._state.rank, self._state.world_size

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
    def schedule(self) -> Schedule:
        """Schedule that this replica's ranks run."""
        return self._parts.plan.schedule

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._parts.given.device

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage, and reads the batch."""
        return self._parts.is_first

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage, and reads the target."""
        return self._parts.is_last

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self._groups.index

    @property
    def num_replicas(self) -> int:
        """Pipelines that train the model together."""
        return len(self._groups.ranks)

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
        """Layers of each stage."""
        return self._parts.plan.partition

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's names, each once."""
        return iter(self._parts.named_parameters().items())

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for its optimizer."""
        return iter(self._parts.named_parameters().values())

    def zero_grad(self) -> None:
        """Drops the gradients of this rank."""
        for one in self.parameters():
            one.grad = None

    def train(self, mode: bool = True) -> None:
        """Sets the layers' mode."""
        for layer in self.layers:
            layer.module.train(mode)

    def trace(self) -> list[tuple[StageAction, float, float]]:
        """This rank's actions in the last step: begin and end, time.monotonic()."""
        return list(self._parts.executor.trace)

    def step(
        self,
        batch: Any = None,
        target: Any = None,
        *,
        input_gradients: bool = False,
        loss_scale: float = 1.0,
        **keywords: Any,
    ) -> StepOutput:
        """Runs one batch forward and backward; adds to the parameters' gradients.

        Args:
            batch: read on the first stage's rank; of any number of samples, one at
                least. Dense tensors, and arrays that
                `torch.as_tensor` takes, whose first dimension is that of the first one
                are cut along it; other values go to all microbatches. Of several
                replicas each reads its own, of any size; one may have none.
            target: read on the last stage's rank, cut in the same way.
            input_gradients: whether to return the batch's gradients.
            loss_scale: multiplies all gradients; for float16 (see `unscale_`). The same
                on all ranks.
            **keywords: for the layers whose forward has such an argument, on every rank
                that has one of them; cut like the batch.

        Raises:
            ConfigError: batch, target, loss or a keyword are wrong, or there are no
                gradients here (`torch.no_grad`); on every rank.
            MismatchError: ranks call different methods, or give other loss scales.
            ContributionError: a parameter's gradient is lost; do not step.
            RemoteRankError: another rank failed; the pipeline has ended.
            DeadlineError: a rank is late; the pipeline has ended.
            CommunicationError: a rank is gone; the pipeline has ended, or was closed.
        """
        call = Call("step", batch, target, keywords, loss_scale, input_gradients)
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
            target: as in `step`; without one there is no loss. Give it on the last
                stage's rank or not at all.
            outputs: which rank gets what the last layer returns: the last stage's, all,
                or the rank of this number; of several replicas, those of its own.
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

        Each stage keeps the keys and values of earlier positions, and one new position
        travels per token: of a model of transformers that was cut by `sample=`, and of
        layers whose forward takes ``cache=``, a dict that is empty at first and theirs
        until the end. With other layers each token runs all of the sequence again, and
        the log says so; so it does where caches lead to other logits, which is looked
        at in the first three tokens. Several sequences are cut into microbatches as a
        batch is, and keep all ranks busy.

        Args:
            tokens: [sequences, length], read on the first stage's rank.
            max_new_tokens: how many to append at most; the same on all ranks.
            end_token: where a sequence ends; it is filled up with it.
            choose: of the last position's logits [sequences, vocabulary], the tokens;
                called on the last stage's rank. The likeliest unless given.
            batch_of: of tokens, the model's input, where it takes more than them. With
                a cache the model gets the last positions of its tensors [sequences,
                length, ...]; an `attention_mask` whole.
            use_cache: whether layers may keep anything. The same on all ranks.

        Returns:
            All tokens, on every rank, on the CPU.

        Raises:
            ConfigError: tokens, settings or the model's output are wrong, on every
                rank; or there are several replicas. Others as in `step`.
        """
        given = (tokens, max_new_tokens, end_token, choose, batch_of, use_cache)
        return Generation(self._stepping, self._cached, *given).run()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales all gradients of all stages so that their common norm is not larger.

        Args:
            max_norm: 2-norm; a shared parameter counts once. The same on all ranks.

        Returns:
            The norm before, on every rank.

        Raises:
            ConfigError: max_norm is not a number of at least 0, here or on another
                rank; nothing has changed.
            MismatchError: ranks give different ones; nothing has changed.
            CommunicationError: a rank is gone or late; the pipeline has ended.
        """
        copies = self._stepping.replicas.copies
        return clip_norm(self.parameters(), copies, max_norm, self._communicator)

    def unscale_(
        self,
        loss_scale: float | torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> bool:
        """Divides the gradients by a loss scale.

        With a scaler, in the place of its own `unscale_`, which would see this rank's
        gradients only; then its `step` and `update` do the same on every rank::

            pipe.step(batch, target, loss_scale=scaler.get_scale())
            pipe.unscale_(scaler, optimizer)
            pipe.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()

        Args:
            loss_scale: as in :meth:`step`; or a GradScaler whose scale that was.
            optimizer: that the scaler steps.

        Returns:
            Whether every gradient on every rank is finite; do not step otherwise.

        Raises:
            ConfigError: it is not above 0 and finite, here or on another rank.
            MismatchError: ranks give different ones.
            CommunicationError: a rank is gone or late; the pipeline has ended.
        """
        mine = self.parameters()
        return unscale(mine, loss_scale, optimizer, self._communicator)

    def local_state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank under the model's names."""
        return self._state.local_model()

    def state_dict(self, rank: int | None = None) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the whole model under its own names, on the CPU.

        Args:
            rank: which rank needs it; None for all. The others get an empty dict.
        """
        return self._state.model(rank)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's part of a state_dict of the whole model.

        Raises:
            ConfigError: a parameter or buffer of this rank is missing, or has another
                shape, or the state has what no layer has; nothing was loaded here.
        """
        self._state.load_model(state)

    def optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, rank: int | None = None
    ) -> NamedState:
        """State of an optimizer over the whole model, by parameter name, on the CPU.

        It loads under any partition, schedule and number of ranks.

        Args:
            optimizer: over :meth:`parameters`; of several, call it for each. With the
                same groups on every rank.
            rank: which rank needs it; None for all. The others get {}.

        Returns:
            As torch's, with names in the place of numbers. An optimizer of a process
            that has the whole model takes it by torch's
            `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`.

        Raises:
            ConfigError: it holds what is none of this rank's parameters, here or on
                another rank.
            MismatchError: ranks have different groups.
        """
        return self._state.optimizer(optimizer, rank)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: NamedState
    ) -> None:
        """Loads this rank's part of what `optimizer_state_dict` returned.

        Raises:
            ConfigError: it is none, or the optimizer has parameters that this rank
                has not.
            MismatchError: a parameter or a group is missing in it; nothing was loaded
                here.
        """
        self._state.load_optimizer(optimizer, state)

    @property
    def steps_done(self) -> int:
        """Training steps so far, those before a resume included."""
        return self._stepping.steps

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an epoch that are left, on every rank.

        As `loader` itself, but that checkpoints (`elche.save`, `elche.save_every`) are
        made between its batches, and that a run which is resumed gets what was left: it
        draws the same order, and drops what was done. So gradients must not be kept
        over several batches: add them over several `step` of one.
        """
        return self._state.passes.over(loader)

    def register_optimizer(self, optimizer: GivenOptimizers) -> None:
        """Names the optimizers whose state is saved with the pipeline's.

        Args:
            optimizer: over :meth:`parameters`, or a list of several; the same ones
                with the same groups on every rank. () where nothing is trained.

        Raises:
            ConfigError: it is none.
        """
        self._state.optimizers = as_optimizers(optimizer)

    def close(self) -> None:
        """Ends the connections. Call it on every rank; may be called twice.

        A checkpoint that is being written is finished before.
        """
        self._state.close(has_failed=False)
        self._parts.detach()
        self._communicator.close()

    @property
    def _parts(self) -> Parts:
        return self._stepping.parts
