"""The recorded runs: named clusters under every policy, with what happens to them.

A story is a pure value: the same on every machine, seeded, without torch. Stories use
only what every policy is to keep: no codec. Times of faults lie well inside the epochs
that they hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elche.sim.cluster import (
    Break,
    Cluster,
    Device,
    Drift,
    Fault,
    Link,
    LinkChange,
    SimulatedRun,
)
from tests.sim.test_cuts import Cut
from tests.sim.watched import Death

POLICIES = ("sync", "cadence", "async", "auto")
WINDOWS = ("cadence", "async")
SAMPLE_S = 0.002
"""Seconds per sample of a device of speed 1."""
BATCH = 16
ONE, EQUAL, PAIR, MIXED, FIVE = (
    (1.0,),
    (1.0, 1.0),
    (1.0, 0.25),
    (1.0, 0.5, 0.4),
    (1.0, 1.0, 0.5, 0.5, 0.3),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Story:
    """One run to simulate.

    Attributes:
        name: policy, then what happens.
        cluster: devices, link, run, timed faults and breaks.
        deaths: inside reductions.
        cuts: checkpoints that are asked for in the first epoch.
    """

    name: str
    cluster: Cluster
    deaths: tuple[Death, ...] = ()
    cuts: tuple[Cut, ...] = ()


def stories() -> list[Story]:
    """All of them, in a fixed order."""
    found = [
        *_calm(),
        *_data(),
        *_devices(),
        *_links(),
        *_windows(),
        *_deaths(),
        *_joins(),
        *_breaks(),
        *_failures(),
        *_cuts(),
        *_rare(),
    ]
    assert len({story.name for story in found}) == len(found)
    return found


def story(
    policy: str,
    what: str,
    speeds: Sequence[float] = MIXED,
    *,
    device: dict[str, Any] | None = None,
    last: dict[str, Any] | None = None,
    link: Link | None = None,
    link_changes: tuple[LinkChange, ...] = (),
    faults: tuple[Fault, ...] = (),
    breaks: tuple[Break, ...] = (),
    deaths: tuple[Death, ...] = (),
    cuts: tuple[Cut, ...] = (),
    **run: Any,
) -> Story:
    """A story; ``device`` changes every device, ``last`` the last one, ``run`` the run.

    All have two epochs of 60 batches and a tail, unless ``run`` says otherwise.
    """
    of_device: dict[str, Any] = {"jitter": 0.1, "name": "CPU"} | (device or {})
    devices = [Device(seconds_per_sample=SAMPLE_S / s, **of_device) for s in speeds]
    devices[-1] = replace(devices[-1], **(last or {}))
    of_run: dict[str, Any] = {"samples": 60 * BATCH + 5, "epochs": 2, "seed": 7} | run
    cluster = Cluster(
        run=SimulatedRun(policy=policy, batch_size=BATCH, model_bytes=1e6, **of_run),
        devices=tuple(devices),
        link=link or Link(latency_s=0.0005, bytes_per_s=4e8, efficiency=1.0),
        link_changes=link_changes,
        faults=faults,
        breaks=breaks,
    )
    name = f"{policy}: {what}"
    return Story(name=name, cluster=cluster, deaths=deaths, cuts=cuts)


def each(what: str, policies: Sequence[str] = POLICIES, **case: Any) -> Iterator[Story]:
    """The same story under several policies."""
    for policy in policies:
        yield story(policy, what, **case)


def _calm() -> Iterator[Story]:
    """Nothing happens: worlds of several sizes and speeds."""
    yield from each("one device", speeds=ONE)
    yield from each("two equal devices", speeds=EQUAL)
    yield from each("two devices 4 to 1", speeds=PAIR)
    yield from each("two devices 8 to 1, the slow one first", speeds=(0.125, 1.0))
    yield from each("three mixed devices")
    yield from each("five devices of three kinds", speeds=FIVE)
    yield from each("eight devices, one half as fast", speeds=(1.0,) * 7 + (0.5,))


def _data() -> Iterator[Story]:
    """Epochs of every length, with and without a tail."""
    whole = 60 * BATCH
    yield from each("drop_last leaves whole batches only", samples=whole)
    yield from each("fewer samples than ranks", speeds=FIVE, samples=3, epochs=3)
    yield from each("fewer batches than ranks", speeds=FIVE, samples=3 * BATCH)
    yield from each("a single batch", samples=BATCH)
    yield from each("four short epochs", samples=9 * BATCH + 1, epochs=4)
    sizes = ((7, 20), (9, 12), (1, 3), (16, 20))
    yield from each("batches of several sizes", samples=0, batch_sizes=sizes)
    yield from each("pauses between epochs", epochs=3, samples=whole // 2, pause_s=0.2)


def _devices() -> Iterator[Story]:
    """Devices that are noisy, cold, starved or change their speed."""
    yield from each("noisy devices", device={"jitter": 0.4})
    spiky = {"spike_probability": 0.05, "spike_factor": 8.0}
    yield from each("devices with spikes", device=spiky)
    yield from each("compilation in the first batch", device={"first_batch_s": 0.5})
    loads = {"load_seconds_per_sample": 0.004, "prefetch": 4}
    yield from each("the last rank waits for its data", last=loads)
    yield from each("no prefetch", device={"prefetch": 0})
    slower = {"drift": (Drift(at_s=0.6, factor=3.0),)}
    yield from each("the last rank is throttled to a third", last=slower)
    faster = {"drift": (Drift(at_s=0.6, factor=0.4),)}
    yield from each("the last rank becomes faster", last=faster)
    fixed = {"seconds_per_batch": 0.01}
    yield from each("a fixed time per batch", device=fixed)


def _links() -> Iterator[Story]:
    """Links that are slow, far, noisy or change."""
    slow = Link(latency_s=0.0005, bytes_per_s=1e7, efficiency=1.0)
    yield from each("a slow link", link=slow)
    yield from each("a far link", link=Link(latency_s=0.01, bytes_per_s=4e8))
    noisy = Link(latency_s=0.001, bytes_per_s=4e8, spread_s=0.02)
    yield from each("control messages are late", link=noisy)
    changes = (
        LinkChange(at_s=0.5, bytes_per_s=1e7),
        LinkChange(at_s=1.2, bytes_per_s=4e8),
    )
    yield from each("the link is slow for a while", link_changes=changes)


def _windows() -> Iterator[Story]:
    """Windows of given lengths."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("windows of three batches", {"anchor": 3, "max_anchor": 3}),
        ("windows of one batch", {"anchor": 1, "max_anchor": 0}),
        ("long windows", {"anchor": 10, "min_anchor": 10}),
        ("whole local batches", {"local_batch_size": BATCH}),
    ]
    for what, windows in cases:
        yield from each(what, WINDOWS, options={"windows": windows})


def _deaths() -> Iterator[Story]:
    """Ranks die: in compute, in reductions, together, one after the other."""
    last = Fault(at_s=0.6, kill_rank=2)
    yield from each("the last rank dies", faults=(last,))
    yield from each("rank 0 dies", faults=(Fault(at_s=0.6, kill_rank=0),))
    both = (Fault(at_s=0.6, kill_rank=1), Fault(at_s=0.6, kill_rank=2))
    yield from each("two ranks die at once", faults=both)
    later = (Fault(at_s=0.4, kill_rank=0), Fault(at_s=0.8, kill_rank=1))
    yield from each("two ranks die one after the other", faults=later)
    nearly = (Fault(at_s=0.6, kill_rank=1), Fault(at_s=0.62, kill_rank=3))
    yield from each("a rank dies while a group forms", speeds=FIVE, faults=nearly)
    for what, part in (
        ("a rank dies in a reduction", 0.5),
        ("a rank dies when some hold the result", 1.5),
    ):
        death = Death(reduction=3, place=1, part=part)
        yield from each(what, deaths=(death,))
    pair = tuple(Death(reduction=3, place=p, part=0.5) for p in (1, 2))
    yield from each("two ranks die in one reduction", speeds=FIVE, deaths=pair)
    slow = Link(latency_s=0.0005, bytes_per_s=2e7, efficiency=1.0)
    yield from each("a rank dies on a slow link", link=slow, faults=(last,))


def _joins() -> Iterator[Story]:
    """Ranks join a run under way."""
    new = Device(seconds_per_sample=SAMPLE_S, jitter=0.1, name="CPU")
    join = Fault(at_s=0.5, join=new)
    yield from each("a rank joins", faults=(join,), epochs=3)
    replaced = (Fault(at_s=0.3, kill_rank=1), join)
    yield from each("a rank takes a dead one's place", faults=replaced, epochs=3)
    leaves = (join, Fault(at_s=1.1, kill_rank=3))
    yield from each("a rank joins and dies", faults=leaves, epochs=3)
    two = (join, Fault(at_s=0.55, join=new))
    yield from each("two ranks join one device", speeds=ONE, faults=two)


def _breaks() -> Iterator[Story]:
    """Loops leave the first of two epochs."""

    def at(*batches: int) -> tuple[Break, ...]:
        places = enumerate(batches)
        return tuple(Break(rank=r, epoch=0, batches=b) for r, b in places if b)

    yield from each("rank 0 breaks", breaks=at(5))
    yield from each("the last rank breaks", breaks=at(0, 0, 5))
    yield from each("all break after the same batch", breaks=at(6, 6, 6))
    yield from each("ranks break after different batches", breaks=at(8, 6, 4))


def _failures() -> Iterator[Story]:
    """Runs that end before their last epoch."""
    yield from each("a rank's loop raises", faults=(Fault(at_s=0.6, fail_rank=1),))
    hangs = Fault(at_s=0.6, hang_rank=1)
    yield from each("a rank hangs", faults=(hangs,), options={"timeout_s": 7.0})
    early = Fault(at_s=0.0, kill_rank=1)
    yield from each("a rank dies before the first epoch", faults=(early,))


def _cuts() -> Iterator[Story]:
    """The first epoch is cut for a checkpoint, or for good."""
    pause = Cut(rank=0, after_s=0.2, is_end=False)
    again = Cut(rank=0, after_s=0.45, is_end=False)
    end = Cut(rank=1, after_s=0.4, is_end=True)
    never = (Break(rank=0, epoch=0, batches=10**9),)
    yield from each("an epoch is cut for a checkpoint", cuts=(pause,))
    yield from each("an epoch is cut twice", cuts=(pause, again))
    yield from each("an epoch pauses and ends early", cuts=(pause, end), breaks=never)
    late = Fault(at_s=0.6, kill_rank=2)
    yield from each("a rank dies after a checkpoint", cuts=(pause,), faults=(late,))
    new = Fault(at_s=0.2, join=0)
    yield from each("a rank joins where an epoch is cut", cuts=(pause,), faults=(new,))


def _rare() -> Iterator[Story]:
    """Exclusion, bad batches, several runs by the same processes."""
    speeds = (1.0, 1.0, 0.02)
    fixed = {"seconds_per_batch": 0.02}
    yield from each("one device too slow", ("sync",), speeds=speeds, last=fixed)
    yield from each("shares of two samples at least", ("sync",), min_share_samples=2)
    bad = (3, 20)
    yield from each("batches with infinite gradients", WINDOWS, bad_batches=bad)
    yield from each("two runs one after the other", ("sync", *WINDOWS), runs=2)
    once = {"debug": {"deterministic": True}}
    yield from each("deterministic", ("sync", *WINDOWS), options=once)
