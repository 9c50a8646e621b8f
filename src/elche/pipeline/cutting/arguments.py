"""Arguments of a traced forward: in the trace, and in a step."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, final

import torch
from torch import nn

from elche.errors import ConfigError
from elche.pipeline.trees import (
    as_tensors,
    batch_samples,
    flatten,
    named_tensors,
    unflatten,
)

REMEDY = (
    "put that code into a submodule of its own, or cut by hand with "
    "split=lambda model: [...]"
)
_KINDS = inspect.Parameter
_BY_NAME = (_KINDS.POSITIONAL_OR_KEYWORD, _KINDS.KEYWORD_ONLY, _KINDS.VAR_KEYWORD)


@final
@dataclass
class Arguments:
    """Arguments of the traced forward, by name.

    Attributes:
        signature: signature of forward.
        samples: number of samples in the sample batch.
        structures: structure of each argument, see `elche.pipeline.trees.flatten`.
        tensors: tensors of all arguments, in order; empty after the trace.
        owners: name of the argument that each tensor belongs to.
        first: name of the argument with the sample's first tensor, whose first
            dimension is the batch's.
        is_cut: whether an argument's tensors have a row per sample, by the argument's
            name and by its position; known after the trace.
        unsure: arguments for which that is unknown, see `learn`.
    """

    signature: inspect.Signature
    samples: int
    structures: dict[str, Any] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    first: str = ""
    is_cut: dict[str, bool] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    _symbols: list[list[Any]] = field(default_factory=list)
    _fixed: list[list[int | None]] = field(default_factory=list)
    _guards: Sequence[Any] = ()
    _seen: set[tuple[int, ...]] = field(default_factory=set)

    @staticmethod
    def read(
        model: nn.Module,
        sample: Any,
        device: torch.device,
        omitted: Collection[str] = (),
    ) -> Arguments:
        """Reads a sample as a step reads its batch.

        Args:
            model: model whose forward receives the sample: a tuple as positional
                arguments, a dict as keywords, any other value as the only argument.
            sample: one microbatch.
            device: device for its tensors.
            omitted: arguments of the sample that become None.
        """
        sample = as_tensors(sample, "the sample")
        samples = batch_samples(sample)
        if samples is None or samples < 2:
            raise ConfigError(
                "expected one microbatch of the input, of at least two samples along "
                f"its first dimension, as sample=, got {samples or 'none'}"
            )
        signature = inspect.signature(model.forward)
        odd = [n for n, one in signature.parameters.items() if one.kind not in _BY_NAME]
        if odd:
            raise ConfigError(
                f"forward of {type(model).__name__} takes {odd[0]} by position only; "
                "cut by hand with split=lambda model: [...]"
            )
        made = Arguments(signature, samples)
        named = made.of_batch(sample, {})
        named.update((name, None) for name in named if name in omitted)
        order = sample if isinstance(sample, dict) else named
        made.first = next(name for name in order if named_tensors(named[name]))
        for name, value in named.items():
            tensors, made.structures[name] = flatten(value, f"{name} of the sample")
            made.tensors += [one.detach().to(device) for one in tensors]
            made.owners += [name] * len(tensors)
        return made

    def filled(self, tensors: Iterable[Any]) -> dict[str, Any]:
        """Returns the traced arguments, with their tensors replaced."""
        left = iter(tensors)
        return {name: unflatten(one, left) for name, one in self.structures.items()}

    def omitted_by(self, batch: Any, keywords: Mapping[str, Any]) -> list[str]:
        """The sample's tensor arguments that are missing or None in a batch."""
        given = self.of_batch(batch, keywords)
        return [name for name in dict.fromkeys(self.owners) if given.get(name) is None]

    def learn(
        self,
        symbols: list[list[Any]],
        sizes: list[list[Any]],
        guards: Sequence[Any],
        is_cached: bool,
    ) -> bool:
        """Stores the trace's assumptions about sizes; finds arguments with sample rows.

        An argument has a row per sample in two cases. The trace identified its first
        dimension with the batch's. Or both are equal in the sample, and the trace
        identified that dimension with no other. Such an argument is `unsure` if the
        trace never compared it with the batch, and it has no other size or that twice.

        Args:
            symbols: symbolic sizes of each tensor before the trace.
            sizes: symbolic sizes after the trace, where equal ones are one symbol.
            guards: conditions that held in the trace.
            is_cached: whether there is a cache. Then no guard applies: its length, and
                the number of new positions (later just one), are not the sample's.

        Returns:
            True if forward works for any number of samples.
        """
        others = {each for one in sizes for each in one[1:]}
        named = list(zip(self.owners, self.tensors, sizes, strict=True))
        batch = next(one[0] for name, _, one in named if name == self.first and one)
        own: set[Any] = getattr(batch, "free_symbols", set())
        compared = own.union(*(g.free_symbols for g in guards if own & g.free_symbols))
        for name, tensor, one in named:
            is_like = one[:1] == [batch] or (
                tensor.shape[:1] == (self.samples,) and one[0] not in others
            )
            is_free = is_like and not getattr(one[0], "free_symbols", own) & compared
            if is_free and (tensor.dim() == 1 or self.samples in tensor.shape[1:]):
                self.unsure.add(name)
            self.is_cut[name] = is_like or self.is_cut.get(name, False)
        for place, name in enumerate(self.signature.parameters):
            self.is_cut[str(place)] = self.is_cut.get(name, True)
            self.unsure |= {str(place)} if name in self.unsure else set()
        self._symbols, self._guards = symbols, () if is_cached else guards
        self._fixed = [[_number(size) for size in one] for one in sizes]
        self.tensors = []  # it may be large
        return _number(batch) is None

    def tensors_of(
        self, args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Tensors of a call, in the order of the trace.

        Arguments without tensors may be omitted.
        """
        given = self.named(args, keywords)
        tensors: list[torch.Tensor] = []
        for name, structure in self.structures.items():
            if name not in given and name not in self.owners:
                continue
            found, form = flatten(given.pop(name, None), f"the argument {name}")
            if form != structure:
                got, wanted = (
                    unflatten(s, repeat("tensor")) for s in (form, structure)
                )
                raise ConfigError(
                    f"the model's argument {name} differs in form from the sample's: "
                    f"got {got}, the sample has {wanted}; pass the same form"
                )
            tensors += found
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise ConfigError(
                f"the model was cut without its argument {extra[0]}; give it in "
                "sample=, too"
            )
        self._check_sizes(tensors)
        return tensors

    def _check_sizes(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes = tuple(size for one in tensors for size in (*one.shape, -1))
        if sizes in self._seen:
            return
        dims = [one.dim() for one in tensors], [len(one) for one in self._fixed]
        if dims[0] != dims[1]:
            raise ConfigError(
                f"expected tensors of {dims[1]} dimensions, as in the sample, got "
                f"{dims[0]}"
            )
        values: dict[Any, int] = {}
        for one, fixed, symbols in zip(
            tensors, self._fixed, self._symbols, strict=True
        ):
            for size, wanted, symbol in zip(one.shape, fixed, symbols, strict=True):
                # A single sample or position runs the same code as several.
                values[symbol] = max(2, size)
                if wanted is not None and size != wanted:
                    raise ConfigError(
                        f"the model was cut for a size of {wanted}, which its forward "
                        f"fixes, got {size} in a tensor of shape {list(one.shape)}"
                    )
        broken = [one for one in self._guards if one.xreplace(values) == False]  # noqa: E712
        if broken:
            raise ConfigError(
                f"the model was cut for sizes with {broken[0]}, true of the sample "
                f"but not of tensors of {[list(one.shape) for one in tensors]}: "
                "forward may run other code for these; cut with a sample of such sizes"
            )
        self._seen.add(sizes)

    def of_batch(self, batch: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a batch by name, as a stage passes it to its first layer."""
        if isinstance(batch, dict):
            return self.named((), {**batch, **keywords})
        return self.named(batch if isinstance(batch, tuple) else (batch,), keywords)

    def named(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call by name; raises as `of_batch`."""
        try:
            bound = self.signature.bind(*args, **keywords)
        except TypeError as error:
            raise ConfigError(
                f"the model's forward does not take this batch: {error}"
            ) from error
        named = dict(bound.arguments)
        for name, one in self.signature.parameters.items():
            if one.kind is _KINDS.VAR_KEYWORD:
                named.update(named.pop(name, {}))
        return named


def _number(size: Any) -> int | None:
    """Number that replaced a symbolic size in a trace; None if it is still symbolic."""
    return int(size) if isinstance(size, int) or size.is_number else None
