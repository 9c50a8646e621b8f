"""Variants of a cut model's layers: without some arguments, or with caches.

A variant changes the code between the model's submodules, but neither the submodules
nor the cuts. Variants are used in evaluation and generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from elche.errors import ConfigError
from elche.pipeline.peers.communicator import PipelineCommunicator
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.stage import CACHE, Layer, Stage
from elche.pipeline.step.executor import Executor


@final
class CutVariants:
    """Executors of this rank's layers and of their variants, built on first use.

    Attributes:
        proven: kinds of input for which caches reproduced the logits of uncached runs;
            the same on all ranks.
        refused: reason for not using caches, or ""; the same on all ranks.
    """

    def __init__(self, parts: Parts, communicator: PipelineCommunicator) -> None:
        self._parts, self._communicator = parts, communicator
        self.proven: set[str] = set()
        self.refused = ""
        self._made: dict[tuple[tuple[str, ...], bool], Executor]
        self._made = {((), False): parts.executor}
        if parts.given.layers.cut_again is None:
            self._made[(), True] = parts.executor

    def executor(self, omitted: Sequence[str], has_cache: bool) -> Executor:
        """Executor of a variant; call it on all ranks with the same arguments.

        `omitted` has the arguments of the sample that the batch omits.
        """
        key = tuple(omitted), has_cache
        if key not in self._made:
            what = "cutting the model again"
            self._communicator.agree(lambda: self._make(*key), what)
        return self._made[key]

    def offer(self, omitted: Sequence[str]) -> tuple[bool, str]:
        """True if a layer of this rank accepts a cache; and the error of the check.

        Cuts the model again, which may take seconds.
        """
        key = tuple(omitted), True
        try:
            if key not in self._made:
                self._make(*key)
        except Exception as error:  # without caches generation is slow but correct
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            return False, f"{kind}{error}"
        stages = [one.stage for one in self._made[key].stages.values()]
        return any(CACHE in one.keywords for one in stages), ""

    def _make(self, omitted: tuple[str, ...], has_cache: bool) -> None:
        parts, layers = self._parts, self._parts.given.layers
        assert layers.cut_again is not None, "only a cut model's batch omits arguments"
        made = layers.cut_again(omitted, has_cache)
        if len(made) != len(layers):
            raise ConfigError(
                f"the model has {len(layers)} layers, and {len(made)} without "
                f"{', '.join(omitted) or 'arguments'} or with a cache; cut it by hand "
                "with split=lambda model: [...]"
            )
        stages = {}
        for index in parts.stages:
            mine, device = parts.plan.layers_of(index), parts.given.device
            own = [Layer(layers.names[at], made[at].to(device)) for at in mine]
            stage = Stage(index, own, layers.unpacks, None, mine.start)
            stages[index] = StageBackward(stage, None, False)
        self._made[omitted, has_cache] = replace(parts.executor, stages=stages)
