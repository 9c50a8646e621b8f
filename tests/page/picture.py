"""Draws docs/pictures/page.png: the page of an emulated run that has ended.

python -m tests.page.picture [FOLDER]      of that run's events, or of a new run
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen

from tests.harness.waiting import until
from tests.page.conftest import ROOT, Browser, chromium_at

RUN = ("--speeds", "1,0.25", "--ms-per-sample", "5", "examples/trainer.py")
SIZE = 1280, 1010


def anonymous(text: str) -> str:
    """The events without names and paths of this machine."""
    records = [json.loads(line) for line in text.splitlines()]
    for record in records:
        if record["kind"] == "run":
            record |= {"command": ["python", RUN[-1]], "host": "localhost"}
    return "".join(json.dumps(record) + "\n" for record in records)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        elche = [sys.executable, "-m", "elche"]
        run = [*elche, "run", "--quiet", "--events", str(folder), *RUN]
        if len(sys.argv) < 2:
            subprocess.run(run, check=True, cwd=ROOT)
        source = Path(*sys.argv[1:2] or [folder], "events.jsonl")
        folder.mkdir(exist_ok=True)
        (folder / "events.jsonl").write_text(anonymous(source.read_text()))
        with Popen([*elche, "page", str(folder)], stdout=PIPE, text=True) as page:
            try:
                browser = Browser(driver := chromium_at(Path(name, "profile")))
                browser.resize(*SIZE)
                browser.open(page.stdout.readline().strip())
                until(lambda: browser.column("rows", "samples"), poll_s=0.2)
                driver.save_screenshot(str(ROOT / "docs" / "pictures" / "page.png"))
                driver.quit()
            finally:
                page.terminate()


if __name__ == "__main__":
    main()
