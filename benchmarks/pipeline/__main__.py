"""elche's pipeline beside torch.distributed.pipelining's, on unequal emulated devices.

python -m benchmarks.pipeline
python -m benchmarks.pipeline --speeds 1,1,1,0.5 --schedule zb-v
"""

from __future__ import annotations

import argparse

from benchmarks.pipeline.bench import run_pipeline_bench
from benchmarks.pipeline.plan import PipelineBenchConfig


def speeds_of(text: str) -> tuple[float, ...]:
    """Parses ``1,0.25``."""
    return tuple(float(part) for part in text.split(","))


def main() -> None:
    """Measures, and prints the table."""
    usual = PipelineBenchConfig(speeds=(1.0, 1.0, 1.0, 1 / 3))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--speeds", type=speeds_of, default=usual.speeds)
    parser.add_argument("--microbatches", type=int, default=usual.microbatches)
    parser.add_argument("--layers", type=int, default=usual.layers)
    parser.add_argument("--ms-per-layer", type=float, default=usual.ms_per_layer)
    parser.add_argument("--link-ms", type=float, default=usual.link_ms)
    parser.add_argument("--repetitions", type=int, default=usual.repetitions)
    parser.add_argument("--schedule", default=usual.schedule, help="of elche")
    parser.add_argument(
        "--memory-layers",
        type=float,
        help="layers' activations each device may hold in elche's plan, 0 for no limit;"
        " default: as in torch's equal split",
    )
    run_pipeline_bench(PipelineBenchConfig(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
