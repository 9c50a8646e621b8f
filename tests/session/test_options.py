"""Keywords of `elche.setup` and `elche.Trainer`, as editors and type checkers see them.

One run of mypy over scripts that a user may write.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from mypy import api

from elche.config import RunConfig
from elche.session.options import RunOptions, SetupOptions
from elche.trainer.trainer_config import TrainerConfig, TrainerOptions

ROOT = Path(__file__).parents[2]
GIVEN = """
import elche, torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(4, 1))
loader = DataLoader(data, batch_size=2)
"""
RIGHT = """
model, optimizer, loader = elche.setup(
    model,
    optimizer,
    loader,
    epochs=2,
    policy="cadence",
    speed_hints=(1, 0.5),
    windows=elche.WindowConfig(anchor=2),
    transport={"kind": "gloo"},
)
for batch in loader.steps(len(loader)):
    model(batch[0])
config = elche.RunConfig(policy="auto")
trainer = elche.Trainer(
    lambda: torch.nn.Linear(1, 1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    torch.nn.MSELoss(),
    dataset=data,
    batch_size=2,
    epochs=1,
    policy="async",
)
def main() -> int:
    return 1
total: int = elche.launch(main, 2)
"""
WRONG = {
    'elche.setup(model, optimizer, loader, policy="cadance")': "incompatible type",
    "elche.setup(model, optimizer, loader, polcy=1)": "Unexpected keyword",
    'elche.RunConfig(policy="cadance")': "incompatible type",
    'elche.RunConfig(codec="int2")': "incompatible type",
    'elche.WindowConfig(update="grads")': "incompatible type",
    "number: int = elche.setup(model, optimizer, loader)[2]": "Incompatible types",
    "elche.Trainer(lambda: model, lambda p: optimizer, print, epochs=1)": "Missing",
    "text: str = elche.launch(lambda: 1)": "[Ii]ncompatible",
}


def names(kind: type) -> set[str]:
    return {item.name for item in fields(kind)}


def test_settings_are_listed_as_they_are() -> None:
    assert set(SetupOptions.__annotations__) == names(RunConfig)
    both = names(RunConfig) | names(TrainerConfig) - {"run"} | {"config"}
    assert set(TrainerOptions.__annotations__) == both


def test_settings_take_what_their_fields_hold() -> None:
    given, held = get_type_hints(RunOptions), get_type_hints(RunConfig)
    assert given["speed_hints"] != held["speed_hints"]  # any sequence becomes a tuple
    groups = {"windows", "transport", "debug"}
    assert {name: held[name] for name in groups} == {
        name: get_args(given[name])[0] for name in groups
    }
    for name in given.keys() - groups - {"speed_hints"}:
        assert given[name] == held[name], name


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What mypy says of the scripts, by line; the right one stands first."""
    script = tmp_path_factory.mktemp("typed") / "script.py"
    script.write_text("\n".join([GIVEN + RIGHT, *WRONG]))
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--no-pretty"]
    output, errors, _ = api.run(
        [*config, "--cache-dir", str(ROOT / ".mypy_cache"), str(script)]
    )
    assert not errors
    found: dict[int, str] = defaultdict(str)
    for line, text in re.findall(r"script\.py:(\d+): error: (.*)$", output, re.M):
        found[int(line)] += text
    return found


def test_right_settings_are_not_complained_about(complaints: dict[int, str]) -> None:
    right = len((GIVEN + RIGHT).splitlines())
    assert {line: text for line, text in complaints.items() if line <= right} == {}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_setting_is_seen(complaints: dict[int, str], text: str) -> None:
    line = len((GIVEN + RIGHT).splitlines()) + 2 + list(WRONG).index(text)
    assert re.search(WRONG[text], complaints.get(line, "")), complaints
