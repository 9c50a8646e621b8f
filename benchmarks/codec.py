"""What the codecs cost and save: speed, size, error, and time of a sum on a slow link.

    python benchmarks/codec.py --json codec.json
    python benchmarks/codec.py --blocks
    python benchmarks/codec.py --link-mbit 100 --ranks 2 --json link.json

The first two run on one core. Errors are relative (norm of the difference over norm) of
Gaussian values and of a real drift: the text model of `elche demo` after a window of
AdamW steps. With ``--link-mbit`` every rank gets a network namespace whose link is
limited both ways by `tc tbf` (Linux, root; they are removed in the end), and sums of
`--numel` elements through each codec are timed beside gloo's plain all-reduce.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from links.namespaces import slow_link
from record import write_record
from torch import distributed as dist
from torch.utils.data import DataLoader

from elche.comm.codec.codec import CODECS, BlockCodec, Codec
from elche.comm.codec.codec_peers import GroupPeers
from elche.comm.codec.coded_exchange import CodedExchange
from elche.comm.transport.exchange import Exchange, GlooExchange
from elche.comm.transport.process_group import Group
from elche.demo.models import build_workload

SPEED_ELEMENTS = 1 << 22
REPEATS = 9
CONTENDERS = ("all_reduce", *CODECS)
RANK_TIMEOUT_S = 300.0


def real_drift(steps: int) -> torch.Tensor:
    """What some steps on the demo's text model move its parameters by; flat."""
    workload = build_workload("gpt-small")
    model = workload.model_fn()
    optimizer = workload.optimizer_fn(model.parameters())
    loader = DataLoader(
        workload.train_dataset,
        batch_size=32,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    base = torch.empty(0)
    for number, batch in zip(range(2 * steps), loader, strict=False):
        if number == steps:  # the first steps are not typical
            base = flat(model)
        optimizer.zero_grad()
        workload.loss_fn(model, batch).backward()
        optimizer.step()
    return base - flat(model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    """A copy of all parameters."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def relative_error(codec: Codec, values: torch.Tensor) -> float:
    """Norm of what encoding takes off, over the norm of the values."""
    memory = torch.zeros(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    body = codec.over(memory, values.numel())
    body.write(0, values)
    decoded = torch.empty_like(values)
    body.read(0, decoded)
    return float((decoded - values).norm() / values.norm())


def quickest_s(call: Callable[[], object]) -> float:
    """The least time of several calls."""
    times = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return min(times)


def coding_figures(codec: Codec, drift: torch.Tensor) -> dict[str, float]:
    """Speed, size and errors of one codec."""
    values = torch.randn(SPEED_ELEMENTS, generator=torch.Generator().manual_seed(0))
    memory = torch.zeros(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    body = codec.over(memory, values.numel())
    decoded = torch.empty_like(values)
    megabytes = 4e-6 * values.numel()
    return {
        "bytes_per_element": codec.encoded_bytes(codec.block) / codec.block,
        "encode_mb_s": megabytes / quickest_s(lambda: body.write(0, values)),
        "decode_mb_s": megabytes / quickest_s(lambda: body.read(0, decoded)),
        "error_gaussian": relative_error(codec, values),
        "error_drift": relative_error(codec, drift),
    }


def measure_coding(by_block: bool, steps: int) -> dict[str, dict[str, float]]:
    """All codecs, or all block sizes."""
    torch.set_num_threads(1)
    drift = real_drift(steps)
    codecs = list(CODECS.values())
    if by_block:
        codecs = [
            BlockCodec(f"int{bits}, blocks of {block}", bits, block)
            for bits in (8, 4)
            for block in (16, 32, 64, 128, 256, 512)
        ]
    print(f"{'':20} bytes/element  encode MB/s  decode MB/s  error: Gaussian, drift")
    found = {}
    for codec in codecs:
        found[codec.name] = row = coding_figures(codec, drift)
        print(
            f"{codec.name:20} {row['bytes_per_element']:13.4f} "
            f"{row['encode_mb_s']:12.0f} {row['decode_mb_s']:12.0f} "
            f"{row['error_gaussian']:16.5f} {row['error_drift']:6.5f}",
            flush=True,
        )
    return found


def measure_link(options: argparse.Namespace) -> dict[str, Any]:
    """Sums between namespaces; the figures of rank 0."""
    with (
        slow_link(options.ranks, options.link_mbit) as link,
        tempfile.TemporaryDirectory() as folder,
    ):
        ranks = [
            subprocess.Popen(
                [
                    *link.command(rank),
                    *(sys.executable, __file__, "--rank", str(rank)),
                    *("--ranks", str(options.ranks), "--numel", str(options.numel)),
                    *("--listen", address, "--folder", folder),
                    *("--sums", str(options.sums)),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE if rank == 0 else None,
            )
            for rank, (_, address) in enumerate(link.ranks)
        ]
        try:
            output, _ = ranks[0].communicate(timeout=RANK_TIMEOUT_S)
            codes = [rank.wait(timeout=30.0) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with codes {codes}")
    found: dict[str, Any] = json.loads(output)
    plain_s = found["all_reduce"]["sum_s"]
    print(
        f"{options.ranks} ranks, {options.link_mbit:g} Mbit/s, {options.numel} elements"
    )
    print(f"{'':12} seconds of a sum  x all_reduce  MB sent per rank  relative error")
    for name, row in found.items():
        sent = row["sent_bytes"]
        print(
            f"{name:12} {row['sum_s']:16.3f} {plain_s / row['sum_s']:13.2f} "
            f"{'' if sent is None else format(sent / 1e6, '.2f'):>17} "
            f"{row['error']:15.6f}"
        )
    return found


def run_rank(options: argparse.Namespace) -> None:
    """One rank of `measure_link`; rank 0 prints its figures."""
    torch.set_num_threads(1)
    settings = dist.ProcessGroupGloo._Options()
    settings._timeout = timedelta(seconds=120)
    settings._devices = [dist.ProcessGroupGloo.create_device(hostname=options.listen)]
    store = dist.FileStore(str(Path(options.folder) / "store"), options.ranks)
    made = dist.ProcessGroupGloo(store, options.rank, options.ranks, settings)
    group = Group(made, options.rank, options.ranks, 120.0)
    found = {
        name: timed_sums(group, name, options.numel, options.sums, 2 * number)
        for number, name in enumerate(CONTENDERS)
    }
    group.close()
    if options.rank == 0:
        print(json.dumps(found))


def timed_sums(
    group: Group, name: str, numel: int, sums: int, tag: int
) -> dict[str, float | None]:
    """Sums through one contender; the median of the slowest rank's times."""
    exchange: Exchange
    if name == "all_reduce":
        cpu = torch.device("cpu")
        exchange = GlooExchange(group, numel + 1, torch.float32, cpu, sides=1)
    else:
        exchange = CodedExchange(GroupPeers(group), CODECS[name], numel + 1, 1, tag)
    values = [
        torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        for rank in range(group.world_size)
    ]
    times, error = [], 0.0
    for number in range(sums):
        exchange.contribution(0)[:-1] = values[group.rank]
        exchange.contribution(0)[-1] = 1.0
        group.all_reduce(torch.zeros(1), "beginning together")
        started_s = time.perf_counter()
        exchange.begin(0)
        found = exchange.finish("a benchmark")
        taken = torch.zeros(group.world_size, dtype=torch.float64)
        taken[group.rank] = time.perf_counter() - started_s
        group.all_reduce(taken, "comparing times")
        times.append(float(taken.max()))
        if number == 0:  # later ones carry residuals
            true = torch.stack(values).sum(0)
            error = float((found[:-1] - true).norm() / true.norm())
    sent = None
    if isinstance(exchange, CodedExchange):
        exchange.flush("a benchmark")
        group.all_reduce(torch.zeros(1), "ending together")
        sent = exchange.sent_bytes / sums
    return {"sum_s": sorted(times)[sums // 2], "sent_bytes": sent, "error": error}


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", action="store_true", help="compare block sizes")
    parser.add_argument("--steps", type=int, default=20, help="of the real drift")
    parser.add_argument("--link-mbit", type=float, default=None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--sums", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    for internal in ("--rank", "--listen", "--folder"):
        parser.add_argument(internal, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        options.rank = int(options.rank)
        run_rank(options)
        return
    if options.link_mbit is not None:
        figures: dict[str, Any] = measure_link(options)
    else:
        figures = measure_coding(options.blocks, options.steps)
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
