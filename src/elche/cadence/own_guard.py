"""The guard that the user brings: found by its name, and watched while it judges.

Decisions are made in the coordinator's process, so an own guard is named by where it
is, ``"package.module:Name"``, and imported there by the shell, which also says how long
an answer may take. What it does wrong ends the run with a reason that names it. Pure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from elche.cadence.divergence import DivergenceGuard, Guard, NoGuard, Verdict
from elche.errors import ConfigError, DeadlineError

logger = logging.getLogger(__name__)

FindGuard: TypeAlias = Callable[[str], object]
"""Gives what stands at ``"package.module:Name"``, or raises `ConfigError`."""
MakeGuard: TypeAlias = Callable[[], Guard]
"""Makes the guard of windows that begin."""
Ask: TypeAlias = Callable[[Callable[[], object], float], object]
"""Gives what a function returns; `DeadlineError` after so many seconds."""


def ask_here(question: Callable[[], object], within_s: float) -> object:
    """Asks without a deadline; where there is no clock."""
    return question()


@final
class OwnGuard(Guard):
    """A user's guard, whose faults are named and whose answers are checked.

    Args:
        name: where its class is, for messages.
        guard: the user's.
        ask: asks it.
        within_s: how long an answer may take.
    """

    __slots__ = ("_ask", "_guard", "_name", "_within_s")

    def __init__(
        self,
        name: str,
        guard: Guard,
        ask: Ask = ask_here,
        within_s: float = math.inf,
    ) -> None:
        self._name = name
        self._guard = guard
        self._ask = ask
        self._within_s = within_s

    def observe(self, divergences: Sequence[float], window_batches: int) -> Verdict:
        """Asks the user's guard.

        Raises:
            ConfigError: it raised, did not answer in time, or answered with something
                else than a `Verdict`.
        """
        guard = self._guard
        try:
            verdict = self._ask(
                lambda: guard.observe(divergences, window_batches), self._within_s
            )
        except DeadlineError as error:
            raise ConfigError(
                f"the guard {self._name!r} hangs in observe() ({error}), and the whole "
                "run waits for it; let it answer at once, or leave guard out"
            ) from error
        except (Exception, SystemExit) as error:
            logger.exception("the guard %r failed", self._name)
            raise ConfigError(
                f"the guard {self._name!r} raised in observe(): {_told(error)}; "
                "correct it, or leave guard out"
            ) from error
        if not isinstance(verdict, Verdict):
            raise ConfigError(
                f"expected the guard {self._name!r} to return an elche.Verdict from "
                f"observe(), got {verdict!r}"
            )
        return verdict

    def state_dict(self) -> dict[str, Any]:
        """The user's guard's own."""
        return self._guard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hands the state to the user's guard."""
        self._guard.load_state_dict(state)


def guard_maker(
    setting: bool | str,
    find: FindGuard,
    ask: Ask = ask_here,
    within_s: float = math.inf,
) -> MakeGuard:
    """What makes the guards that the settings ask for.

    A user's guard is found, and made once, at once: what is wrong with it shows before
    anything is trained.

    Args:
        setting: `RunConfig.guard`.
        find: what imports a class.
        ask: asks the user's guard.
        within_s: how long an answer may take.

    Raises:
        ConfigError: there is no such guard, or it cannot be made.
    """
    if not isinstance(setting, str):
        return DivergenceGuard if setting else NoGuard
    kind = find(setting)
    if not (isinstance(kind, type) and issubclass(kind, Guard)):
        raise ConfigError(
            f"expected guard {setting!r} to name a subclass of elche.Guard, found "
            f"{kind!r} there"
        )

    def made() -> Guard:
        return OwnGuard(setting, _made(setting, kind, ask, within_s), ask, within_s)

    ready = [made()]

    def make() -> Guard:
        return ready.pop() if ready else made()

    return make


def no_own_guards(name: str) -> object:
    """Finds nothing; where nobody can import.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"the guard {name!r} cannot be looked up here; give guard True or False"
    )


def _made(name: str, kind: type[Guard], ask: Ask, within_s: float) -> Guard:
    try:
        guard = ask(kind, within_s)
        assert isinstance(guard, Guard)
        return guard
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the guard {name!r} cannot be made: {_told(error)}; its class is called "
            "without arguments"
        ) from error


def _told(error: BaseException) -> str:
    """An exception in a line, with the line of the file that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    what = f"{type(error).__name__}: {error}"
    if trace is None:
        return what
    return f"{what} ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
