"""The user documents: their examples run, their commands and options exist.

Python blocks follow `tests/docs_given.py`. Those that belong together stand under the
same comment ``<!-- example: NAME -->`` and run as one script, in their order.
"""

from __future__ import annotations

import builtins
import re
import shlex
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

import elche
from elche import config, config_parts
from elche.cli.main import REMOVED, main

ROOT = Path(__file__).parent.parent
GIVEN = (ROOT / "tests" / "docs_given.py").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- example: (?P<name>[\w-]+) -->\n\n?)?"
    r"^```(?P<language>.*)\n(?P<text>(?:.*\n)*?)^```$",
    re.M,
)


WITH_LIBRARIES = ("frameworks", "hosts")
"""Pages whose examples are run in tests/integrations and tests/ray."""


class Block(NamedTuple):
    """A fenced block, and the example that it belongs to."""

    language: str
    text: str
    example: str


def blocks(path: Path, language: str = "") -> list[Block]:
    """The blocks of a page, of one language if it is said."""
    found = [
        Block(match["language"], match["text"], match["name"] or f"block{number}")
        for number, match in enumerate(BLOCK.finditer(path.read_text()), 1)
    ]
    return [each for each in found if language in ("", each.language)]


def examples() -> dict[str, str]:
    """Scripts by page and name."""
    scripts: dict[str, str] = {}
    for path in PAGES:
        if path.stem in WITH_LIBRARIES:
            continue
        for block in blocks(path, "python"):
            key = f"{path.stem}-{block.example}"
            scripts[key] = scripts.get(key, "") + block.text
    return scripts


EXAMPLES = examples()
COMMANDS = [
    pytest.param(line, id=f"{path.stem}: {line.split('#')[0].strip()}")
    for path in PAGES
    for block in blocks(path, "sh")
    for line in block.text.splitlines()
]
NAMED = [
    pytest.param(text, id=f"{path.stem}: {text}")
    for path in PAGES
    for text in re.findall(r"`(elche [a-z][^`]*)`", path.read_text())
]


def given_and(script: str) -> str:
    """A whole script; it is the page's own to import elche, or here."""
    return f"{GIVEN}\n\nimport elche\n\n{script}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_one_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(given_and(EXAMPLES[name]), name, "exec"), names)
    finally:
        if pipe := names.get("pipe"):
            pipe.close()
        elche.shutdown()


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line's own parser, in a folder where every named file is there."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
    elif words[0] == "elche":
        monkeypatch.chdir(ROOT)
        understood(words[1:])
    else:
        assert words[0] in ("pip", "python", "ray", "torchrun", "srun", "mpirun"), line
        for word in words:
            if word.startswith("examples/"):
                assert (ROOT / word).exists()


def understood(words: list[str]) -> None:
    """Parses a command of `elche` without running it."""
    command: click.Command = main
    context = None
    while isinstance(command, click.Group):
        context = command.make_context("elche", list(words), parent=context)
        _, found, words = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert found is not None
        command = found
    if "--help" not in words:
        words = ["README.md" if word == "script.py" else word for word in words]
        command.make_context("elche", list(words), parent=context)


@pytest.mark.parametrize("text", NAMED)
def test_a_command_in_the_text_has_its_options(text: str) -> None:
    command: click.Command = main
    words = shlex.split(text)[1:]
    if words[0] in REMOVED:
        return
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert command is not main, text
    known = {name for option in command.params for name in option.opts}
    script = next((i for i, word in enumerate(words) if ".py" in word), len(words))
    asked = {word.partition("=")[0] for word in words[:script] if word[:2] == "--"}
    assert asked <= known | {"--help"}


@pytest.mark.parametrize(
    "kind",
    [
        config.RunConfig,
        config_parts.WindowConfig,
        config_parts.TransportConfig,
        config_parts.DebugConfig,
        config_parts.OuterConfig,
    ],
)
def test_every_setting_is_on_its_page(kind: type) -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    named = set(re.findall(r"`(\w+)`", text))
    assert {field.name for field in fields(kind)} <= named


def test_every_error_is_on_its_page_and_no_other() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    named = {name for name in re.findall(r"`(\w+)`", text) if name.endswith("Error")}
    known = {name for name in vars(elche.errors) if name.endswith("Error")}
    assert {name for name in named if not hasattr(builtins, name)} == known


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: elche\.([\w.]+)$", text, re.M)
    inner = [
        f"{home}.{name}" for home, names in elche.MODULES.items() for name in names
    ]
    assert sorted(shown) == sorted([*elche.__all__, *inner])
    assert all(attrgetter(name)(elche) for name in inner)


def test_every_command_is_on_its_page() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    shown = [name for name, command in main.commands.items() if not command.hidden]
    assert [name for name in shown if f"\nelche {name} " not in text] == []


def test_every_option_of_a_run_is_on_the_page_of_settings() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    options = {name for option in main.commands["run"].params for name in option.opts}
    assert {name for name in options if f"`{name}`" not in text} == {
        "script",
        "arguments",
    }


def test_every_variable_is_on_the_page_of_settings() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    sources = (ROOT / "src" / "elche").rglob("*.py")
    read = {
        name
        for path in sources
        for name in re.findall(r'"(ELCHE_[A-Z_]+)"', path.read_text())
    }
    assert {name for name in read if f"`{name}`" not in text} == set()


def test_links_of_the_readme_are_in_the_source_distribution() -> None:
    text = (ROOT / "README.md").read_text()
    manifest = (ROOT / "MANIFEST.in").read_text()
    links = set(re.findall(r"\]\(([^)#]+)", text))
    assert len(links) > 20
    assert {link for link in links if not (ROOT / link).is_file()} == set()
    packed = r"docs/\w+\.md|docs/pictures/\w+\.(svg|png)"
    assert {link for link in links if not re.fullmatch(packed, link)} == set()
    assert "recursive-include docs *.md *.png *.svg\n" in manifest
    assert "prune tests\n" in manifest


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {page for page in pages if f"{page}\n" not in navigation} == set()
