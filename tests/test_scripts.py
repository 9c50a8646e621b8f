"""Whole training scripts: plain, and as elche scripts on two unequal devices.

Each of `tests/scripts` is a plain PyTorch script; its comments ``# elche: ...`` are the
lines that make it an elche script. What is to come out is declared here beforehand, and
explained in docs/scripts.md. Under `sync` a script's class is

- E: ends with the parameters of the plain script, to 1e-5 of their norm
- S: draws at random on each rank; the mean of five seeds' scores is the plain script's

and under `cadence` and `async`, where averaged parameters are never the plain script's,

- A: ranks equal, samples and learning rate as plain
- L: may differ in what is named, because the loss decides
- N: refused with the error that is named
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import pytest
import torch

from tests import device as test_device

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
ELCHE = ("-m", "elche", "run")
EMULATED = ("--speeds", "1,0.5", "--ms-per-sample", "0.2")
BOUNDS = {"E": 1e-5, "S": float("inf")}
SEEDS = range(5)
T_999 = 8.61
"""Student's t of four degrees of freedom: 1 of 1000 intervals misses its mean."""

pytestmark = pytest.mark.distributed

Plain = Callable[[str, int], dict[str, Any]]
"""Result of a plain script by its name and seed."""
Launcher = Callable[[str], tuple[str, ...]]
"""Command of two ranks by their policy."""


class Declared(NamedTuple):
    """Classes of a script, each with what differs or with the error."""

    sync: str
    windows: str


CORPUS = {
    "char_rnn": Declared("E", "N no column stays on a rank"),
    "early_stopping": Declared("E", "L lr samples"),
    "image_classifier": Declared("S", "N is a SyncBatchNorm layer"),
    "metric_learning": Declared("E", "N elche.all_gather inside the loop"),
    "nanogpt": Declared("E", "N swap the two lines, loss.backward.. first"),
    "token_lm": Declared("E", "A"),
    "vae": Declared("S", "A"),
}


def form(name: str, *, is_elche: bool) -> tuple[str, int]:
    """The script in one of its forms, and the number of lines between them."""
    text = (SCRIPTS / f"{name}.py").read_text()
    return re.subn(r"(?m)^( *)# elche: ", r"\1" if is_elche else r"\g<0>", text)


def run(
    name: str, folder: Path, options: Sequence[str] = (), seed: int = 0
) -> tuple[int, str]:
    """Runs a script, under a launcher if one is given: exit code and errors."""
    folder.mkdir()
    path = os.pathsep.join([str(SCRIPTS), os.environ["PYTHONPATH"]])
    script = folder / f"{name}.py"
    script.write_text(form(name, is_elche=bool(options))[0])
    ended = subprocess.run(
        (sys.executable, *options, str(script), str(folder)),
        env={**os.environ, "PYTHONPATH": path, "SEED": str(seed)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=280,
        check=False,
    )
    return ended.returncode, ended.stderr


def results(
    name: str, folder: Path, options: Sequence[str] = (), seed: int = 0
) -> list[dict[str, Any]]:
    """What each rank has saved."""
    code, errors = run(name, folder, options, seed)
    assert code == 0, errors
    return saved(folder, 2 if options else 1)


def saved(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank has saved there."""
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(file, weights_only=True) for file in files]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Results of plain scripts, each run once."""
    folder = tmp_path_factory.mktemp("plain")

    @functools.cache
    def result(name: str, seed: int) -> dict[str, Any]:
        return results(name, folder / f"{name}-{seed}", seed=seed)[0]

    return result


def distance(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> float:
    """Norm of the difference from the plain script's parameters and statistics."""
    got, want = (
        torch.cat([each.double().flatten() for each in one["state"].values()])
        for one in (ranks[0], expected)
    )
    return float((got - want).norm() / want.norm())


def differences(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> set[str]:
    """What of ranks, samples and learning rate is not as in the plain script."""
    first, second = (each["state"] for each in ranks)
    is_same = {
        "ranks": all(torch.equal(first[name], second[name]) for name in first),
        "samples": sum(each["samples"] for each in ranks) == expected["samples"],
        "lr": all(each["lr"] == pytest.approx(expected["lr"]) for each in ranks),
    }
    return {name for name, same in is_same.items() if not same}


@pytest.fixture(params=["emulated", "on devices"])
def ranks_of(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Launcher:
    """Launcher of two unequal ranks, emulated or on test devices."""
    if request.param == "emulated":
        return lambda policy: (*ELCHE, *EMULATED, "--policy", policy)
    launched = test_device.launched
    return lambda p: (*ELCHE, *launched(p, monkeypatch), "--policy", p)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS)
def test_the_default(
    name: str, tmp_path: Path, plain: Plain, ranks_of: Launcher
) -> None:
    """Ranks step together: the plain script's result, to rounding or by chance."""
    ranks, expected = results(name, tmp_path / "run", ranks_of("sync")), plain(name, 0)
    assert distance(ranks, expected) <= BOUNDS[CORPUS[name].sync]
    assert not differences(ranks, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", sorted(name for name in CORPUS if CORPUS[name].sync == "S")
)
def test_the_default_over_seeds(name: str, tmp_path: Path, plain: Plain) -> None:
    """Scripts that draw at random end where the plain one ends, in the mean."""
    gaps = [
        results(name, tmp_path / str(seed), (*ELCHE, *EMULATED), seed)[0]["score"]
        - plain(name, seed)["score"]
        for seed in SEEDS
    ]
    assert abs(mean(gaps)) <= T_999 * stdev(gaps) / len(gaps) ** 0.5, gaps


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cadence", "async", "auto"])
@pytest.mark.parametrize("name", sorted(CORPUS))
def test_policies(
    name: str, policy: str, tmp_path: Path, plain: Plain, ranks_of: Launcher
) -> None:
    """In windows the parameters are others, the script keeps its meaning.

    `auto` does what is declared of one of both.
    """
    kind, *named = CORPUS[name].windows.split(maxsplit=1)
    code, errors = run(name, tmp_path / "run", ranks_of(policy))
    if code or (kind == "N" and policy != "auto"):
        assert code != 0
        assert kind == "N", errors
        assert re.search(named[0], errors), errors
        return
    ranks, expected = saved(tmp_path / "run", 2), plain(name, 0)
    found, declared = differences(ranks, expected), {*" ".join(named).split()}
    assert distance(ranks, expected) < float("inf")  # finite
    is_near = distance(ranks, expected) <= BOUNDS[CORPUS[name].sync]
    in_steps = policy == "auto" and is_near and not found
    assert in_steps or (kind != "N" and found <= declared), (found, declared)


def test_the_table_says_what_is_declared() -> None:
    """docs/scripts.md has every script, its changed lines and its classes."""
    text = (ROOT / "docs" / "scripts.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \| (\d) \| ([A-Z]).*? \| ([A-Z]).*? \|", text)
    assert {row[0]: (int(row[1]), row[2], row[3]) for row in rows} == {
        name: (form(name, is_elche=True)[1], declared.sync, declared.windows[0])
        for name, declared in CORPUS.items()
    }
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*CORPUS, "saved"}
    assert max(form(name, is_elche=True)[1] for name in CORPUS) <= 4
