"""Processor time of a run's event file: microseconds per window of two ranks.

python benchmarks/event_file.py
"""

import tempfile
import time
from pathlib import Path

from elche.coordination.accounts.metrics import WindowMetrics
from elche.coordination.protocol.instructions import MetricsReported
from elche.monitor.event_records import RANK_FIELDS, EventRecorder
from elche.runtime.report.event_file import NAME, EventFile

WINDOWS = 100_000


def main() -> None:
    """Measures recorder and file apart."""
    pair = {"rank_samples": (80, 20), "discarded_samples": (0, 0)}
    times = dict.fromkeys(RANK_FIELDS[2:], (0.0712345, 0.0687654))
    about = {"epoch": 0, "window": 0, "synchronisations": 1, "duration_s": 0.1}
    window = WindowMetrics(**about, **pair, **times, means=(("loss", 1.25),))  # type: ignore[arg-type]
    message = MetricsReported(rank=0, epoch=0, window=0, values=window.to_json())
    recorder = EventRecorder()
    begun_s = time.process_time()
    records = [r for t in range(WINDOWS) for r in recorder.see(message, t)]
    made_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        file = EventFile(Path(folder))
        for record in records:
            file.add(record)
        file.close()
        file._thread.join()  # close waits only for a while
        size_mb = (Path(folder) / NAME).stat().st_size / 1e6
    ended_s = time.process_time()
    made_us, file_us = (1e6 / WINDOWS * s for s in (made_s - begun_s, ended_s - made_s))
    print(f"µs of a processor per window: recorder {made_us:.1f}, file {file_us:.1f}")
    print(f"the file of {WINDOWS:,} windows: {size_mb:.1f} MB")


if __name__ == "__main__":
    main()
