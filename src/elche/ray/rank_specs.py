"""A run on Ray, and the node requirements of its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final

from elche.errors import ConfigError
from elche.runtime.process.restarts import RestartConfig

NODE_LABEL: Final = "ray.io/node-id"
"""Label that Ray gives to each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Requirements of a rank, by which Ray places it on a node.

    Attributes:
        resources: resources of the node that are reserved for this rank, such as
            ``{"GPU": 1, "CPU": 4}``.
        label_selector: labels of the node, such as ``{"ray.io/accelerator-type":
            "A100"}``.
        speed_hint: relative speed until the first measurement; for all ranks or none.
    """

    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    label_selector: Mapping[str, str] = field(default_factory=dict)
    speed_hint: float | None = None

    def __post_init__(self) -> None:
        needs, labels, hint = self.resources, self.label_selector, self.speed_hint
        if not isinstance(needs, Mapping) or not needs:
            raise ConfigError(
                f"expected resources of a RankSpec such as {{'GPU': 1}}, got {needs!r}"
            )
        for name, amount in needs.items():
            if not _is_positive(amount):
                raise ConfigError(
                    f"expected positive numbers as resources, got {amount!r} of "
                    f"{name!r}"
                )
        if not isinstance(labels, Mapping) or not all(
            isinstance(text, str) for label in labels.items() for text in label
        ):
            raise ConfigError(
                "expected a label_selector such as {'ray.io/accelerator-type': "
                f"'A100'}}, got {labels!r}"
            )
        if hint is not None and not _is_positive(hint):
            raise ConfigError(f"expected a positive speed_hint, got {hint!r}")

    def on(self, node: str) -> RankSpec:
        """Returns the same requirements, pinned to one node by its id."""
        labels = {**self.label_selector, NODE_LABEL: node}
        return RankSpec(resources=self.resources, label_selector=labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerNode(RankSpec):
    """One rank on each suitable node, also on nodes that are added later."""

    def fits(self, node: Mapping[str, object]) -> bool:
        """True if a node, as `ray.nodes` describes it, can hold such a rank."""
        has, labels = node["Resources"], node.get("Labels") or {}
        assert isinstance(has, Mapping)
        assert isinstance(labels, Mapping)
        return (
            bool(node["Alive"])
            and all(has.get(name, 0) >= n for name, n in self.resources.items())
            and all(labels.get(k) == v for k, v in self.label_selector.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run: ranks, program and settings.

    Attributes:
        ranks: node requirements of each rank.
        command: a script and its arguments; () for a function.
        call: the function and its arguments, pickled.
        launch: settings of the launch; the supervisor adds the ranks.
        restarts: see `RestartConfig`.
        start_s: deadline (s) of the first ranks' start.
    """

    ranks: Sequence[RankSpec] | PerNode
    command: tuple[str, ...]
    call: bytes
    launch: dict[str, Any]
    restarts: RestartConfig
    start_s: float


def _is_positive(number: object) -> bool:
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    return is_number and 0 < float(number) < math.inf  # type: ignore[arg-type]


def hints_of(ranks: Sequence[RankSpec]) -> str:
    """Speed hints of ranks as an environment variable; "" if there are none.

    Raises:
        ConfigError: some ranks have one, and others not.
    """
    hints = [spec.speed_hint for spec in ranks if spec.speed_hint is not None]
    if hints and len(hints) < len(ranks):
        raise ConfigError(
            f"expected a speed_hint of every rank or of none, got {len(hints)} for "
            f"{len(ranks)} ranks"
        )
    return ",".join(repr(float(hint)) for hint in hints)
