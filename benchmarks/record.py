"""What a benchmark leaves behind: its figures, and the command that made them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch


def write_record(path: Path | None, figures: dict[str, Any]) -> None:
    """Writes the figures as JSON, where a file was asked for."""
    if path is None:
        return
    record = {
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "figures": figures,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
