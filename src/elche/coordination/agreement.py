"""Comparison of the ranks' settings, models and data before training. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from elche.cadence.convergence import optimizer_kind
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchCut
from elche.coordination.accounts.local_batches import local_cut
from elche.coordination.accounts.model_checks import ModelChecks
from elche.coordination.protocol.events import EpochOpened, Join, Left
from elche.errors import MismatchError

SHOWN_DIFFERENCES = 5
CHANGED_BETWEEN = (
    "parameters were changed between epochs on some ranks only (a checkpoint loaded on "
    "one rank, or an optimizer step on gradients that were left over after the loop, "
    "say); do it on every rank, and step inside the loop"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that ranks compare except tensors.

    Attributes:
        config: the run's settings.
        loader: description of the data: length, batch size, and so on.
        optimizer: class and hyperparameters of each registered optimizer.
        min_share_samples: least samples of a share that is not empty, under ``sync``.
        epochs: number of epochs in the run, None if unknown.
        micro_batches: the loop splits a share above a rank's ``max_samples`` into
            several parts, so shares may exceed that limit.
        is_default: the user named no policy, and windows are possible.
        is_stream: the data set is a stream.
        syncs_batchnorm: the model has SyncBatchNorm layers.
        software: versions that must be equal, by name.
        own_sampler: class of a sampler whose current state only the drawing rank has,
            so that no other rank can continue it; "" for torch's own samplers.
    """

    config: RunConfig
    loader: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    min_share_samples: int = 1
    epochs: int | None = None
    micro_batches: bool = False
    is_default: bool = False
    is_stream: bool = False
    syncs_batchnorm: bool = False
    software: Mapping[str, str] = field(default_factory=dict)
    own_sampler: str = ""

    def cut_for(self, ranks: Collection[int]) -> BatchCut:
        """Returns how windows of these ranks cut global batches."""
        caps = () if self.micro_batches else map(self.config.cap_of, ranks)
        windows, least = self.config.windows, self.min_share_samples
        return local_cut(windows, len(ranks), least, caps)

    @property
    def optimizer_kind(self) -> str:
        """Kind of the optimizers, as named in the convergence table."""
        classes = (k for k in self.optimizer if k.rpartition(".")[2] == "class")
        return optimizer_kind(str(self.optimizer[name]) for name in classes)

    def as_pairs(self) -> tuple[tuple[str, str], ...]:
        """Returns (name, JSON value) pairs, the format of a :class:`Join`."""
        flat = dict(_flat("config", self.config.as_dict()))
        for group in _GROUPS:
            flat |= {f"{group}.{k}": v for k, v in getattr(self, group).items()}
        flat |= {name: getattr(self, name) for name in _PLAIN}
        return tuple((name, json.dumps(flat[name])) for name in sorted(flat))


_GROUPS = "loader", "optimizer", "software"
_PLAIN = [each.name for each in fields(Settings) if each.name not in _GROUPS][1:]


def settings_of(join: Join) -> Settings:
    """Parses what :meth:`Settings.as_pairs` wrote."""
    flat = {name: json.loads(value) for name, value in join.settings}

    def part(prefix: str) -> dict[str, Any]:
        start = prefix + "."
        return {k[len(start) :]: v for k, v in flat.items() if k.startswith(start)}

    config: dict[str, Any] = {}
    for name, value in part("config").items():
        *groups, setting = name.split(".")
        group = config
        for each in groups:
            group = group.setdefault(each, {})
        group[setting] = value
    values: dict[str, Any] = {group: part(group) for group in _GROUPS}
    values |= {name: flat[name] for name in _PLAIN if name in flat}
    return Settings(config=RunConfig(**config), **values)


def what_differs(joins: Sequence[Join]) -> str:
    """Compares all ranks with rank 0; returns the difference as text, or ""."""
    first = joins[0]
    for join in joins[1:]:
        sizes = first.world_size, join.world_size
        if sizes[0] != sizes[1]:
            diff = f"rank 0 has {sizes[0]}, rank {join.rank} has {sizes[1]}"
            return f"world size differs: {diff}"
        if join.settings == first.settings and join.tensors == first.tensors:
            continue
        diff = _difference(dict(first.settings), dict(join.settings), join.rank)
        if diff:
            diff += "; give the same on every rank"
            return f"configuration differs between ranks: {diff}"
        one, other = (
            {name: f"{shape} {dtype}" for name, shape, dtype in each.tensors}
            for each in (first, join)
        )
        if diff := _difference(one, other, join.rank):
            diff += "; build the same model on every rank"
        else:
            diff = f"rank 0 and rank {join.rank} hold the same tensors in another order"
        return f"the model differs between ranks: {diff}"
    return ""


def disagreement(joins: Sequence[Join]) -> str:
    """Returns the reason why the ranks cannot train together; "" if they can."""
    if difference := what_differs(joins):
        return difference
    hints = settings_of(joins[0]).config.speed_hints
    if hints is not None and len(hints) != len(joins):
        return (
            f"expected a speed hint per rank ({len(joins)}), but speed_hints has "
            f"{len(hints)}"
        )
    return ""


def opened_differently(opened: Mapping[int, EpochOpened]) -> str:
    """Returns a difference between ranks that open an epoch as text, or ""."""
    lowest = min(opened)
    first = opened[lowest]
    for rank, other in sorted(opened.items()):
        if (other.epoch, other.continues) != (first.epoch, first.continues):
            return (
                f"rank {rank} begins with epoch {other.epoch}, rank {lowest} with "
                f"{first.epoch}: call elche.resume with the same folder on every rank"
            )
        if other.layout != first.layout:
            return (
                f"rank {rank} does not train what rank {lowest} trains in epoch "
                f"{first.epoch}: parameters were frozen, unfrozen, added or "
                "replaced on some ranks only; do it on every rank"
            )
        if other.steps != first.steps:
            return (
                f"rank {rank} asks for {_steps_of(other)}, rank {lowest} for "
                f"{_steps_of(first)}; give loader.steps() the same number on every "
                "rank"
            )
    when = f"where epoch {first.epoch} begins"
    checks = {rank: each.checks for rank, each in opened.items()}
    try:
        ModelChecks(when, "before that", CHANGED_BETWEEN).compare(checks)
    except MismatchError as error:
        return str(error)
    return ""


def left_before(opened: EpochOpened, left: Mapping[int, Left]) -> str:
    """Returns the reason why a rank cannot open an epoch after others have left."""
    for rank, last in sorted(left.items()):
        if last.batches and last.steps:
            per_step = last.samples / last.steps
            owed = max(0, round(last.batches * per_step) - last.samples)
            return (
                f"rank {rank} left inside an epoch after {last.batches} batches of "
                f"its own, and rank {opened.rank} continues with epoch "
                f"{opened.epoch}. Under averaging each rank trains its own batches, "
                "so their number on one rank is not the run's steps. The run trained "
                f"{last.samples} samples ({last.steps:.1f} steps); {owed} samples of "
                f"{last.batches} steps are missing. Write `for batch in "
                f"loader.steps({last.batches}):`, or use policy='sync'"
            )
    return (
        f"rank {opened.rank} opens epoch {opened.epoch}, but ranks {sorted(left)} have "
        "left: run the same epochs on every rank, or count steps by loader.steps(n)"
    )


def _steps_of(opened: EpochOpened) -> str:
    return "a whole epoch" if opened.steps < 0 else f"{opened.steps} steps more"


def _flat(prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields settings by their full names, such as ``config.windows.anchor``."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", value


def _difference(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> str:
    names = [n for n in sorted({*first, *other}) if first.get(n) != other.get(n)]
    lines = [
        f"{name}: rank 0 has {first.get(name, '(absent)')}, rank {rank} has "
        f"{other.get(name, '(absent)')}"
        for name in names[:SHOWN_DIFFERENCES]
    ]
    more = len(names) - len(lines)
    return "; ".join([*lines, f"and {more} more"] if more else lines)
