"""A data set kept on the device gives what the loader gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from elche.errors import ConfigError
from elche.runtime.data.resident_data import ResidentDataset

CPU = torch.device("cpu")


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(20, 3, 4, 4, generator=generator)
    return TensorDataset(
        images.contiguous(memory_format=torch.channels_last),
        torch.randint(0, 9, (20,), generator=generator),
        torch.randn(20, 6, generator=generator).t()[:, ::1].t(),
    )


def test_batches_are_the_loaders() -> None:
    loader = DataLoader(_dataset(), batch_size=7, shuffle=True)
    resident = ResidentDataset.of(loader)
    assert resident is not None
    assert resident.total_bytes == 20 * (3 * 4 * 4 * 4 + 8 + 6 * 4)
    assert resident.place(CPU)
    assert resident.is_placed
    assert loader.batch_sampler is not None
    torch.manual_seed(5)
    loaded = list(loader)
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # a loader's own seed
    batches = list(loader.batch_sampler)
    assert len(loaded) == len(batches) == 3
    for keys, expected in zip(batches, loaded, strict=True):
        got = resident.batch(keys)
        assert type(got) is type(expected)
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype
            assert ours.stride() == theirs.stride()
    assert torch.equal(resident.batch([-1])[0][0], loader.dataset[-1][0])


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Many(TensorDataset):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class OnlyTensors(Dataset[Any]):
    """Has ``.tensors``, but what a sample is only its ``__getitem__`` knows."""

    def __init__(self) -> None:
        self.tensors = (torch.ones(4),)

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index] + torch.rand(())

    def __len__(self) -> int:
        return 4


def _init(worker: int) -> None:
    """Could change the data set in a worker."""


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Doubled(torch.ones(4))),
        DataLoader(Many(torch.ones(4))),
        DataLoader(OnlyTensors()),
        DataLoader(Subset(TensorDataset(torch.ones(4)), [0])),
        DataLoader(TensorDataset(torch.ones(4)), collate_fn=lambda items: items),
        DataLoader(TensorDataset(torch.ones(4)), batch_size=None),
        DataLoader(TensorDataset(torch.ones(4)), worker_init_fn=_init),
        DataLoader(TensorDataset(torch.ones(4, requires_grad=True))),
        DataLoader(TensorDataset(torch.eye(4).to_sparse())),
    ],
    ids=lambda loader: type(loader.dataset).__name__,
)
def test_anything_else_is_loaded(loader: DataLoader[Any]) -> None:
    assert ResidentDataset.of(loader) is None


def test_a_plain_loader_is_accepted() -> None:
    """The counterpart of the refusals: only what each of them changes is refused."""
    data = TensorDataset(torch.ones(4))
    assert ResidentDataset.of(DataLoader(data)) is not None
    assert ResidentDataset.of(DataLoader(data, collate_fn=default_collate)) is not None


def test_a_changed_data_set_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.zeros(4, 2), torch.arange(4))
    resident = ResidentDataset.of(DataLoader(data))
    assert resident is not None
    placed: list[torch.device] = []
    place = resident.place

    def counting(device: torch.device) -> bool:
        placed.append(device)
        return place(device)

    monkeypatch.setattr(resident, "place", counting)
    resident.place(CPU)
    assert resident.batch([1])[0].tolist() == [[0.0, 0.0]]
    assert len(placed) == 1
    data.tensors[0][1] = 5.0
    assert resident.batch([1])[0].tolist() == [[5.0, 5.0]]
    assert len(placed) == 2
    data.tensors = (torch.full((4, 2), 7.0), torch.arange(4))
    assert resident.batch([1])[0].tolist() == [[7.0, 7.0]]
    resident.batch([0, 3])
    assert len(placed) == 3


def test_no_room_leaves_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = ResidentDataset.of(DataLoader(TensorDataset(torch.ones(4))))
    assert resident is not None

    def full(*args: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("no room")

    assert resident.place(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        assert not resident.place(torch.device("cuda"))
    assert not resident.is_placed
    with pytest.raises(ConfigError, match=r"not on a device; call place\(\) first"):
        resident.batch([0])


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ([0, 4], IndexError, "key 4 is out of range for a data set of 4 samples"),
        ([-5, 0], IndexError, "key -5 is out of range"),
        (["a"], ConfigError, r"expected integers as keys, got \['a'\]"),
        ([], ConfigError, r"expected integers as keys, got \[\]"),
    ],
)
def test_bad_keys(keys: Any, error: type[Exception], message: str) -> None:
    resident = ResidentDataset.of(DataLoader(TensorDataset(torch.ones(4))))
    assert resident is not None
    resident.place(CPU)
    with pytest.raises(error, match=message):
        resident.batch(keys)
