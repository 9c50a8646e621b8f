"""The example of docs/hosts.md, as a user runs it on a cluster."""

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
