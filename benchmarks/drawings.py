"""Draw docs/pictures/{ddp,sync,windows}.svg: what two unequal devices do, simulated.

python -m benchmarks.drawings

The pictures show equal times on the same devices and link, in a light or dark theme.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from elche.config_parts import WindowConfig
from elche.monitor.trace import BATCH, SYNC
from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from elche.sim.report import report_of
from elche.sim.simulation import Simulation, Watch

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SHOWN_MS, STEADY_S = 600, 2.0
LEFT_PX, WIDTH_PX, ROW_PX, TOP_PX = 46, 700, 28, 42
MS_PER_SAMPLE = {"fast": 1.0, "slow": 4.0}
RUNS = {
    "ddp": ("DistributedDataParallel: equal shares of every batch", "sync", "fixed"),
    "sync": ("sync: shares of every batch by measured speed", "sync", "auto"),
    "windows": (
        "cadence: windows, one reduction at the end of each",
        "cadence",
        "auto",
    ),
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #59636e } .title { font-weight: 600 }
.count { font-size: 11px; fill: #fff; text-anchor: middle } .end { text-anchor: end }
.mid { text-anchor: middle } .batch { fill: #2f6fd0 } .sync { fill: #e8871e }
.wait { fill: url(#hatch) } .line { stroke: #8b949e; opacity: .55 }
@media (prefers-color-scheme: dark) { text { fill: #b4bcc6 } .count { fill: #fff }
.batch { fill: #3f7fdc } .sync { fill: #f09a3a } }"""
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V6M3 0V6" stroke="#8b949e" '
    'stroke-width="1.5" stroke-opacity=".5"/></pattern>'
)


class Bar(NamedTuple):
    """Activity of a rank in the shown time: kind, begin and end (ms), samples."""

    rank: int
    kind: str
    begin_ms: float
    end_ms: float
    samples: int


def simulate(name: str) -> tuple[list[Bar], str]:
    """Bars and throughput of a run; the shown time begins with a reduction's end."""
    _, policy, shares = RUNS[name]
    own = {} if policy == "sync" else {"windows": WindowConfig(anchor=4, max_anchor=4)}
    sizes = {"samples": 32 * 600, "batch_size": 32, "model_bytes": 8e6}
    run = SimulatedRun(policy=policy, options={"shares": shares, **own}, **sizes)
    each_ms = list(MS_PER_SAMPLE.values())
    devices = tuple(Device(seconds_per_sample=ms / 1e3) for ms in each_ms)
    cluster = Cluster(run=run, devices=devices, link=Link(bytes_per_s=500e6))
    simulation = Simulation(cluster, Watch(details=True))
    spans = sorted(simulation.run().spans, key=lambda span: (span.start_s, span.rank))
    ends_s = [s.start_s + s.duration_s for s in spans if s.category == SYNC]
    from_s = min(end_s for end_s in ends_s if end_s > STEADY_S)
    bars = []
    for span in spans:
        begin_ms, long_ms = 1e3 * (span.start_s - from_s), 1e3 * span.duration_s
        if begin_ms + long_ms > 0.5 and begin_ms < SHOWN_MS - 0.5:
            kind = {BATCH: "batch", SYNC: "sync"}.get(span.category, "wait")
            samples = round(long_ms / each_ms[span.rank]) if kind == "batch" else 0
            begin_ms, end_ms = max(0.0, begin_ms), min(SHOWN_MS, begin_ms + long_ms)
            bars.append(Bar(span.rank, kind, begin_ms, end_ms, samples))
    sums = report_of(simulation)
    rate = f"{sums.samples_per_s:,.0f} samples/s, {sums.efficiency:.0%}"
    return bars, f"{rate} of the devices' sum"


def to_svg(title: str, bars: list[Bar], rate: str) -> str:
    """The picture: a row of bars per rank, a time axis and a legend."""
    rows = [TOP_PX, TOP_PX + ROW_PX + 6]
    foot, right, px_per_ms = rows[1] + ROW_PX, LEFT_PX + WIDTH_PX, WIDTH_PX / SHOWN_MS
    parts = [_text("title", LEFT_PX, 20, title), _text("end", right, 20, rate)]
    for ms in range(0, SHOWN_MS + 1, 100):
        x = LEFT_PX + ms * px_per_ms
        line = f'x1="{x:.1f}" y1="{TOP_PX - 6}" x2="{x:.1f}" y2="{foot + 6}"'
        parts.append(f'<line class="line" {line}/>')
        parts.append(_text("mid", x, foot + 22, f"{ms}{' ms' * (ms == SHOWN_MS)}"))
    for name, y in zip(MS_PER_SAMPLE, rows, strict=True):
        parts.append(_text("end", LEFT_PX - 8, y + 19, name))
    for bar in bars:
        x, y = LEFT_PX + bar.begin_ms * px_per_ms, rows[bar.rank]
        wide = max(1.0, (bar.end_ms - bar.begin_ms) * px_per_ms - 1)
        parts.append(_box(bar.kind, x, y, wide, ROW_PX))
        if bar.samples and wide > 8 * len(str(bar.samples)):
            parts.append(_text("count", x + wide / 2, y + 18, str(bar.samples)))
    legend = {"batch": "trains, number of samples", "sync": "reduces", "wait": "waits"}
    for (kind, text), x in zip(legend.items(), (46, 256, 356), strict=True):
        parts += [_box(kind, x, foot + 36, 14, 12), _text("", x + 20, foot + 47, text)]
    head = f'viewBox="0 0 {right + 24} {foot + 58}" role="img"'
    shown = f"<title>{title}</title><defs>{HATCH}</defs><style>{STYLE}</style>"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {head}>'
    return "\n".join([svg, shown, *parts, "</svg>"]) + "\n"


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{text}</text>'


def _box(kind: str, x: float, y: float, wide: float, high: float) -> str:
    box = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high}" rx="2"'
    return f'<rect class="{kind}" {box}/>'


if __name__ == "__main__":
    for each, (title, *_) in RUNS.items():
        svg = to_svg(title, *simulate(each))
        (FOLDER / f"{each}.svg").write_text(svg, encoding="utf-8")
