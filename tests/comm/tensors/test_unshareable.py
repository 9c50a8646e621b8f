"""Models and tensors that no rank can hand to another, refused at set-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn

from elche.comm.tensors.unshareable import unshareable_module, why_unshareable


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's default group, without which there is no DTensor."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_a_distributed_tensor_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    made = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    for tensor in (made, nn.Parameter(made)):
        assert why_unshareable(tensor) == "is a DTensor, which is already distributed"


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_models_that_torch_shards_or_reduces_are_refused() -> None:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    assert unshareable_module(plain()) == ""
    cpu = torch.device("cpu")
    flat = fsdp.FullyShardedDataParallel(plain(), device_id=cpu)
    assert unshareable_module(flat).startswith("the model is sharded by FSDP")
    inner = plain()
    fsdp.fully_shard(inner.get_submodule("1"), mesh=init_device_mesh("cpu", (1,)))
    assert unshareable_module(inner).startswith("1 is sharded by FSDP")
    wrapped = nn.parallel.DistributedDataParallel(plain())
    assert "the model is reduced by torch's D" in unshareable_module(wrapped)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parameters_stepped_inside_backward_are_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    weight = nn.Parameter(torch.ones(2))
    assert why_unshareable(weight) == ""
    _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1})
    assert why_unshareable(weight).startswith("is stepped inside the backward pass")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "is torch.sparse_coo; expected a dense"),
        (lambda: torch.empty(3, device="meta"), "is on the meta device"),
        (lambda: torch.zeros(1).expand(3), "has elements that share memory"),
        (lambda: nn.UninitializedParameter(), "is lazy and has no shape yet"),
    ],
    ids=["sparse", "meta", "expanded", "lazy"],
)
def test_what_is_wrong_is_said(make: Callable[[], torch.Tensor], says: str) -> None:
    assert why_unshareable(make()).startswith(says)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()),
        torch.ones(0, 3),
        torch.ones(4, 6)[:, ::2],
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bool),
    ],
    ids=["scalar", "empty", "strided", "channels-last", "bf16", "complex", "bool"],
)
def test_odd_tensors_are_shared(tensor: torch.Tensor) -> None:
    assert why_unshareable(tensor) == ""
