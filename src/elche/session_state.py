"""Progress of a run, and its state for a resume."""

from __future__ import annotations

from typing import Any

from elche.errors import ConfigError
from elche.process import process
from elche.runtime.single import SingleRun

STATE_VERSION = 1
STATE_KEYS = {"version", "samples", "averaging"}


def progress_samples() -> float:
    """Samples that the run has trained on, plus this window's planned ones so far.

    The same function of the run's progress on every rank, whatever its speed: what a
    learning rate should follow. The batch in hand does not count yet.
    """
    if process.run is not None:
        return process.run.progress_samples
    return 0.0 if process.single is None else float(process.single.samples_done)


def state_dict() -> dict[str, Any]:
    """What a run goes on from, beside the model and the optimizer; each rank's own.

    The run's progress, and where parameters are averaged the outer momentum and the
    codec's residual. Call it between epochs, on every rank, save it beside the states
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
    if process.run is not None:
        return {"version": STATE_VERSION, **process.run.state_dict()}
    if process.single is None:
        raise ConfigError("elche.state_dict() needs a run: call elche.setup first")
    _expect_no_batch(process.single)
    samples = process.single.samples_done
    return {"version": STATE_VERSION, "samples": samples, "averaging": None}


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
    run, single = process.run, process.single
    if run is None and single is None:
        raise ConfigError("elche.load_state_dict() needs a run: call elche.setup first")
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
    if run is not None:
        run.load_state_dict(state)
    elif single is not None:
        _expect_no_batch(single)
        single.samples_done = samples


def _expect_no_batch(single: SingleRun) -> None:
    if single.samples_in_hand:
        raise ConfigError(
            "the state of a run is that between epochs, and this is the inside of a "
            "loop; call it before or after the loop"
        )
