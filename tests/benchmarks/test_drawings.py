"""docs/pictures are what `python -m benchmarks.drawings` draws today."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import drawings

SVG = "{http://www.w3.org/2000/svg}"


def bars_of(svg: str) -> list[tuple[str, list[float]]]:
    """Kind and position of every rectangle of a picture."""
    root = ElementTree.fromstring(svg)
    names = "x", "y", "width", "height"
    return [
        (each.attrib["class"], [float(each.attrib[name]) for name in names])
        for each in root.iter(f"{SVG}rect")
    ]


@pytest.mark.parametrize("name", drawings.RUNS)
def test_a_picture_is_current(name: str) -> None:
    shown = (drawings.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    bars, rate = drawings.simulate(name)
    drawn = drawings.to_svg(drawings.RUNS[name][0], bars, rate)
    assert len(shown.encode()) < 60_000
    for (kind, box), (was_kind, was_box) in zip(
        bars_of(drawn), bars_of(shown), strict=True
    ):
        assert kind == was_kind
        assert box == pytest.approx(was_box, abs=1.0)  # pixels
    assert f">{rate}<" in shown


def test_the_pictures_show_what_the_text_says() -> None:
    """Equal shares wait for the slow device; shares and windows do not."""
    waiting, reductions = {}, {}
    for name in drawings.RUNS:
        bars, _ = drawings.simulate(name)
        long_ms = [bar.end_ms - bar.begin_ms for bar in bars if bar.kind == "wait"]
        waiting[name] = sum(long_ms) / (2 * drawings.SHOWN_MS)
        reductions[name] = sum(bar.kind == "sync" for bar in bars)
    assert waiting["ddp"] > 0.3
    assert max(waiting["sync"], waiting["windows"]) < 0.1
    assert reductions["windows"] < reductions["ddp"] / 3 < reductions["sync"]


def test_how_it_works_shows_every_picture() -> None:
    text = (drawings.FOLDER.parent / "how_it_works.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^\]]{20,}\]\(pictures/(\w+)\.svg\)", text)
    assert shown == [*drawings.RUNS]
