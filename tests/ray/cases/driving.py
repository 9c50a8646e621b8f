"""Drives a counting run on `SeparateNodes`: by elche, or by Ray Train."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import elche.ray
from benchmarks.links.namespaces import DEVICE
from tests.ray.cases.counted import count

NODES = ("near", 2), ("far", 1), ("third", 1)
"""Resource of each node, and its number of ranks."""
RANKS = [kind for kind, ranks in NODES for _ in range(ranks)]
SPEEDS = 1.0, 0.5, 0.5, 0.25
MS_PER_SAMPLE = 5.0


def by_elche(folder: str, policy: str) -> None:
    elche.ray.run(
        count,
        [elche.ray.RankSpec(resources={"CPU": 1, kind: 1}) for kind in RANKS],
        args=(folder, policy),
        speeds=SPEEDS,
        ms_per_sample=MS_PER_SAMPLE,
    )


def restarted(config: dict[str, str]) -> None:
    """A worker of Ray Train; it resumes from the newest checkpoint."""
    kept = Path(config["folder"]) / "checkpoints"
    kept.mkdir(exist_ok=True)
    os.environ |= {
        "ELCHE_LISTEN": "auto",
        "ELCHE_SPEED": "1",
        "ELCHE_MS_PER_SAMPLE": str(MS_PER_SAMPLE),
        "ELCHE_CHECKPOINT_DIR": str(kept),
        "ELCHE_CHECKPOINT_EVERY_S": "1",
        "ELCHE_RESUME": str(kept),
    }
    count(config["folder"], config["policy"])


def by_ray_train(folder: str, policy: str) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    failures = FailureConfig(max_failures=100)
    TorchTrainer(
        restarted,
        train_loop_config={"folder": folder, "policy": policy},
        scaling_config=ScalingConfig(
            num_workers=len(RANKS), resources_per_worker={"CPU": 1}
        ),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=folder, failure_config=failures),
    ).fit()


if __name__ == "__main__":
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray

    _, run, folder, policy, address = sys.argv
    # Ray Train's own gloo group would take the address of the host's name.
    variables = {"GLOO_SOCKET_IFNAME": DEVICE} if run == "train" else {}
    ray.init(address=address, runtime_env={"env_vars": variables})
    {"elche": by_elche, "train": by_ray_train}[run](folder, policy)
