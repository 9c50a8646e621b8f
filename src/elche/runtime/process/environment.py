"""This process's role in the run, read from the launcher's environment variables.

`elche run` sets everything; torchrun sets ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``
(`launchers` maps other launchers' variables to them) and elche starts its coordinator
beside rank 0; a plain ``python script.py`` sets nothing and is a run of one rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import distributed as dist

from elche.comm.control.addresses import EVERYWHERE, parse_address
from elche.devices import choice
from elche.devices.memory import total_bytes
from elche.errors import ConfigError
from elche.runtime.emulation import EmulationConfig
from elche.runtime.process.launchers import LaunchFacts, launch_facts, read_launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(LaunchFacts):
    """Rank, device and neighbours of this process, and its launcher's options.

    Attributes:
        rank: this rank.
        world_size: ranks of the run.
        device: device of this rank.
        coordinator: host and port of the coordinator; None when there is none yet.
        key: the run's shared secret.
        listen: address that this process listens on for other ranks; ``auto`` until
            `connect` has found it.
        emulation: speed of an emulated device; None for a real one.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device
    coordinator: tuple[str, int] | None = None
    key: bytes = b""
    listen: str = "127.0.0.1"
    emulation: EmulationConfig | None = None

    @property
    def is_alone(self) -> bool:
        """True if this rank trains without a coordinator."""
        needs_one = self.joins or self.may_grow or self.is_watched
        return self.world_size == 1 and not needs_one

    @property
    def device_name(self) -> str:
        """Name of the device, for people and for comparison between ranks."""
        if self.emulation is not None:
            return f"CPU emulated at speed {self.emulation.speed:g}"
        return choice.product_name(self.device)

    @property
    def memory_bytes(self) -> int:
        """Memory of the device, of the host for a CPU; 0 if it is not known."""
        return total_bytes(self.device)


def read_placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """Reads this process's place in the run.

    Raises:
        ConfigError: a variable is malformed or names a device that does not exist.
    """
    environment = _with_default_group(read_launcher(environment))
    world_size = int_of(environment, "WORLD_SIZE", 1)
    rank = int_of(environment, "RANK", 0)
    facts = launch_facts(environment)
    if not 0 <= rank < world_size and not (facts.joins and rank >= world_size):
        raise ConfigError(
            f"expected 0 <= RANK < WORLD_SIZE, got {rank} of {world_size}"
        )
    listen = environment.get("ELCHE_LISTEN", "127.0.0.1")
    if listen in EVERYWHERE:
        raise ConfigError(
            f"expected ELCHE_LISTEN to be an address that other hosts reach, got "
            f"{listen!r}; give this host's own, or auto for the one on the route to "
            "MASTER_ADDR"
        )
    try:
        emulation, key = None, bytes.fromhex(environment.get("ELCHE_KEY", ""))
        if "ELCHE_SPEED" in environment:
            emulation = EmulationConfig(
                float(environment["ELCHE_SPEED"]),
                float(environment.get("ELCHE_MS_PER_SAMPLE", "1.25")),
                float(environment.get("ELCHE_FIXED_MS", "0")),
                int_of(environment, "ELCHE_MEMORY_SAMPLES", 0) or None,
            )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            "expected ELCHE_KEY to be hexadecimal, ELCHE_SPEED, ELCHE_MS_PER_SAMPLE "
            f"and ELCHE_FIXED_MS to be numbers: {error}; let `elche run` set them"
        ) from error
    if emulation is not None:
        device = choice.CPU
    elif "ELCHE_DEVICE" in environment:
        device = choice.check_device(environment["ELCHE_DEVICE"])
    else:
        device = choice.default_device(int_of(environment, "LOCAL_RANK", rank))
    coordinator = None
    if "ELCHE_COORDINATOR" in environment:
        address = environment["ELCHE_COORDINATOR"]
        coordinator = parse_address(address, "ELCHE_COORDINATOR")
    return Placement(
        rank=rank,
        world_size=world_size,
        device=device,
        coordinator=coordinator,
        key=key,
        listen=listen,
        emulation=emulation,
        **asdict(facts),
    )


def _with_default_group(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Fills in rank and world size of torch's default group, if it exists already.

    Under `elche run` the group plays no part, and may be one of this rank alone.

    Raises:
        ConfigError: the variables name others.
    """
    if "ELCHE_COORDINATOR" in environment:
        return environment
    if not (dist.is_available() and dist.is_initialized()):
        return environment
    own = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    given = {name: environment.get(name, own[name]) for name in own}
    if given != own:
        raise ConfigError(
            f"expected RANK and WORLD_SIZE as in torch.distributed's default group, "
            f"{own}, got {given}; set both to the group's, or call elche.setup before "
            "init_process_group"
        )
    return {**environment, **own}


def int_of(environment: Mapping[str, str], name: str, default: int) -> int:
    """Reads a variable as an int.

    Raises:
        ConfigError: it is not an int.
    """
    try:
        return int(environment.get(name, default))
    except ValueError as error:
        raise ConfigError(
            f"expected {name} to be an int, got {environment[name]!r}"
        ) from error
