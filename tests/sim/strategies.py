"""Random clusters for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from elche.sim.cluster import Break, Cluster, Device, Drift, Fault, Link, SimulatedRun
from tests.harness.settings import nested
from tests.sim.watched import Death

MAX_RANKS = 64
WHOLE = 10
"""Samples of the largest batch drawn: local batches of as many are whole ones."""


@st.composite
def devices(draw: st.DrawFn) -> Device:
    return Device(
        name="CPU",  # whose steps are not summed by NCCL, where a death ends all
        seconds_per_sample=draw(st.sampled_from([0.0005, 0.001, 0.0025, 0.01, 0.04])),
        seconds_per_batch=draw(st.sampled_from([0.004, 0.02])),
        jitter=draw(st.sampled_from([0.0, 0.1, 0.4])),
        spike_probability=draw(st.sampled_from([0.0, 0.0, 0.05])),
        drift=draw(
            st.lists(
                st.builds(
                    Drift,
                    at_s=st.sampled_from([0.1, 0.5]),
                    factor=st.sampled_from([0.2, 3.0]),
                ),
                max_size=1,
            ).map(tuple)
        ),
        load_seconds_per_sample=draw(st.sampled_from([0.0, 0.0, 0.0005, 0.005])),
        prefetch=draw(st.sampled_from([0, 1, 2, 4, 8])),
        first_batch_s=draw(st.sampled_from([0.0, 0.0, 0.5])),
        copy_bytes_per_s=1e10,
    )


@st.composite
def batch_sizes(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    samples = draw(st.integers(1, 9))
    count = draw(st.one_of(st.integers(1, 40), st.integers(1, 200)))
    tail = draw(st.integers(0, samples - 1))
    if tail:
        return ((samples, count), (tail, 1))
    if draw(st.booleans()):
        return ((samples, count), (samples + 1, 2), (1, 1))
    return ((samples, count),)


@st.composite
def window_options(draw: st.DrawFn) -> dict[str, Any]:
    anchor, max_anchor = draw(
        st.sampled_from([(1, 200), (1, 200), (3, 200), (10, 10), (1, 1), (1, 0)])
    )
    options: dict[str, Any] = {
        "anchor": anchor,
        "max_anchor": max_anchor,
        "max_batch_diff": draw(st.sampled_from([None, None, 0, 1, 3])),
        "local_batch_size": draw(st.sampled_from([WHOLE, WHOLE, None, 2])),
    }
    if draw(st.integers(0, 9)) == 0:
        options["deterministic"] = True
        options["max_batch_diff"] = None
    return options


@st.composite
def faults(draw: st.DrawFn, world_size: int) -> tuple[Fault, ...]:
    found = []
    times = st.floats(0.0, 3.0)
    for _ in range(draw(st.integers(0, 4))):
        at_s = draw(times)
        if draw(st.booleans()):
            found.append(Fault(at_s=at_s, kill_rank=draw(st.integers(0, world_size))))
        else:
            found.append(Fault(at_s=at_s, join=draw(devices())))
    return tuple(found)


def deaths() -> st.SearchStrategy[list[Death]]:
    """Inside reductions: before anybody has the result, and when some do."""
    death = st.builds(
        Death,
        reduction=st.integers(0, 5),
        place=st.integers(0, 7),
        part=st.sampled_from([0.5, 1.2, 1.5, 1.8]),
    )
    return st.lists(death, min_size=1, max_size=3)


@st.composite
def clusters(
    draw: st.DrawFn,
    policy: str,
    *,
    breaks: bool = False,
    changes: bool = False,
    most_ranks: int = 8,
) -> Cluster:
    """A cluster; with ``changes``, ranks die and join."""
    if draw(st.integers(0, 9)) == 0:
        most_ranks = MAX_RANKS
    world_size = draw(st.integers(1, most_ranks))
    kinds = draw(st.lists(devices(), min_size=1, max_size=min(4, world_size)))
    counts = [world_size // len(kinds)] * len(kinds)
    counts[0] += world_size - sum(counts)
    latency_s = draw(st.sampled_from([0.0, 0.0005, 0.002, 0.02]))
    epochs = draw(st.integers(1, 3))
    options = draw(window_options()) if policy != "sync" else {}
    happen = draw(faults(world_size)) if changes else ()
    if any(fault.join is None and fault.rank == world_size for fault in happen):
        joins = sum(fault.join is not None for fault in happen)
        if not joins:
            happen = tuple(f for f in happen if f.rank != world_size)
    if changes or policy == "auto":
        options.pop("deterministic", None)
    return Cluster(
        run=SimulatedRun(
            batch_sizes=draw(batch_sizes()),
            epochs=epochs,
            policy=policy,
            seed=draw(st.integers(0, 999)),
            options=nested(options),
            model_bytes=draw(st.sampled_from([1e4, 3e6, 5e7])),
            pause_s=draw(st.sampled_from([0.0, 0.05])),
            regroup_s=draw(st.sampled_from([0.0, 0.05])),
            min_share_samples=draw(st.sampled_from([1, 1, 2])),
            start_spread_s=draw(st.sampled_from([0.0, 0.1])),
        ),
        devices=tuple(
            Device(
                **{name: getattr(kind, name) for name in Device.__slots__}
                | {"count": count}
            )
            for kind, count in zip(kinds, counts, strict=True)
        ),
        link=Link(
            latency_s=latency_s,
            spread_s=draw(st.sampled_from([0.0, 0.002, 0.05])),
            bytes_per_s=1e9,
        ),
        faults=happen,
        breaks=draw(_breaks(world_size, epochs)) if breaks else (),
    )


@st.composite
def _breaks(draw: st.DrawFn, world_size: int, epochs: int) -> tuple[Break, ...]:
    return tuple(
        Break(
            rank=draw(st.integers(0, world_size - 1)),
            epoch=draw(st.integers(0, epochs - 1)),
            batches=draw(st.integers(1, 9)),
        )
        for _ in range(draw(st.integers(1, 3)))
    )
