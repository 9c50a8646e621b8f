"""Values of a call that are cut into microbatches along their first dimension.

A trace knows which arguments of a model have a row per sample. For layers by hand the
first call with several samples decides, by name: a value has a row per sample if its
first dimension is the batch's. All ranks decide from the same reports.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, final

from elche.errors import ConfigError
from elche.pipeline.cutting.arguments import Arguments
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.stage import Stage
from elche.pipeline.trees import first_shape, items_of, split_batch

Shapes = Mapping[str, Sequence[int]]
"""Shape of the first tensor of each value whose batch dimension is not known yet."""


@final
class BatchDimensions:
    """Decides which values are cut, and cuts them.

    Args:
        parts: this rank's stages and plan; `whole=` in its settings names values that
            every microbatch receives as they are, and all others are cut then.
    """

    def __init__(self, parts: Parts) -> None:
        whole = parts.given.config.whole
        self._has_choice = whole is not None
        self._is_cut: dict[str, bool] = {}
        self._positions: Sequence[str] = ()
        if parts.is_first and parts.given.layers.unpacks:
            first = parts.layers[0].module
            arguments = getattr(first, "arguments", None)
            signature = inspect.signature(first.forward)
            if isinstance(arguments, Arguments):
                signature = arguments.signature
                self._is_cut.update(arguments.is_cut)
            self._positions = [
                name
                for name, one in signature.parameters.items()
                if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
            ]
        self._traced = frozenset(self._is_cut)
        self._is_cut.update(dict.fromkeys(whole or (), False))

    def unknown(self, stages: Sequence[Stage]) -> list[str]:
        """Names in `whole=` that no stage of this rank takes as an argument."""
        return [
            name
            for name, is_cut in self._is_cut.items()
            if not (is_cut or name.startswith("target.") or name in self._traced)
            and not any(one.takes(name) for one in stages)
        ]

    def names(self, value: Any, role: str) -> dict[Any, str]:
        """Names of a value's parts, by key or position.

        Args:
            value: a batch, a target or the keywords of a call.
            role: "batch", "target" or "keywords".
        """
        names = {key: str(key) for key in items_of(value)}
        if role == "target":
            return {key: f"target.{name}" for key, name in names.items()}
        if role == "batch" and isinstance(value, tuple):
            named = dict(enumerate(self._positions))
            names = {key: named.get(key, name) for key, name in names.items()}
        return names

    def undecided(self, value: Any, role: str) -> dict[str, list[int]]:
        """Shapes of a value's parts whose batch dimension is not known from a trace."""
        parts, names = items_of(value), self.names(value, role)
        shapes = {names[key]: first_shape(one) for key, one in parts.items()}
        found = {n: one for n, one in shapes.items() if one and n not in self._traced}
        if role != "keywords":  # the first tensor's is the batch
            found.pop(next((name for name, one in shapes.items() if one), ""), None)
        return {} if self._has_choice else found

    def learn(self, shapes: Shapes, samples: int, batch: Sequence[int]) -> None:
        """Decides about the values of a call.

        Args:
            shapes: what `undecided` returned on a rank.
            samples: samples of the batch.
            batch: shape of the batch's first tensor.

        Raises:
            ConfigError: a value's first dimension may be the batch or not, or an
                earlier call decided otherwise.
        """
        for name, shape in shapes.items():
            follows, is_cut = shape[0] == samples, self._is_cut.get(name)
            if shape[0] == 1 or (samples == 1 and is_cut is None):
                continue  # a size of 1 fits any batch
            if is_cut is None:
                if follows and samples in (*batch[1:], *shape[1:]):
                    raise ConfigError(
                        f"the first dimension of {name!r}, of shape {list(shape)}, may "
                        f"be the batch's {samples} samples or another size: pass "
                        f"whole=({name!r},) to Pipeline if each microbatch needs all "
                        "of it, or whole=() if it has a row per sample"
                    )
                self._is_cut[name] = follows
            elif is_cut and not follows:
                raise ConfigError(
                    f"{name!r} has {shape[0]} rows for a batch of {samples} samples, "
                    "and had a row per sample in an earlier call, which cut it; pass "
                    f"whole=({name!r},) to Pipeline if each microbatch needs all of it"
                )

    def split(self, value: Any, role: str, sizes: Sequence[int]) -> list[Any]:
        """Cuts a batch, a target or keywords into microbatches of these sizes."""
        names = self.names(value, role)
        whole = {key for key, one in names.items() if not self._is_cut.get(one, True)}
        return split_batch(value, sizes, whole)


def check_whole(by_rank: Sequence[Sequence[str]]) -> None:
    """Raises for a name in `whole=` that no rank knows.

    Args:
        by_rank: what `BatchDimensions.unknown` returned on each rank.

    Raises:
        ConfigError: the name is no argument of a layer.
    """
    for name in by_rank[0]:
        if all(name in unknown for unknown in by_rank):
            raise ConfigError(
                f"whole= names {name!r}, which no layer takes as an argument; expected "
                "keywords of step, keys of the batch, or arguments of the first layer"
            )
