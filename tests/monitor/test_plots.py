"""Loss curves as PNG."""

from __future__ import annotations

import builtins
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from elche.errors import ConfigError
from elche.monitor.plots import LossCurve, PlotText, plot_loss_curves

CURVES = [
    LossCurve("solo-0", [0.0, 1.0, 2.0], [0, 100, 200], [4.0, 2.0, 1.5]),
    LossCurve("diverged", [0.0, 1.0, 2.0], [0, 100, 200], [4.0, math.nan, math.inf]),
]


@pytest.mark.parametrize(
    "curves", [CURVES, CURVES[1:], [LossCurve("x", [0], [0], [1])]]
)
def test_a_png_is_written(tmp_path: Path, curves: list[LossCurve]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    plot_loss_curves(curves, path, PlotText("title", "emulated devices", 1.8))
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
        plot_loss_curves(CURVES, tmp_path / "curves.png", PlotText("title"))


def test_curves_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 1, 1 and 2"):
        LossCurve("ddp", [0.0], [0], [1.0, 2.0])
    with pytest.raises(ConfigError, match="got 0, 0 and 0"):
        LossCurve("ddp", [], [], [])
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="no loss curve"):
        plot_loss_curves([], tmp_path / "curves.png", PlotText("title"))
