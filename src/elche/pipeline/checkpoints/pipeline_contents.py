"""Contents of a pipeline's checkpoint: each rank's part, and the shared state.

Every rank writes its own layers and their optimizer state under the model's names. A
resuming rank reads only the entries of its own layers, from all parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from elche.checkpoint.capture import Captured
from elche.checkpoint.contents import fitting, is_bound, load_registered
from elche.checkpoint.store import Checkpoint
from elche.errors import ConfigError, MismatchError
from elche.pipeline.checkpoints.named_states import (
    NamedState,
    join_states,
    load_named_state,
    named_state,
    part_of,
)
from elche.pipeline.checkpoints.pipeline_state import PipelineState

KIND = "pipeline"


@dataclass(frozen=True, slots=True)
class PipelineContents:
    """Objects whose state a pipeline checkpoint contains.

    Attributes:
        pipe: the pipeline's state.
        registered: objects registered by the user, by name, including optimizers.
    """

    pipe: PipelineState
    registered: Mapping[str, Any]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The pipeline's optimizers, and the registered ones."""
        known = [*self.pipe.optimizers, *self.registered.values()]
        named = {id(one): one for one in known if isinstance(one, Optimizer)}
        return list(named.values())

    @property
    def others(self) -> dict[str, Any]:
        """Registered objects other than optimizers, by name."""
        known = self.registered.items()
        return {n: one for n, one in known if not isinstance(one, Optimizer)}

    def capture(self, loop: Mapping[str, int]) -> Captured:
        """Copies all state on this rank; must be called on all ranks together."""
        pipe, passes = self.pipe, self.pipe.passes
        pipe.average_buffers()
        self._refuse_unknown()
        others = self.others.items()
        names = pipe.parameter_names()
        own = {
            "optimizers": [named_state(one, names) for one in self.optimizers],
            "free": {n: o.state_dict() for n, o in others if not is_bound(o)},
            "random": passes.random(),
            "begun": passes.begun,
        }
        if pipe.stepping.groups.index:  # replica 0 saves the same state
            own["optimizers"] = []
            return Captured.of(own, {}, {})
        shared = {}
        if pipe.rank == 0:
            bound = {n: o.state_dict() for n, o in others if is_bound(o)}
            shared = {
                "loop": dict(loop),
                "run": {"steps": pipe.stepping.steps},
                "epochs": {"done": passes.done},
                "registered": bound,
                "optimizers": [type(one).__name__ for one in self.optimizers],
            }
        model_file = f"model-rank{pipe.rank}.safetensors"
        return Captured.of(own, shared, pipe.local_model(), model_file)

    def _refuse_unknown(self) -> None:
        held = {
            id(one)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for one in group["params"]
        }
        missing = [
            name
            for name, one in self.pipe.stepping.parts.named_parameters().items()
            if one.requires_grad and id(one) not in held
        ]
        if missing:
            raise ConfigError(
                f"no registered optimizer holds the trainable {missing[0]}: call "
                "pipe.register_optimizer(optimizer) before saving or resuming, so "
                "that its state is saved"
            )

    def load(self, found: Checkpoint) -> dict[str, Any]:
        """Loads a checkpoint into the pipeline on this rank.

        Returns:
            The state shared by all ranks.

        Raises:
            MismatchError: the checkpoint does not fit this pipeline.
            CheckpointError: a file is damaged.
        """
        if found.manifest.info.get("kind") != KIND:
            raise MismatchError(
                f"{found.path} was saved by elche.setup, but this run uses a Pipeline"
            )
        self._refuse_unknown()
        pipe = self.pipe
        shared: dict[str, Any] = found.shared()
        kinds = [type(one).__name__ for one in self.optimizers]
        if kinds != shared["optimizers"]:
            raise MismatchError(
                f"{found.path} has the state of {shared['optimizers']}, but this "
                f"script passes {kinds}; give the same optimizers in the same order"
            )
        with fitting(found, "model"):
            pipe.load_model(found.model_parts())
        states = self._optimizer_states(found)
        for each, state in zip(self.optimizers, states, strict=True):
            with fitting(found, "optimizer"):
                load_named_state(each, pipe.parameter_names(), state)
        was_there = pipe.rank < found.manifest.world_size
        own = found.of_rank(pipe.rank if was_there else 0, _without_optimizers)
        load_registered(found, self.others, {**shared["registered"], **own["free"]})
        pipe.stepping.steps = shared["run"]["steps"]
        pipe.passes.resume(shared["epochs"]["done"], own["begun"], own["random"])
        return shared

    def _optimizer_states(self, found: Checkpoint) -> list[NamedState]:
        """Collects this rank's optimizer states from all ranks' parts."""
        mine = {n for some in self.pipe.parameter_names().values() for n in some}

        def only_mine(tree: dict[str, Any]) -> dict[str, Any]:
            return {"optimizers": [part_of(one, mine) for one in tree["optimizers"]]}

        parts = [
            found.of_rank(rank, only_mine)["optimizers"]
            for rank in range(found.manifest.world_size)
        ]
        return [join_states(each) for each in zip(*filter(None, parts), strict=True)]


def _without_optimizers(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in tree.items() if name != "optimizers"}
