"""Local batches of windows, into which a run cuts its global batches. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elche.config_parts import WindowConfig
from elche.coordination.accounts.batch_ranges import BatchCut
from elche.errors import ConfigError


def local_cut(
    windows: WindowConfig, world_size: int, least: int, caps: Iterable[int | None] = ()
) -> BatchCut:
    """Returns the cut of a run's global batches in windows, until ranks die or join.

    Args:
        windows: the run's window settings.
        world_size: number of ranks in the run, including excluded ones.
        least: least samples that the model can train on.
        caps: most samples that each rank's device holds at once; None for no limit.
            A ``local_batch_size`` set by the user ignores them.
    """
    if windows.local_batch_size is not None:
        return BatchCut(1, windows.local_batch_size, least)
    known = [cap for cap in caps if cap is not None]
    return BatchCut(world_size, min(known, default=0), least)


def check_local_batches(
    windows: WindowConfig, world_size: int, least: int, batch_size: int | None
) -> None:
    """Rejects local batch sizes that the model or the loader does not allow.

    The model needs ``least`` samples or more; ``batch_size`` is None if the loader's
    batches vary in size.

    Raises:
        ConfigError: a size is not possible; the message names the setting to change.
    """
    given = windows.local_batch_size
    if given is not None and given < least:
        raise ConfigError(
            f"local_batch_size={given}, but the model has BatchNorm layers, which "
            f"train on {least} samples or more; give local_batch_size={least} or more"
        )
    if batch_size is None:
        return
    if given is not None and given > batch_size:
        raise ConfigError(
            f"local_batch_size={given} is more than batch_size={batch_size}, and a "
            "local batch is a part of a batch; give the loader a larger batch_size"
        )
    usual = max(1, batch_size // world_size)
    if given is None and usual < least <= batch_size:
        raise ConfigError(
            f"a batch of {batch_size} makes local batches of {usual} on {world_size} "
            "ranks, but the model "
            f"has BatchNorm layers, which train on {least} samples or more: give the "
            f"loader batch_size={least * world_size} or more, or set "
            f"windows=elche.WindowConfig(local_batch_size={least})"
        )
