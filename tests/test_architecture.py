"""ARCHITECTURE.md has every room, names only what is there, and stays short."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "elche"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
MOST_LINES = 200
MOST_FILES = 15


def test_every_room_stands_in_the_table() -> None:
    rooms = {
        f"{path.parent.relative_to(SOURCES)}/"
        for path in SOURCES.rglob("__init__.py")
        if path.parent != SOURCES
    }
    listed = re.findall(r"^\| `([\w/]+/)` \|", TEXT, re.M)
    assert sorted({*listed} - {"src/elche/"}) == sorted(rooms)


def test_every_file_that_is_named_is_there() -> None:
    """From the root, from the package, or after the room that was named before it."""
    files = {str(path.relative_to(ROOT)) for path in SOURCES.rglob("*.py")}
    files |= {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", TEXT))
    gone = [
        name for name in named if not any(f"/{f}".endswith(f"/{name}") for f in files)
    ]
    assert not gone


def test_rooms_stay_rooms() -> None:
    assert len(TEXT.splitlines()) <= MOST_LINES
    for folder in {path.parent for path in SOURCES.rglob("*.py")}:
        files = [each for each in folder.glob("*.py") if each.name != "__init__.py"]
        assert len(files) <= MOST_FILES, (
            f"{folder.relative_to(ROOT)} has {len(files)} files"
        )
