"""`benchmarks.hetero` with every rank behind a link of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.hetero.bench import BenchConfig, run_bench
from benchmarks.hetero.contender import BenchSpec
from benchmarks.hetero.workloads import build_workload
from benchmarks.links.namespaces import SENT_BYTES, slow_link
from elche.comm.codec.codec import CODECS
from elche.config_parts import TransportConfig
from elche.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LinkBenchConfig(BenchConfig):
    """What is measured, how long, and behind which links.

    Attributes:
        link_mbit: rate of every rank's link in 10^6 bits per second.
        codec: of elche's averaging policies.
    """

    link_mbit: float
    codec: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.link_mbit
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"expected positive --link-mbit, got {rate!r}")
        if self.codec not in CODECS:
            raise ConfigError(
                f"unknown codec {self.codec!r}; choose one of {', '.join(CODECS)}"
            )

    @property
    def title(self) -> str:
        """What is measured, in words."""
        return (
            f"{super().title}, links of {self.link_mbit:g} Mbit/s, codec {self.codec}"
        )

    def spec(self, name: str, seed: int) -> BenchSpec:
        """What a contender trains; nothing goes through the memory of this host."""
        spec, options = super().spec(name, seed), dict[str, Any]()
        if spec.kind == "solo":  # on this host's own network
            return spec
        samples = spec.samples
        if spec.kind == "elche":
            options["transport"] = TransportConfig(kind="gloo")
            options["codec"] = self.codec
        if self.time_capped and "ddp" in name:
            steps = self.seconds / self.reduction_s(name)
            samples = min(samples, self.whole_batches(steps * self.samples_per_batch))
        return replace(
            spec, samples=samples, options=options, sent_counter=str(SENT_BYTES)
        )

    def reduction_s(self, name: str) -> float:
        """Least time of a sum of the model's gradients, encoded under elche."""
        workload = build_workload(self.model)
        numel = sum(p.numel() for p in workload.model_fn().parameters())
        ranks = self.devices.count
        codec = CODECS[self.codec if name.startswith("elche-") else "fp32"]
        sent_bytes = 2.0 * (ranks - 1) / ranks * codec.encoded_bytes(numel)
        return sent_bytes * 8.0 / (1e6 * self.link_mbit)


def run_link_bench(config: LinkBenchConfig, json_path: str | None) -> int:
    """The command; see `benchmarks.hetero.bench.run_bench`."""
    ranks = config.devices.count
    with slow_link(ranks, config.link_mbit) as link:
        return run_bench(config, json_path, link)
