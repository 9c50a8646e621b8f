"""Measures the figures that README.md and docs/benchmarks.md show; prints their age.

    python -m benchmarks.figures --list               measures nothing
    python -m benchmarks.figures --only memory,ddp    `make figures` measures all

A figure is *old* if the code that it measures was committed after its date. Results go
to docs/figures.json: date, commit, load, control, bound and output. A run that fails,
or whose control was disturbed, is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elche.cli.files import tomllib

DOCS = "README.md", "docs/benchmarks.md"
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
DISTURBED = re.compile(r"REJECTED.*|.*busy machine.*")
TRAINS = "cadence", "comm", "coordination", "runtime"


@dataclass(frozen=True)
class Figure:
    """A row of figures.toml, which describes it."""

    command: str
    shown: str = ""
    folders: tuple[str, ...] = TRAINS
    control: str = "^control.*"
    bound: str = ""

    def date(self) -> str:
        """First date in the paragraph that shows it, or the next; "" if none."""
        text = "\n".join(Path(document).read_text() for document in DOCS)
        paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
        for at, paragraph in enumerate(paragraphs):
            if (self.shown or self.command) in paragraph:
                found = DATE.search(" ".join(paragraphs[at : at + 2]))
                return found[0] if found else ""
        return ""

    def measured(self) -> dict[str, Any]:
        """Runs its command.

        Raises:
            RuntimeError: it failed, or its control was disturbed.
        """
        load, environment = os.getloadavg()[0], {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *shlex.split(self.command)]
        done = subprocess.run(
            command, env=environment, text=True, check=False, stdout=subprocess.PIPE
        )
        if found := DISTURBED.search(done.stdout):
            raise RuntimeError(f"its control was disturbed: {found[0]}")
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode} of {shlex.join(command)}")
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": git("describe", "--always", "--dirty"),
            "command": self.command,
            "load_before": round(load, 1),
            "control": re.findall(self.control, done.stdout, re.MULTILINE),
            "bound": self.bound,
            "output": done.stdout.splitlines(),
        }


def git(*words: str) -> str:
    """Output of a git command in this repository."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def figures() -> dict[str, Figure]:
    """All, by name."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {name: Figure(**row) for name, row in table.items()}


def age(figure: Figure, record: dict[str, Any]) -> str:
    """Newest date of a figure, and that of its code."""
    folders = [f"src/elche/{folder}" for folder in figure.folders]
    code = git("log", "-1", "--format=%cs %h", "--", *folders)
    shown, measured = figure.date(), record.get("date", "")
    is_old = max(shown, measured) < code[:10]
    if record and measured >= shown:
        since = f"{record['commit'].removesuffix('-dirty')}.."
        is_old = bool(git("log", "-1", "--format=%h", since, "--", *folders))
    return f"{max(shown, measured)}  {'old' if is_old else 'new'}  code of {code}"


def main() -> int:
    """Measures, prints results and ages; the exit code is 1 if one was refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--json", type=Path, default=Path("docs/figures.json"))
    asked, known = parser.parse_args(), figures()
    names = asked.only.split(",") if asked.only else list(known)
    if unknown := set(names) - set(known):
        parser.error(f"no figures {sorted(unknown)}; expected some of {list(known)}")
    records = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    refused = False
    for name in [] if asked.list else names:
        try:
            record = records[name] = known[name].measured()
        except RuntimeError as error:
            refused = True
            print(f"{name} refused: {error}", flush=True)
            continue
        lines = [*record["output"], f"bound: {record['bound']}", record["commit"]]
        print("\n".join([f"## {name}", *lines]), flush=True)
        asked.json.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    for name in names:
        print(f"{name:11} {age(known[name], records.get(name, {}))}")
    return int(refused)


if __name__ == "__main__":
    sys.exit(main())
