"""Weights in safetensors files: which are found, read, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elche.checkpoint.files import write_tensors
from elche.checkpoint.weight_files import WeightFiles
from elche.errors import CheckpointError

ONES, TWOS = torch.ones(3), torch.full((2, 2), 2.0)


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ONES})
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {"b": TWOS})
    write_tensors(tmp_path / "optimizer.safetensors", {"c": TWOS})
    found = WeightFiles.found_at(tmp_path)
    assert sorted(found) == ["a", "b"]
    assert torch.equal(found["b"], TWOS)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert torch.equal(found["a"], ONES), "a file is opened for its own tensors only"
    alone = WeightFiles.found_at(tmp_path / "optimizer.safetensors")
    assert list(alone) == ["c"]


def test_files_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"expected model.*got \['pytorch_model"):
        WeightFiles.found_at(tmp_path)
    with pytest.raises(CheckpointError, match=r"absent cannot be read: "):
        WeightFiles.found_at(tmp_path / "absent")
    write_tensors(tmp_path / "model.safetensors", {"a": ONES})
    write_tensors(tmp_path / "model-1.safetensors", {"a": ONES})
    with pytest.raises(CheckpointError, match=r"a is in .*model.* and in mod.*; give"):
        WeightFiles.found_at(tmp_path)


def test_ranks_that_have_saved_a_tensor_of_both(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model-rank0.safetensors", {"tied": ONES, "a": TWOS})
    write_tensors(tmp_path / "model-rank1.safetensors", {"tied": ONES})
    assert sorted(WeightFiles.found_at(tmp_path)) == ["a", "tied"]
