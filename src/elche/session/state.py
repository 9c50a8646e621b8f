"""Progress of a run, and its state for a resume."""

from __future__ import annotations

import math
from typing import Any

from elche.errors import ConfigError
from elche.runtime.run import Run
from elche.runtime.single import SingleRun
from elche.session.process import process

STATE_VERSION = 2
STATE_KEYS = {"version", "samples", "steps", "averaging"}


def progress_samples() -> float:
    """Samples that the run has trained on, plus this window's planned ones so far.

    The same function of the run's progress on every rank, whatever its speed: what a
    learning rate should follow. The batch in hand does not count yet.
    """
    return 0.0 if process.run is None else float(process.run.progress_samples)


def progress_steps() -> float:
    """Steps that the run has taken: global batches of the loader, whatever the policy.

    The same function of the run's progress on every rank: what a hand-written
    ``get_lr(step)`` should follow. Under ``sync`` and on one device it is the number of
    batches that the loop has come back from; in windows it grows by parts of a step.
    """
    return 0.0 if process.run is None else float(process.run.progress_steps)


def state_dict() -> dict[str, Any]:
    """State to resume from, beside the model and the optimizer; each rank's own.

    The run's progress, where parameters are averaged the outer momentum, and a codec's
    residual. Call it between epochs, on every rank, save it beside the states
    of the model and of the rank's optimizer (which ranks hold in common only under
    ``sync``), and hand all three back after `setup`: the run then goes on as if it had
    not been interrupted. The loader's own generator, and the module's and Python's
    random numbers, are the script's to save. Tensors, numbers, strings, lists and None
    only, which `torch.load(weights_only=True)` takes. With ``seed=`` augmentation
    begins again with the draws of the first epoch (give `setup` another seed); speeds,
    the anchor and, under ``auto``, policy and averaging are found anew.

    Raises:
        ConfigError: there is no run yet, or this is the inside of a loop.
        ProtocolError: the parameters have changed since the epoch ended.
    """
    return {"version": STATE_VERSION, **_run_between_epochs("state_dict").state_dict()}


def load_state_dict(state: dict[str, Any]) -> None:
    """Goes on from :func:`state_dict`; every rank from its own.

    Call it between epochs, on every rank, when the model holds what it held then. Ranks
    that were not there take the state of another one whose residuals are None; one of
    another world size or codec is carried over. A run of one averages nothing: it takes
    the progress alone.

    Raises:
        ConfigError: there is no run yet, this is the inside of a loop, or the state is
            of averaged parameters and this run reduces gradients.
        MismatchError: a rank's state does not fit its model, or ranks' states do not
            belong together; nothing has changed on any of them.
        CommunicationError: a rank is gone, or did not call it in time.
    """
    run = _run_between_epochs("load_state_dict")
    if not isinstance(state, dict) or set(state) != STATE_KEYS:
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ConfigError(
            f"expected a state with entries {sorted(STATE_KEYS)}, got {found}"
        )
    if state["version"] != STATE_VERSION:
        raise ConfigError(
            f"expected a state of version {STATE_VERSION}, got {state['version']!r}"
        )
    samples = state["samples"]
    if not isinstance(samples, int) or samples < 0:
        raise ConfigError(f"expected samples from 0 on in the state, got {samples!r}")
    steps = state["steps"]
    if not isinstance(steps, float) or not 0.0 <= steps < math.inf:
        raise ConfigError(f"expected steps from 0.0 on in the state, got {steps!r}")
    run.load_state_dict(state)


def _run_between_epochs(call: str) -> Run | SingleRun:
    run = process.run
    if run is None:
        raise ConfigError(f"elche.{call}() needs a run: call elche.setup first")
    if run.is_in_epoch:
        raise ConfigError(
            f"{call}() inside an epoch, where ranks hold different things; call it "
            "between epochs, on every rank"
        )
    return run
