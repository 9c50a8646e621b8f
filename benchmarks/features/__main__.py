"""Forty-eight features of PyTorch, plain and on two unequal ranks under each policy.

Run: ``python -m benchmarks.features``; a policy takes about two minutes. Exits with 1
where something is not as it is declared beside the feature.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.features.everything import FEATURES
from benchmarks.features.rank import MARK
from benchmarks.features.verdict import Verdict, compare

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("rank.py")
EMULATED = ("--speeds", "1,0.4", "--ms-per-sample", "0.05")
"""Options of `elche run`: two ranks."""
POLICIES = ("sync", "cadence", "async", "auto")
LAUNCH_S = 1700.0


def launch(options: Sequence[str], names: Sequence[str], folder: Path) -> str:
    """Trains features in one process, or under a launcher; returns stderr."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        (sys.executable, *options, str(RANK), str(folder), *names),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LAUNCH_S,
        check=False,
    )
    return ended.stderr


def results(name: str, folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What ranks have left of a feature; [] if one of them left nothing."""
    files = [folder / f"{name}.{rank}.pt" for rank in range(ranks)]
    if not all(map(Path.exists, files)):
        return []
    return [torch.load(file, weights_only=True) for file in files]


def run_plain(names: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Results of features as plain PyTorch."""
    errors = launch((), names, folder)
    found = {name: results(name, folder, 1) for name in names}
    if not all(found.values()):
        raise SystemExit(f"expected plain PyTorch to train every feature:\n{errors}")
    return {name: each[0] for name, each in found.items()}


def run_policy(
    policy: str,
    plain: dict[str, dict[str, Any]],
    folder: Path,
    ranks: Sequence[str] = EMULATED,
) -> dict[str, Verdict]:
    """Verdicts of features under a policy; after a refusal the others go on anew."""
    verdicts: dict[str, Verdict] = {}
    while left := [name for name in plain if name not in verdicts]:
        print(f"{policy}: {left[0]} and {len(left) - 1} more", file=sys.stderr)
        command = ("-m", "elche", "run", *ranks, "--policy", policy)
        errors = launch(command, left, folder)
        said = _said(errors)
        for name in left:
            found = results(name, folder, 2)
            if not found:
                verdicts[name] = Verdict(refused=_refusal(name, folder, errors))
                break
            verdicts[name] = replace(
                compare(found, plain[name]), said=tuple(said.get(name, ()))
            )
    return verdicts


def _said(errors: str) -> dict[str, list[str]]:
    """Lines of stderr by feature."""
    parts = [part.splitlines() for part in errors.split(MARK)[1:]]
    return {part[0]: part[1:] for part in parts}


def _refusal(name: str, folder: Path, errors: str) -> str:
    """The first line of the error that a feature met first on its own rank."""
    files = sorted(folder.glob(f"{name}.*.error"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    own = [text for text in texts if not text.startswith("RemoteRankError")]
    return (own or texts or [errors.strip() or "no error"])[0].splitlines()[0]


def table(found: dict[str, dict[str, Verdict]]) -> str:
    """A line for each feature; ! marks what is not as declared."""
    lines = ["".join([f"{'':22}", *(f"{policy:>22}" for policy in found)])]
    for name, feature in FEATURES.items():
        verdicts = {p: each[name] for p, each in found.items() if name in each}
        cells = [
            verdict.text + ("  " if verdict.is_declared(feature, policy) else " !")
            for policy, verdict in verdicts.items()
        ]
        if cells:
            lines.append("".join([f"{name:22}", *(f"{cell:>22}" for cell in cells)]))
    return "\n".join(lines)


def docs_rows() -> str:
    """The table of docs/features.md: what is declared of every feature."""
    return "".join(
        f"| {each.what} | {each.sync} | {each.windows} | {each.why} |\n"
        for each in FEATURES.values()
    )


def main() -> None:
    """Runs the features that are asked for, under the policies that are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--features", default=",".join(FEATURES))
    parser.add_argument("--devices", help="of two ranks, instead of emulated ones")
    parser.add_argument("--docs", action="store_true", help="print the docs' table")
    asked = parser.parse_args()
    if asked.docs:
        print(docs_rows(), end="")
        return
    ranks = ("--devices", asked.devices) if asked.devices else EMULATED
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plain").mkdir()
        plain = run_plain(asked.features.split(","), folder / "plain")
        for policy in asked.policies.split(","):
            (folder / policy).mkdir()
            found[policy] = run_policy(policy, plain, folder / policy, ranks)
    print(table(found))
    for policy, verdicts in found.items():
        for name, verdict in verdicts.items():
            if verdict.refused:
                print(f"{policy} {name}: {verdict.refused}")
    declared = (
        verdict.is_declared(FEATURES[name], policy)
        for policy, verdicts in found.items()
        for name, verdict in verdicts.items()
    )
    sys.exit(0 if all(declared) else 1)


if __name__ == "__main__":
    main()
