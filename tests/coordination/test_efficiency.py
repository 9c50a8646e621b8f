"""How much of the devices' summed speed a run delivers, in virtual time."""

from __future__ import annotations

import pytest

from tests.coordination.checks import check_run
from tests.coordination.simulated import Device, Plan, Record
from tests.coordination.simulated_worker import simulate

BATCH_SAMPLES = 32
FAST_SAMPLE_S = 0.00125
FAST_BATCH_S = BATCH_SAMPLES * FAST_SAMPLE_S
SYNC_S = 0.3 * FAST_BATCH_S
SLOWDOWNS = [(1.0, 4.0), (1.0, 1.5, 2.5, 4.0)]


def plan_of(
    policy: str, slowdowns: tuple[float, ...], jitter: float, **changes: object
) -> Plan:
    settings: dict[str, object] = {
        "devices": tuple(
            Device(sample_s=FAST_SAMPLE_S * slowdown, jitter=jitter, prefetched=4)
            for slowdown in slowdowns
        ),
        "policy": policy,
        "sizes": ((BATCH_SAMPLES, 1500),),
        "sync_s": SYNC_S,
        "delay_s": 0.0005,
        "seed": 3,
    }
    return Plan(**(settings | changes))  # type: ignore[arg-type]


def summed_speed(plan: Plan) -> float:
    """Samples per second of all devices, each alone."""
    return sum(1.0 / device.sample_s for device in plan.devices)


def efficiency(plan: Plan, record: Record, part: tuple[float, float]) -> float:
    """Samples computed per second in a part of the run, over the summed speed."""
    end_s = max(stop for _, _, stop in record.busy)
    first_s, last_s = part[0] * end_s, part[1] * end_s
    done = 0.0
    for rank, start, stop in record.busy:
        inside_s = min(stop, last_s) - max(start, first_s)
        mean_s = plan.devices[rank].sample_s
        done += max(0.0, inside_s) / mean_s
    return done / (last_s - first_s) / summed_speed(plan)


@pytest.mark.parametrize("slowdowns", SLOWDOWNS)
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_cadence_delivers_the_summed_speed_once_warm(
    slowdowns: tuple[float, ...], jitter: float
) -> None:
    plan = plan_of("cadence", slowdowns, jitter)
    record = simulate(plan)
    check_run(plan, record)
    reached = efficiency(plan, record, (0.2, 0.9))
    # The overhead target covers the reduction. What remains is the wait for the
    # last rank's batch boundary: with four ranks some boundary is always far off
    # (measured: 0.974, 0.945 with jitter; with four ranks 0.944, 0.927).
    bar = 1.0 / 1.03 - 0.02 if len(slowdowns) == 2 else 0.94
    assert reached >= bar - 0.2 * jitter


@pytest.mark.parametrize("slowdowns", SLOWDOWNS)
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_the_ranks_end_an_epoch_of_cadence_together(
    slowdowns: tuple[float, ...], jitter: float
) -> None:
    spreads = []
    for seed in range(10):
        plan = plan_of(
            "cadence", slowdowns, jitter, sizes=((BATCH_SAMPLES, 400),), seed=seed
        )
        record = simulate(plan)
        ends_s = record.last_work_s[0, 0].values()
        spreads.append((max(ends_s) - min(ends_s)) / (4.0 * FAST_BATCH_S))
    # Measured in slow batches, mean and largest: 0.25 and 0.13 without jitter, 0.49
    # and 1.05 with it; with four ranks and jitter 0.75 and 1.63.
    mean = sum(spreads) / len(spreads)
    assert mean <= (0.5 if len(slowdowns) == 2 or jitter == 0.0 else 0.8)
    assert max(spreads) <= (0.5 if jitter == 0.0 else 1.75)


@pytest.mark.parametrize("slowdowns", SLOWDOWNS)
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_a_second_epoch_of_cadence_is_efficient_with_its_ends(
    slowdowns: tuple[float, ...], jitter: float
) -> None:
    sizes = ((BATCH_SAMPLES, 400),)
    plan = plan_of("cadence", slowdowns, jitter, sizes=sizes, epochs=2)
    record = simulate(plan)
    began_s = max(record.last_work_s[0, 0].values())
    ended_s = max(record.last_work_s[0, 1].values())
    ideal_s = 400 * BATCH_SAMPLES / summed_speed(plan)
    reached = ideal_s / (ended_s - began_s)
    assert reached >= 0.935 - 0.2 * jitter


@pytest.mark.parametrize("slowdowns", SLOWDOWNS)
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_shares_of_sync_converge_to_equal_times(
    slowdowns: tuple[float, ...], jitter: float
) -> None:
    plan = plan_of("sync", slowdowns, jitter, sizes=((100, 800),), sync_s=0.0)
    record = simulate(plan)
    check_run(plan, record)
    ((shares),) = record.shares[0, 0, 799]
    times_s = [
        share * device.sample_s
        for share, device in zip(shares, plan.devices, strict=True)
    ]
    ideal_s = 100 / summed_speed(plan)
    reached = efficiency(plan, record, (0.2, 1.0))
    one_sample_s = max(device.sample_s for device in plan.devices)
    assert max(times_s) <= ideal_s * (1.03 + 0.5 * jitter) + one_sample_s
    assert reached >= (0.95 if jitter == 0.0 else 0.85)


@pytest.mark.parametrize("slower_by", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("prefetched", [0, 4])
def test_no_loader_of_sync_draws_in_vain_when_speeds_change(
    slower_by: float, prefetched: int
) -> None:
    # Once: from about 10 times slower steps on, the grants still out are counted
    # in steps of the old length, and every loader runs dry once.
    device = Device(
        sample_s=0.00025,
        prefetched=prefetched,
        slower_from_s=0.5,
        slower_by=slower_by,
    )
    plan = Plan(
        devices=(device, device),
        policy="sync",
        sizes=((8, 1000),),
        sync_s=0.0002,
        delay_s=0.0002,
    )
    record = simulate(plan)
    check_run(plan, record)
    late = [w for w in record.waits if w[1].startswith("grant") and w[1] != "grant 0"]
    assert [wait for wait in late if wait[3] > wait[2]] == []


@pytest.mark.parametrize("prefetched", [0, 8])
def test_few_batches_are_spread_over_the_ranks(prefetched: int) -> None:
    devices = (Device(prefetched=prefetched),) * 4
    plan = Plan(devices=devices, policy="cadence", sizes=((8, 8),))
    record = simulate(plan)
    per_rank = [sum(r == rank for r, *_ in record.trained[0, 0]) for rank in range(4)]
    assert per_rank == [2, 2, 2, 2]
