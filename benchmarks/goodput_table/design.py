"""The star of settings: one base, and each factor varied alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.hetero.bench import BenchConfig
from benchmarks.links.bench import LinkBenchConfig

FOUR = (1.0, 0.67, 0.4, 0.25)
EIGHT = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25)
PAIR_MS, FOUR_MS, EIGHT_MS = 1.25, 2.5, 5.0
"""Per sample at speed 1: ranks that compute for real have two cores together."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Devices, link, model and optimizer, and who is measured there.

    Attributes:
        name: what differs from the base.
        contenders: ``ddp``, ``ddp-split``, or a policy, with its codec after a blank.
        speeds: of the emulated devices, the fastest first.
        ms_per_sample: at speed 1.
        model: a workload's name.
        optimizer: its kind.
        batch_size: samples of a batch, of all ranks together.
        link_mbit: rate of every rank's link; None: loopback.
    """

    name: str
    contenders: tuple[str, ...]
    speeds: tuple[float, ...] = FOUR
    ms_per_sample: float = FOUR_MS
    model: str = "gpt"
    optimizer: str = "adamw"
    batch_size: int = 32
    link_mbit: float | None = None

    @property
    def devices_key(self) -> str:
        """What rates of devices alone depend on: settings that share it share them."""
        speeds = ",".join(f"{speed:g}" for speed in self.speeds)
        return (
            f"{self.model} {self.optimizer} {speeds} {self.ms_per_sample:g} ms "
            f"batch {self.batch_size}"
        )

    def slower(self, factor: float) -> Setting:
        """The setting with all emulated times multiplied."""
        link_mbit = self.link_mbit and self.link_mbit / factor
        ms_per_sample = self.ms_per_sample * factor
        return replace(self, ms_per_sample=ms_per_sample, link_mbit=link_mbit)

    def config(self, contender: str, *, seconds: float, alone_s: float) -> BenchConfig:
        """The settings of `benchmarks.hetero` that measure one contender here."""
        codec = contender.partition(" ")[2] or "fp32"
        settings: dict[str, Any] = {
            "speeds": self.speeds,
            "model": self.model,
            "optimizer": self.optimizer,
            "ms_per_sample": self.ms_per_sample,
            "batch_size": self.batch_size,
            "seconds": seconds,
            "solo_seconds": alone_s,
            "time_capped": True,
            "contenders": (bench_name(contender),),
        }
        if self.link_mbit is None:
            return BenchConfig(**settings)
        return LinkBenchConfig(link_mbit=self.link_mbit, codec=codec, **settings)


def bench_name(contender: str) -> str:
    """The name under which `benchmarks.hetero` knows a contender."""
    word = contender.partition(" ")[0]
    is_theirs = word in ("ddp", "ddp-split", "indep") or word.startswith("solo-")
    return word if is_theirs else f"elche-{word}"


PAIR: dict[str, Any] = {"speeds": (1.0, 0.25), "ms_per_sample": PAIR_MS}
EVERYONE = ("ddp", "ddp-split", "sync", "cadence", "async", "auto")
SETTINGS = (
    Setting(name="base", contenders=EVERYONE),
    Setting(
        name="1 Gbit/s",
        contenders=("ddp-split", "sync", "sync int8", "async"),
        link_mbit=1000.0,
    ),
    Setting(
        name="100 Mbit/s",
        contenders=("sync int8", "async", "async int8"),
        link_mbit=100.0,
    ),
    Setting(name="batch 128", contenders=EVERYONE[1:5], batch_size=128),
    Setting(name="1:0.25", contenders=EVERYONE, **PAIR),
    Setting(
        name="1:0.25 at 250 Mbit/s",
        contenders=("sync int8", "async int8", "auto"),
        link_mbit=250.0,
        **PAIR,
    ),
    Setting(
        name="1:0.67",
        contenders=("sync", "async"),
        speeds=(1.0, 0.67),
        ms_per_sample=PAIR_MS,
    ),
    Setting(
        name="eight mixed",
        contenders=("ddp-split", "sync", "async"),
        speeds=EIGHT,
        ms_per_sample=EIGHT_MS,
    ),
    Setting(name="CNN with BatchNorm", contenders=("sync", "async"), model="cnn"),
    Setting(name="SGD with momentum", contenders=("sync", "async"), optimizer="sgd"),
    Setting(name="Muon", contenders=("sync", "async"), optimizer="muon"),
)
"""Settings of the same devices follow each other: one control holds for them."""
