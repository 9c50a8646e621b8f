"""Sums in shared memory: each rank sums a part, beside each rank sums all.

    python -m benchmarks.links.shared_sums --ranks 2,4,8 --mb 1,10,100

Both kinds alternate in the same processes. A ratio is that of the median times of a
message: processor time over all ranks, and wall time of the slowest rank, from when the
contributions of all ranks are there.
"""

from __future__ import annotations

import mmap
import multiprocessing
import statistics
import time
from collections.abc import Iterator

import click
import torch

from elche.comm.transport.exchange import SharedExchange
from elche.comm.transport.process_group import Group

DTYPE = torch.float32
WARM_UP = 2


def time_sum(
    ends: SharedExchange, out: torch.Tensor, value: float, segment: int
) -> Iterator[float]:
    """Yields processor and wall time (s) of one sum, read in segments."""
    ends.reclaim("the benchmark's last sum")
    ends.contribution(0).fill_(value)
    ends.begin(0)
    ends._group.wait_until(ends.is_written, "the benchmark's contributions")
    began_s, used_s = time.perf_counter(), time.process_time()
    ends.wait("the benchmark's sum")
    for start in range(0, out.numel(), segment):
        stop = min(start + segment, out.numel())
        ends.sum_into(start, stop, out[start:stop])
    ends.release()
    yield time.process_time() - used_s
    yield time.perf_counter() - began_s


def run_rank(
    rank: int,
    memories: tuple[mmap.mmap, mmap.mmap],
    shape: tuple[int, int, int, int],
    results: multiprocessing.SimpleQueue[tuple[int, list[list[float]]]],
) -> None:
    """Sums messages both ways in turn; reports their times."""
    torch.set_num_threads(1)
    ranks, numel, repeats, segment = shape
    group = Group(None, rank, ranks, 60.0)
    kinds = [
        SharedExchange(group, memory, range(ranks), (numel, DTYPE), 1, sums)
        for sums, memory in enumerate(memories)
    ]
    out, taken = torch.zeros(numel), list[list[float]]()
    for number in range(repeats + WARM_UP):
        pair = [[*time_sum(ends, out, float(number + rank), segment)] for ends in kinds]
        expected = float(ranks * number + ranks * (ranks - 1) // 2)
        assert bool((out == expected).all())
        taken.append([time_s for each in pair for time_s in each])
    results.put((rank, taken[WARM_UP:]))


def measure(ranks: int, mb: float, repeats: int, segment: int) -> str:
    """One row of the table."""
    numel = int(mb * 1e6) // DTYPE.itemsize
    size_bytes = SharedExchange.size_bytes(ranks, numel, DTYPE, ranks + 1)
    memories = mmap.mmap(-1, size_bytes), mmap.mmap(-1, size_bytes)
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    shape = ranks, numel, repeats, segment or numel
    made = [
        fork.Process(target=run_rank, args=(rank, memories, shape, results))
        for rank in range(ranks)
    ]
    for each in made:
        each.start()
    taken = [results.get()[1] for _ in made]
    for each in made:
        each.join()
    cells = []
    for at, over in ((0, sum), (1, max)):
        whole, parts = (
            statistics.median(
                over(rank[number][at + kind] for rank in taken)
                for number in range(repeats)
            )
            for kind in (0, 2)
        )
        cells.append(f"{1e3 * whole:8.2f} {1e3 * parts:8.2f} {parts / whole:6.2f}")
    return f"{ranks:5} {mb:6g} " + "  ".join(cells)


@click.command(help=__doc__)
@click.option("--ranks", default="2,4,8", show_default=True)
@click.option("--mb", default="1,10,100", show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Of each row, about.")
@click.option(
    "--segment", default=0, show_default=True, help="Elements read at once; 0: all."
)
def main(ranks: str, mb: str, seconds: float, segment: int) -> None:
    """Prints the table."""
    print("               processor time, ms        wall time, ms")
    print("ranks     MB    whole    parts  ratio     whole    parts  ratio")
    for count in map(int, ranks.split(",")):
        for size in map(float, mb.split(",")):
            pair_s = 2e-4 * count * count * size + 1e-3 * count
            print(
                measure(count, size, max(10, int(seconds / pair_s)), segment),
                flush=True,
            )


if __name__ == "__main__":
    main()
