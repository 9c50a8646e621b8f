"""A run on Ray, and the node requirements of its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Final

from elche.errors import ConfigError
from elche.runtime.process.launch_config import LaunchConfig
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
        is_text = isinstance(labels, Mapping) and all(
            isinstance(text, str) for label in labels.items() for text in label
        )
        has_needs = isinstance(needs, Mapping) and needs
        is_right = has_needs and all(map(_is_positive, needs.values()))
        for name, example, is_so in (
            ("resources", {"GPU": 1}, is_right),
            ("label_selector", {"ray.io/accelerator-type": "A100"}, is_text),
            ("speed_hint", 0.5, hint is None or _is_positive(hint)),
        ):
            if not is_so:
                raise ConfigError(
                    f"expected {name} of a RankSpec such as {example!r}, got "
                    f"{getattr(self, name)!r}"
                )

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


@dataclass(frozen=True, slots=True)
class Job:
    """A run: ranks, program and settings.

    Attributes:
        ranks: node requirements of each rank.
        call: the function and its arguments, pickled; b"" for a script.
        launch: configuration of the launch; the supervisor adds the ranks.
        restarts: see `RestartConfig`.
        start_s: deadline (s) of the first ranks' start.
    """

    ranks: Sequence[RankSpec] | PerNode
    call: bytes
    launch: LaunchConfig
    restarts: RestartConfig
    start_s: float


def _is_positive(number: object) -> bool:
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    return is_number and 0 < float(number) < math.inf  # type: ignore[arg-type]
