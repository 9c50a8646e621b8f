"""Files for clusters: their syntax, and the options that they give to torchrun."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

FOLDER = Path(__file__).parent.parent / "examples" / "clusters"
FILES = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.yaml")])


def scripts_in(value: Any) -> list[str]:
    """Texts of a document that start ranks."""
    if isinstance(value, str):
        return [value] if "torchrun" in value else []
    values = value.values() if isinstance(value, dict) else value
    found = values if isinstance(value, dict | list) else ()
    return [script for each in found for script in scripts_in(each)]


def options_in(text: str) -> set[str]:
    """Those of torchrun in a shell's script, before what it runs."""
    command = re.split(r'script\.py|"\$@"', text.partition("torchrun")[2])[0]
    return set(re.findall(r"(?<=\s)--[a-z-]+", command))


def check_shell(text: str) -> None:
    ended = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_well_formed_and_its_options_exist(path: Path) -> None:
    text = path.read_text()
    scripts = [text]
    if path.suffix == ".yaml":
        yaml = pytest.importorskip("yaml")
        scripts = scripts_in(list(yaml.safe_load_all(text)))
    assert len(scripts) == 1
    check_shell(scripts[0])
    given = options_in(scripts[0])
    known = {
        name for each in get_args_parser()._actions for name in each.option_strings
    }
    assert {"--nnodes", "--node-rank", "--master-addr", "--master-port"} <= given
    assert given <= known
    assert "ELCHE_LISTEN" in text


def test_there_is_one_for_each_cluster() -> None:
    assert [path.stem for path in FILES] == ["kubernetes", "skypilot", "slurm"]
