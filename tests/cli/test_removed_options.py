"""Options and commands of runs over several machines: refused, with the replacement."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from elche.cli.main import main


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("run --nnodes 2 --node-rank 0 script.py", "elche run --nnodes"),
        ("run --nproc 2 --nnodes=2 script.py", "elche run --nnodes"),
        ("run --hosts a:1,b:2 script.py", "elche run --hosts"),
        ("run --listen script.py", "elche run --listen"),
        ("run --witness a:1 script.py", "elche run --witness"),
        ("run --key-file key script.py", "elche run --key-file"),
        ("join 10.0.0.1:29400 --key-file key script.py", "elche join"),
        ("witness --listen a:1 --key-file key", "elche witness"),
    ],
)
def test_what_was_removed_names_its_replacement(words: str, what: str) -> None:
    ended = CliRunner().invoke(main, words.split())
    said = " ".join(ended.output.split())
    assert ended.exit_code == 2
    assert f"`{what}` was removed: `elche run` starts the ranks of one machine" in said
    assert "torchrun --nnodes 2 --node-rank 0" in said
    assert "srun --ntasks 5 python script.py" in said


def test_what_follows_the_script_is_its_own() -> None:
    ended = CliRunner().invoke(main, ["run", "no such script.py", "--nnodes", "2"])
    assert "'no such script.py' does not exist" in ended.output


def test_benchmarks_are_in_the_repository() -> None:
    ended = CliRunner().invoke(main, ["bench", "hetero", "--speeds", "1,0.25"])
    assert ended.exit_code == 2
    assert "run `python -m benchmarks.hetero` (links" in " ".join(ended.output.split())


@pytest.mark.parametrize("words", [["run", "--unknown"], ["unknown"]])
def test_what_was_never_there_is_refused_as_ever(words: list[str]) -> None:
    assert "No such" in CliRunner().invoke(main, words).output
