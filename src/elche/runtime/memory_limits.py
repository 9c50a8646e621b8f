"""Memory limits of a rank: set by the user or found in training, and reported."""

from __future__ import annotations

from elche.cadence.balancer import Balancer
from elche.coordination.accounts.local_batches import check_local_batches, local_cut
from elche.devices.memory import is_out_of_memory
from elche.errors import ConfigError
from elche.runtime.training import Training


def check_caps(training: Training, world_size: int, least_samples: int) -> None:
    """Refuses batches whose shares exceed the ranks' devices.

    Raises:
        ConfigError: a share would not fit; the message names the remedy.
    """
    config, batch_size = training.config, training.loader.batch_size
    if len(config.caps) > world_size:
        raise ConfigError(
            f"expected max_samples of ranks below {world_size}, got one for rank "
            f"{len(config.caps) - 1}"
        )
    if config.policy != "sync":
        check_local_batches(config.windows, world_size, least_samples, batch_size)
    if batch_size is None or training.micro_batches:
        return
    if config.policy == "sync":
        shares = Balancer(
            world_size, min_share_samples=least_samples, max_samples=config.caps
        )
        shares.sizes(batch_size)
        return
    cut = local_cut(config.windows, world_size, least_samples)
    samples = cut.largest_of(batch_size)
    for rank, cap in enumerate(config.caps):
        if cap is not None and cap < samples:
            raise ConfigError(
                f"rank {rank} holds {cap} samples at once, but policy "
                f"{config.policy!r} uses local batches of {samples}; set "
                f"windows=elche.WindowConfig(local_batch_size={cap}), or choose "
                "policy='sync', whose shares keep within max_samples, or "
                "elche.Trainer, which runs micro-batches"
            )


def memory_hint(error: BaseException, rank: int, samples: int) -> str:
    """Advice for a device that ran out of memory in the user's loop, or ""."""
    if not is_out_of_memory(error) or samples < 2:
        return ""
    return (
        f"its share of {samples} samples did not fit the device of rank {rank}: under "
        f"policy 'sync' elche.setup(..., max_samples={{{rank}: {samples // 2}}}) keeps "
        "it within that and gives the others the rest; elche.Trainer finds the limit "
        "for itself and runs micro-batches"
    )
