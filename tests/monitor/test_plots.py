"""Loss curves as PNG."""

from __future__ import annotations

import builtins
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from elche.errors import ConfigError
from elche.monitor.plots import Curve, plot_loss_curves

SOLO: Curve = [(0.0, 0, 4.0), (1.0, 100, 2.0), (2.0, 200, 1.5)]
DIVERGED: Curve = [(0.0, 0, 4.0), (1.0, 100, math.nan), (2.0, 200, math.inf)]


@pytest.mark.parametrize("curves", [[SOLO, DIVERGED], [DIVERGED], [[(0.0, 0, 1.0)]]])
def test_a_png_is_written(tmp_path: Path, curves: list[Curve]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    plot_loss_curves([("solo-0", each) for each in curves], path, "title", 1.8)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000
    assert height > 500


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'elche\[plot\]'"):
        plot_loss_curves([("solo-0", SOLO)], tmp_path / "curves.png", "title")
