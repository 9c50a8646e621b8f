"""The file of recorded outcomes, one line per story."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tests.sim.golden.playing import Outcome

PATH = Path(__file__).with_name("golden.json")


def read() -> dict[str, Outcome]:
    """Outcomes by the names of their stories."""
    table = json.loads(PATH.read_text()) if PATH.exists() else {}
    return {
        name: Outcome(**(values | {"epochs": tuple(values["epochs"])}))
        for name, values in table.items()
    }


def write(outcomes: Mapping[str, Outcome]) -> None:
    """Replaces the file."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(asdict(each))}"
        for name, each in outcomes.items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
