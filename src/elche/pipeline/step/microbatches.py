"""Cuts a call's values into microbatches, and weighs the microbatches' losses.

A value with a row per sample is cut along its first dimension. A trace identifies these
values by name; without a trace the first call with several samples does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from elche.errors import ConfigError
from elche.pipeline.cutting.own_loss import IGNORED, OwnLoss
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.step.outputs import microbatch_sizes
from elche.pipeline.trees import batch_samples, named_tensors, split_batch
from elche.runtime.data.batch_weights import BatchWeights

BATCH, TARGET, KEYWORDS = _ROLES = ("batch", "target", "keywords")
Given = Mapping[str, Any]
"""Batch, target and keywords that this rank reads, by role."""


@final
class Microbatches:
    """Cuts the values of calls into microbatches, and weighs them.

    Args:
        parts: this rank's stages and plan.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._config = parts, parts.given.config
        self._whole = frozenset(self._config.whole or ())
        arguments = getattr(parts.given.layers.sources[0], "arguments", None)
        self._unsure = set[str]() if arguments is None else arguments.unsure
        known = {} if arguments is None else arguments.is_cut
        self._traced = {n: cut for n, cut in known.items() if n not in self._unsure}
        self._is_cut = {**self._traced, **dict.fromkeys(self._whole, False)}

    def split(self, value: Any, role: str, sizes: Sequence[int]) -> list[Any]:
        """Cuts a value into microbatches of these sizes."""
        whole = {name for name, is_cut in self._is_cut.items() if not is_cut}
        return split_batch(value, sizes, whole, _prefix(role))

    def shapes(self, given: Given) -> dict[str, Sequence[int]]:
        """Shape of each value's first tensor, by name; () if its cut is known.

        The batch's first tensor is also listed as ``""``.
        """
        found: dict[str, Sequence[int]] = {}
        for role in _ROLES:
            tensors = named_tensors(given[role], _prefix(role))
            if role == BATCH and tensors:
                found[""] = list(tensors[0][1].shape)
            for place, (name, one) in enumerate(tensors):
                is_known = name in self._traced or (role != KEYWORDS and not place)
                found.setdefault(name, () if is_known else list(one.shape))
        return found

    def learn(
        self, by_rank: Sequence[Mapping[str, Sequence[int]]], checks_names: bool
    ) -> None:
        """Decides which values of a call have a row per sample, equally on all ranks.

        Args:
            by_rank: results of `shapes` on the ranks of one replica.
            checks_names: whether `whole` may only name values of this call.
        """
        batch = next((one[""] for one in by_rank if "" in one), None)
        if batch is None:
            return
        names = {name for one in by_rank for name in one}
        lacking = self._whole - names
        if checks_names and lacking:
            raise ConfigError(
                f"whole= names {sorted(lacking)}, and the call has no such value; "
                "expected keywords, keys or positions of the batch, or 'target.KEY'"
            )
        known = {name for one in by_rank for name, shape in one.items() if not shape}
        for name, shape in ((n, s) for one in by_rank for n, s in one.items()):
            if name and name not in known | self._whole and shape[0] > 1 < batch[0]:
                self._decide(name, shape, batch)

    def _decide(self, name: str, shape: Sequence[int], batch: Sequence[int]) -> None:
        follows, is_cut = shape[0] == batch[0], self._is_cut.get(name)
        is_like = name in self._unsure or batch[0] in (*batch[1:], *shape[1:])
        is_open = is_cut is None and is_like
        if follows and is_open and self._config.whole is None:
            raise ConfigError(
                f"the first dimension of {name!r}, of shape {list(shape)}, may be the "
                f"batch's {batch[0]} samples or another size: pass whole=({name!r},) "
                "to Pipeline if each microbatch needs all of it, or whole=() if it has "
                "a row per sample"
            )
        if is_cut and not follows:
            raise ConfigError(
                f"{name!r} has {shape[0]} rows for {batch[0]} samples, and was cut "
                f"with a row per sample in an earlier call; pass whole=({name!r},) to "
                "Pipeline if each microbatch needs all of it"
            )
        self._is_cut.setdefault(name, follows)

    def weigh(self, given: Given) -> tuple[list[float] | None, bool]:
        """Weights of the microbatches, on the rank that reads the values to weigh.

        Returns:
            The weights; None on other ranks, and if samples are the weights. The second
            value is True if samples are the weights and their ignored shares differ.
        """
        loss_fn, weight_of = self._parts.given.loss_fn, self._config.weight_of
        if self._config.loss_reduction == "sum":
            return None, False
        role = BATCH if isinstance(loss_fn, OwnLoss) else TARGET
        cut = {one: self._cut(given[one], one) for one in (BATCH, TARGET)}
        if weight_of is not None and given[role] is not None:
            if not cut[role]:
                raise ConfigError(f"weight_of= needs samples to cut in the {role}")
            of, parts = BatchWeights(weight_of, self._parts.rank).of, cut[role]
            where = [f"the {role} of microbatch {i}" for i, _ in enumerate(parts)]
            return list(map(of, parts, where)), False
        if isinstance(loss_fn, OwnLoss):
            sizes = [batch_samples(one) or 0 for one in cut[BATCH]]
            words = self.split(given[KEYWORDS], KEYWORDS, sizes)
            counts = map(loss_fn.count, cut[BATCH], words)
            return [one for one in counts if one is not None] or None, False
        uneven = [len(set(map(_ignored, parts))) > 1 for parts in cut.values()]
        return None, weight_of is None and any(uneven)

    def _cut(self, value: Any, role: str) -> list[Any]:
        """Cuts a value into microbatches by its own number of samples."""
        samples, most = batch_samples(value), self._parts.plan.schedule.num_microbatches
        sizes = microbatch_sizes(samples, None, most) if samples else []
        return self.split(value, role, sizes)


def _prefix(role: str) -> str:
    return "target." if role == TARGET else ""


def _ignored(microbatch: Any) -> float:
    """Number of ignored targets per sample."""
    tensors = [one for _, one in named_tensors(microbatch) if one.dtype == torch.int64]
    ignored = sum(int((one == IGNORED).sum()) for one in tensors)
    return ignored / (batch_samples(microbatch) or 1)
