"""Arguments of a traced forward: in the trace, and in a step."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
        structures: structure of each argument, see `elche.pipeline.trees.flatten`.
        tensors: tensors of all arguments, in order; empty after the trace.
        samples: number of samples in the sample batch.
        first: name of the argument with the sample's first tensor, whose first
            dimension is the batch's.
        device: device of the tensors.
        is_cut: whether an argument's tensors have a row per sample, by its name and by
            its position; known after the trace.
        unsure: those of which it is unknown, see `learn_dimensions`.
    """

    signature: inspect.Signature
    structures: dict[str, Any]
    tensors: list[torch.Tensor]
    samples: int
    first: str
    device: torch.device
    is_cut: dict[str, bool] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    _symbols: list[list[Any]] = field(default_factory=list)
    _fixed: list[list[int | None]] = field(default_factory=list)
    _guards: list[Any] = field(default_factory=list)
    _seen: set[tuple[int, ...]] = field(default_factory=set)

    @staticmethod
    def read(
        model: nn.Module,
        sample: Any,
        device: torch.device,
        omitted: Collection[str] = (),
    ) -> Arguments:
        """Reads a sample as the batch of a step is read.

        Args:
            model: model whose forward receives the sample: a tuple as positional
                arguments, a dict as keywords, any other value as the only argument.
            sample: one microbatch.
            device: device of the model.
            omitted: arguments of the sample that become None.

        Raises:
            ConfigError: forward does not accept it, or it has fewer than two samples.
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
        args, keywords = _unpacked(sample)
        made = Arguments(signature, {}, [], samples, "", device)
        named = {
            name: None if name in omitted else value
            for name, value in made.named(args, keywords).items()
        }
        made.first = next(n for n in keywords or named if named_tensors(named[n]))
        for name, value in named.items():
            tensors, made.structures[name] = flatten(value, f"{name} of the sample")
            made.tensors += [one.detach().to(device) for one in tensors]
        return made

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors)

    def filled(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """Returns the traced arguments with other tensors."""
        values = iter(tensors)
        return {
            name: unflatten(structure, [next(values) for _ in range(_count(structure))])
            for name, structure in self.structures.items()
        }

    def owners(self) -> list[str]:
        """Name of the argument that each tensor belongs to, in order."""
        counts = {name: _count(one) for name, one in self.structures.items()}
        return [name for name, count in counts.items() for _ in range(count)]

    def learn_sizes(
        self,
        symbols: list[list[Any]],
        fixed: list[list[int | None]],
        guards: list[Any],
    ) -> None:
        """Stores the trace's assumptions about sizes.

        Args:
            symbols: symbolic sizes of each tensor before the trace.
            fixed: sizes that the trace has fixed.
            guards: conditions that held in the trace.
        """
        self._symbols, self._fixed, self._guards = symbols, fixed, guards
        self.tensors = []  # it may be large

    def omitted_by(self, batch: Any, keywords: Mapping[str, Any]) -> list[str]:
        """See `elche.pipeline.cutting.segments.FirstSegment.omits`."""
        args, named = _unpacked(batch)
        given = self.named(args, {**named, **keywords})
        return [
            name
            for name, structure in self.structures.items()
            if _count(structure) and given.get(name) is None
        ]

    def learn_dimensions(self, sizes: list[list[Any]], guards: Sequence[Any]) -> Any:
        """Finds the arguments with a row per sample.

        Their first dimension is the batch's in the trace; or it equals the batch's in
        the sample, and the trace identified it with no other dimension. If the trace
        never compared it with the batch, a tensor of one dimension, or with others of
        that size, may be either: it is `unsure`.

        Args:
            sizes: symbolic sizes of each tensor after the trace, equal ones as one.
            guards: conditions that held in the trace.

        Returns:
            The batch's number of samples: a symbol, or a number if forward fixes it.
        """
        named = list(zip(self.owners(), self.tensors, sizes, strict=True))
        others = {each for one in sizes for each in one[1:]}
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
        return batch

    def tensors_of(
        self, args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Tensors of a call, in the order of the trace.

        Arguments without tensors may be omitted.

        Raises:
            ConfigError: the call does not match the sample.
        """
        given = self.named(args, keywords)
        tensors: list[torch.Tensor] = []
        for name, structure in self.structures.items():
            if name not in given and not _count(structure):
                continue
            found, form = flatten(given.pop(name, None), f"the argument {name}")
            if form != structure:
                raise ConfigError(
                    f"the model's argument {name} differs in form from the sample's: "
                    f"got {_shown(form)}, the sample has {_shown(structure)}; pass "
                    "the same form"
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
        if [one.dim() for one in tensors] != [len(one) for one in self._fixed]:
            raise ConfigError(
                f"expected tensors of {[len(one) for one in self._fixed]} dimensions, "
                f"as in the sample, got {[one.dim() for one in tensors]}"
            )
        values: dict[Any, int] = {}
        for one, fixed, symbols in zip(
            tensors, self._fixed, self._symbols, strict=True
        ):
            for size, wanted, symbol in zip(one.shape, fixed, symbols, strict=True):
                # A single sample, or position, runs the same code as several.
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
                "forward may do something else for them; cut with a sample like them"
            )
        self._seen.add(sizes)

    def named(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call by name.

        Raises:
            ConfigError: forward does not accept them.
        """
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


def _unpacked(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments and keywords, as a stage passes it to its first layer."""
    if isinstance(batch, tuple):
        return batch, {}
    return ((), batch) if isinstance(batch, dict) else ((batch,), {})


def _count(structure: Any) -> int:
    if structure[0] == "t":
        return 1
    if structure[0] == "v":
        return 0
    return sum(map(_count, structure[-1]))


def _shown(structure: Any) -> str:
    words: Any = ["tensor"] * _count(structure)
    return str(unflatten(structure, words))
