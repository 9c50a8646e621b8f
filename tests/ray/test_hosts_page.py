"""Examples of runs on Ray, as a user runs them on a cluster."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import ROOT, blocks

pytestmark = pytest.mark.distributed


def test_the_example_of_the_page_trains(cluster: Any, tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "docs" / "hosts.md", "python")
    script = tmp_path / "train.py"
    script.write_text(block.text)
    state = runpy.run_path(str(script), run_name="__main__")["state"]
    assert state["weight"].shape == (3, 4)


def test_the_example_for_clusters_trains_and_starts_again(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(ROOT / "examples" / "clusters" / "train_on_ray.py")
    monkeypatch.chdir(tmp_path)
    for epochs in ("1", "2"):
        words = [script, "--cpus", "1", "--epochs", epochs, "--folder", str(tmp_path)]
        monkeypatch.setattr("sys.argv", words)
        state = runpy.run_path(script, run_name="__main__")["state"]
    assert state["2.weight"].shape == (16, 64)
    assert Path("model.pt").exists()
