"""The loader that `elche.setup` returns in place of the user's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from operator import length_hint
from typing import TYPE_CHECKING, Any, NoReturn

from torch.utils.data import DataLoader

from elche.config_checks import check_whole
from elche.errors import ConfigError
from elche.runtime.run import Run
from elche.runtime.single import SingleRun

STATE_CALLS = ("state_dict", "load_state_dict")
"""Methods of torchdata's StatefulDataLoader."""


def check_unstarted(loader: DataLoader[Any]) -> None:
    """Refuses a loader with a loaded state, which elche would ignore.

    Raises:
        ConfigError: its load_state_dict was called.
    """
    if getattr(loader, "next_iter_state", None) is not None:
        _refuse_state()


if TYPE_CHECKING:  # `loader` in a user's script keeps its type
    _Base = DataLoader[Any]
else:
    _Base = object


class RunLoader(_Base):
    """Yields this rank's batches of each epoch of a run.

    Under ``sync`` every rank gets a share of each global batch; under ``cadence`` each
    rank gets whole batches, as many as its speed allows, so a loop body runs a
    different number of times on each rank. ``len()`` is the single-process length; all
    but iteration is forwarded to the user's loader.

    Args:
        loader: the user's loader.
        positions: loader of the same data by position, which the run divides.
        run: the run.
    """

    def __init__(
        self, loader: DataLoader[Any], positions: DataLoader[Any], run: Run | SingleRun
    ) -> None:
        self._loader = loader
        self._positions = positions
        self._run = run

    def __len__(self) -> int:
        """Batches of an epoch in a single process, whatever this rank's share."""
        return len(self._positions)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        found = getattr(self._loader, name)
        if name in STATE_CALLS and not self._run.iterates_loader:
            return _refuse_state
        return found

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._run.epoch()

    @property
    def epoch_samples(self) -> int | None:
        """Samples of an epoch in a single process; None if unknown."""
        size, drops = self._positions.batch_size, self._positions.drop_last
        length = length_hint(self._positions.sampler)
        if size is None or not length:
            return None
        return length - length % size if drops else length

    def steps(self, n: int) -> Iterator[Any]:
        """Yields batches until the run has taken ``n`` steps, over several epochs.

        A step is a global batch of the user's loader, so these are the first ``n``
        batches of a single process. They are counted over the whole run, a resumed part
        included, and over all ranks: under ``sync`` each rank's loop body runs ``n``
        times, in windows as often as its part requires. All ranks end together, with
        one model. A break on one rank ends it for all. Each call begins a new epoch.

        Args:
            n: steps of the whole run, the same on every rank.

        Raises:
            ConfigError: ``n`` is no number of steps.
        """
        check_whole("the number of steps", n, 0)
        return self._steps(n)

    def _steps(self, n: int) -> Iterator[Any]:
        run, is_left = self._run, False
        while not is_left and (left := run.steps_left(n)):
            yield from run.epoch(left)
            is_left = run.was_left_early


def _refuse_state(*_: Any) -> NoReturn:
    raise ConfigError(
        "a StatefulDataLoader's state says which batches this process has loaded, and "
        "ranks share them: save elche.state_dict() between epochs instead, and its "
        "generator's state, beside model and optimizer"
    )
