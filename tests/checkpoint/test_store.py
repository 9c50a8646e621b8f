"""Whatever happens while it is written: the newest complete checkpoint is intact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from elche.checkpoint import files
from elche.checkpoint import manifest as manifests
from elche.checkpoint.capture import Captured
from elche.checkpoint.contents import bare_state
from elche.checkpoint.manifest import MANIFEST, MODEL_FILE
from elche.checkpoint.store import CheckpointStore
from elche.checkpoint.writer import CheckpointWriter
from elche.errors import CheckpointError
from tests.checkpoint.failing_disk import DyingOs, FullOs, QuickOs

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[QuickOs], None]:
    """One that is not waited for; called with another one it takes its place."""
    monkeypatch.setattr(files, "os", QuickOs())
    return lambda other: monkeypatch.setattr(files, "os", other)


def begin(writer: CheckpointWriter, name: str, own: Any, **held: Any) -> None:
    info = held.pop("info", {})
    captured = Captured.of(own, held.pop("shared", {}), held.pop("model", {}), **held)
    writer.begin(name, captured, info)


def outcome_of(writer: CheckpointWriter) -> str | None:
    """Closes it; why the last one could not be written, if so."""
    writer.close(WAIT_S)
    try:
        writer.wait(0.0)
    except CheckpointError as error:
        return str(error)
    return None


def save(
    folder: Path,
    content: float,
    ranks: int = 1,
    *,
    run_id: str = "run",
    size: int = 4,
    deadline_s: float = WAIT_S,
) -> list[str | None]:
    """Writes a checkpoint of so many ranks; why each could not, if so."""
    store = CheckpointStore(folder)
    writers = [
        CheckpointWriter(store, rank, ranks, run_id, deadline_s)
        for rank in range(ranks)
    ]
    name = store.next_name()
    model = {"weight": torch.full((size,), content)}
    shared = {"model": model, "steps": content, "moments": torch.ones(3) * content}
    for rank in reversed(range(ranks)):
        rest: dict[str, Any] = {}
        if rank == 0:
            rest = {"shared": shared, "model": model, "info": {"steps": content}}
        begin(writers[rank], name, [rank, content, torch.zeros(2)], **rest)
    return [outcome_of(writer) for writer in writers]


def content_of(folder: Path, num_ranks: int = 1) -> float:
    """That of the newest checkpoint, after comparing all its parts."""
    newest = CheckpointStore(folder).newest()
    if newest is None:
        return 0.0
    assert newest.manifest.world_size == num_ranks
    content = float(newest.manifest.info["steps"])
    shared = newest.shared()
    assert shared["steps"] == content
    for tensor in (shared["model"]["weight"], shared["moments"]):
        assert (tensor == content).all()
    model = load_file(newest.path / "model.safetensors")
    assert (model["weight"] == content).all()
    for rank in range(num_ranks):
        assert newest.of_rank(rank)[:2] == [rank, content]
    return content


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for content in range(1, 6):
        assert save(tmp_path, content) == [None]
        assert content_of(tmp_path) == content
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-00000004", "checkpoint-00000005"]
    assert CheckpointStore(tmp_path).next_name() == "checkpoint-00000006"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_death_after_any_operation(
    tmp_path: Path, num_ranks: int, disk: Callable[[QuickOs], None]
) -> None:
    """A process that dies anywhere, in its first checkpoint too; then a healthy one."""
    operations, held = 0, []
    while True:
        folder = tmp_path / str(operations)
        before = operations % 5 != 0
        for content in (1.0, 2.0) if before else ():
            save(folder, content, num_ranks)
        disk(dying := DyingOs(operations))
        save(folder, 3.0, num_ranks, run_id="dies", deadline_s=0.2)
        disk(QuickOs())
        held.append(content_of(folder, num_ranks))
        assert held[-1] in (2.0 * before, 3.0)
        save(folder, 4.0, num_ranks, run_id="again")
        assert content_of(folder, num_ranks) == 4.0
        complete = [path.parent for path in folder.glob(f"*/{MANIFEST}")]
        assert len(complete) == 1 + (before or held[-1] == 3.0)
        assert not list(folder.rglob("*.partial"))
        if not dying.is_dead and held[-1] == 3.0 and before:  # nor was a rank late
            break
        operations += 1
        assert operations < 100
    assert operations > 25


def test_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, disk: Callable[[QuickOs], None]
) -> None:
    """With any room that is too little nothing is torn; with more it goes on."""
    save(tmp_path, 1.0)
    needed = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    failures = 0
    for room in range(0, needed + 300, 97):
        caplog.clear()
        before = content_of(tmp_path)
        disk(FullOs(room))
        [failure] = save(tmp_path, before + 1)
        if failure is None:
            assert content_of(tmp_path) == before + 1
            continue
        failures += 1
        assert "No space left on device" in failure
        assert "training continues without it" in caplog.text
        assert content_of(tmp_path) == before
        assert len(list(tmp_path.iterdir())) <= 2  # the torn one has made room
    assert failures > 5
    assert content_of(tmp_path) > 1.0


def test_full_disk_of_another_rank(
    tmp_path: Path, disk: Callable[[QuickOs], None]
) -> None:
    """Rank 0 hears of it, and does not wait for its deadline."""
    save(tmp_path, 1.0, 2)
    store = CheckpointStore(tmp_path)
    first, other = (CheckpointWriter(store, r, 2, "run", WAIT_S) for r in (0, 1))
    name = store.next_name()
    disk(FullOs(50))
    begin(other, name, [1, 2.0, torch.zeros(2)])
    with pytest.raises(CheckpointError, match="No space left on device"):
        other.wait(WAIT_S)
    disk(QuickOs())
    begin(first, name, [0, 2.0])
    with pytest.raises(CheckpointError, match="rank 1 could not write its part"):
        first.wait(WAIT_S)
    assert content_of(tmp_path, num_ranks=2) == 1.0
    for writer in (other, first):  # the next one is written by both
        begin(writer, "checkpoint-00000003", [writer.rank, 3.0, torch.zeros(2)])
    assert [outcome_of(writer) for writer in (other, first)] == [None, None]


def test_a_rank_that_never_writes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    writer = CheckpointWriter(store, 0, 2, "run", deadline_s=0.1)
    begin(writer, store.next_name(), 1)
    with pytest.raises(CheckpointError, match=r"rank 1's part did not arrive with"):
        writer.wait(WAIT_S)
    writer.close(WAIT_S)


def test_part_of_an_earlier_start_does_not_count(tmp_path: Path) -> None:
    store, name = CheckpointStore(tmp_path), "checkpoint-00000001"
    dead, alive = (CheckpointWriter(store, 1, 2, i, WAIT_S) for i in ("dead", "alive"))
    begin(dead, name, "dead")
    dead.close(WAIT_S)
    first = CheckpointWriter(store, 0, 2, "alive", WAIT_S)
    begin(first, name, "first")
    assert first.is_busy
    layers = {"w": torch.ones(2)}
    begin(alive, name, "alive", model=layers, model_file="model-rank1.safetensors")
    alive.close(WAIT_S)
    first.close(WAIT_S)
    newest = store.newest()
    assert newest is not None
    assert newest.of_rank(1) == "alive"
    assert newest.model_parts()["w"].sum() == 2.0


def test_a_flipped_byte_in_any_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for content in (1.0, 2.0):
        save(tmp_path, content, 2)
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    written = sorted(newest.path.iterdir())
    assert len(written) == 8
    for file in written:
        whole = file.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 3)):
            torn = bytearray(whole)
            torn[place] ^= 0x10
            file.write_bytes(torn)
            caplog.clear()
            assert content_of(tmp_path, num_ranks=2) == 1.0
            assert f"skipped: {file.name}" in caplog.text
        for cut in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:cut])
            assert content_of(tmp_path, num_ranks=2) == 1.0
        file.unlink()
        assert content_of(tmp_path, num_ranks=2) == 1.0
        file.write_bytes(whole)
    assert content_of(tmp_path, num_ranks=2) == 2.0


def test_a_damaged_one_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    for content in (1.0, 2.0):
        save(tmp_path, content)
    (tmp_path / "checkpoint-00000002" / "rank0.json").write_text("{}")
    store = CheckpointStore(tmp_path)
    assert store.newest() is not None
    writer = CheckpointWriter(store, 0, 1, "run", WAIT_S)
    begin(writer, store.next_name(), 1)
    writer.close(WAIT_S)
    assert (tmp_path / "checkpoint-00000001" / MANIFEST).exists()


def test_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1.0)
    monkeypatch.setattr(manifests, "FORMAT", 7)
    with pytest.raises(
        CheckpointError,
        match=r"expected a checkpoint of format 7.* got format 2 by elche \d.*resume "
        "with that version",
    ):
        CheckpointStore(tmp_path).newest()


def test_another_folder_than_one_of_checkpoints(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").newest() is None
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path, 1.0)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(
        CheckpointError, match=r"00000009: manifest.json cannot be read"
    ):
        CheckpointStore(tmp_path).open("checkpoint-00000009")


def test_unwritable_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    [failure] = save(tmp_path / "file" / "below", 1.0)
    assert "Not a directory" in str(failure)
    assert "training continues" in caplog.text


@pytest.mark.parametrize("model_file", [MODEL_FILE, "model-rank0.safetensors"])
def test_a_tensor_of_the_models_is_stored_once_in_a_whole_model(
    model_file: str,
) -> None:
    """Of a model in parts no rank reads those of others for it."""
    weight = torch.ones(2)
    held = Captured.of({}, {"layer": weight}, {"w": weight.detach()}, model_file)
    assert bool(held.shared[1]) == (model_file != MODEL_FILE)
    weight.zero_()
    assert all(one.sum() == 2.0 for one in (*held.shared[1].values(), held.model["w"]))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.table.weight


def test_the_model_alone_loads_into_the_bare_model(tmp_path: Path) -> None:
    """Without what `torch.compile` puts before names, tied weights under each."""
    model = nn.Sequential(_Tied(), torch.compile(nn.Linear(4, 2), backend="eager"))
    whole: Any = torch.compile(model, backend="eager")
    store = CheckpointStore(tmp_path)
    writer = CheckpointWriter(store, 0, 1, "run", WAIT_S)
    shared = {"model": whole.state_dict()}
    begin(writer, store.next_name(), 0, shared=shared, model=bare_state(whole))
    writer.close(WAIT_S)
    newest = store.newest()
    assert newest is not None
    fresh = nn.Sequential(_Tied(), nn.Linear(4, 2))
    fresh.load_state_dict(load_file(newest.path / "model.safetensors"))
    plain = [*model[0].parameters(), *model[1].parameters()]
    for ours, theirs in zip(fresh.parameters(), plain, strict=True):
        assert torch.equal(ours, theirs)
    own = load_file(newest.path / "shared.safetensors")
    assert not own  # its tensors are the model's
    whole.load_state_dict(newest.shared()["model"])


@pytest.mark.parametrize(
    "change", [lambda body: body.pop("files"), lambda body: body.update(name="../../x")]
)
def test_a_manifest_with_a_right_checksum_and_wrong_fields_is_passed_over(
    change: Callable[[dict[str, Any]], object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once a raw KeyError, TypeError or AttributeError, or taken."""
    for content in (1.0, 2.0):
        save(tmp_path, content)
    path = tmp_path / "checkpoint-00000002" / MANIFEST
    body = json.loads(path.read_text())["manifest"]
    change(body)
    whole = {"manifest": body, "sha256": manifests._digest(body)}
    path.write_text(json.dumps(whole))
    assert content_of(tmp_path) == 1.0
    assert "checkpoint-00000002 is damaged: skipped: manifest.json" in caplog.text


@pytest.mark.parametrize("is_complete", [False, True])
def test_what_a_link_leads_to_and_files_of_others_stay(
    is_complete: bool, tmp_path: Path
) -> None:
    """Once rotation removed all files of the folder that a link led to."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(elsewhere, 1.0)
    target = elsewhere / "checkpoint-00000001"
    if not is_complete:
        (target / MANIFEST).unlink()
    names = sorted(path.name for path in target.iterdir())
    folder.mkdir()
    (link := folder / "checkpoint-00000001").symlink_to(target)
    save(folder, 2.0)
    (notes := folder / "checkpoint-00000002" / "notes.txt").write_text("mine")
    for content in (3.0, 4.0):
        save(folder, content)
    assert not link.is_symlink()
    assert sorted(path.name for path in target.iterdir()) == names
    assert [*notes.parent.iterdir()] == [notes]
    assert content_of(folder) == 4.0
