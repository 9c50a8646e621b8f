"""elche on a torch that has one of its private names no more.

Run as a script with names, it forks a process for each: the name is taken away while
elche is imported, and what relies on it is tried. One line of JSON per name: the
warnings, and the error of what was tried, "" where it was right.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class Without:
    """An owner of names, but for one."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self) -> Any:
        return Without(self._owner(), self._name)

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._owner, name)


@contextlib.contextmanager
def taken_away(name: str) -> Iterator[None]:
    """A name is gone: from its module, or where it is a type's, from what is looked up.

    Types in C cannot be changed.
    """
    where, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(where.removesuffix("()"))
    if isinstance(owner, ModuleType):
        value = getattr(owner, attribute)
        delattr(owner, attribute)
        try:
            yield
        finally:
            setattr(owner, attribute, value)
        return
    resolve = pkgutil.resolve_name

    def resolved(asked: str) -> Any:
        found = resolve(asked)
        return Without(owner, attribute) if found is owner else found

    with mock.patch.object(pkgutil, "resolve_name", resolved):
        yield


class Net(nn.Module):
    """Attention and a linear layer, as pipelines defer them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, _ = self.attention(x, x, x)
        out: torch.Tensor = self.out(x + seen)
        return out


def expect_equal(found: nn.Module, expected: nn.Module) -> None:
    """Gradients of two models are the same up to rounding."""
    for (name, one), other in zip(
        found.named_parameters(), expected.parameters(), strict=True
    ):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def split_backward() -> None:
    from elche.comm.transport.messages import Message
    from elche.pipeline.split_backward.backward import StageBackward
    from elche.pipeline.split_backward.guard import ContributionGuard
    from elche.pipeline.stage import Layer, Stage
    from elche.torch_internals.passes import CAN_SPLIT

    model, plain = Net(), Net()
    for each in (model, plain):  # a user's hook, which nobody may pass over
        each.out.weight.register_hook(lambda gradient: gradient * 2)
    stage = Stage(0, [Layer("", model)], unpacks=True)
    guard = ContributionGuard(0, dict(model.named_parameters()), "test")
    runner = StageBackward(stage, guard)
    batches = [torch.randn(4, 5, 8) for _ in range(2)]
    for _ in range(2):
        runner.begin_step()
        for number, x in enumerate(batches):
            message = Message((x,), ["t"], (True,))
            runner.keep(number, runner.forward(number, message, {}, is_split=True))
        for number, x in enumerate(batches):
            x = x.clone().requires_grad_()
            plain(x).sum().backward()
            (found,) = runner.backward_input(number, [torch.ones(4, 5, 3)])
            assert found is not None
            assert x.grad is not None
            torch.testing.assert_close(found, x.grad)
        for number in range(len(batches)):
            runner.backward_weight(number)
        runner.end_step()
        expect_equal(model, plain)
    assert (runner.deferred > 0) == CAN_SPLIT


def split_with(name: str) -> Callable[[], None]:
    """As :func:`split_backward`; what the rest is about is not split at all."""

    def check() -> None:
        from elche.torch_internals.lookup import INTERNALS
        from elche.torch_internals.passes import CAN_SPLIT

        assert name not in {i.name for i in INTERNALS if i.is_there}
        assert not CAN_SPLIT
        split_backward()

    return check


def windows() -> None:
    """A window of gradients, with nested, broken off and repeated backward passes."""
    window_of(is_sum=False)
    window_of(is_sum=True)


def window_of(*, is_sum: bool) -> None:
    from elche.comm.gradients.gradient_window import GradientWindow
    from elche.runtime.windows.gradient_sync import GradientSync
    from tests.comm.bus import Bus

    model, plain = Net(), Net()
    parameters = list(model.parameters())
    window = GradientWindow(parameters, Bus(1).group(0))
    window.build()
    none: Any = SimpleNamespace(
        take=lambda: None,
        begin=lambda plan: None,
        wait=lambda: None,
        apply=lambda: None,
    )
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad for p in parameters if p.grad is not None)
    )
    sync = GradientSync(parameters, optimizer, window, none, is_sum=is_sum)
    sync.attach()
    total = torch.zeros(())
    for number in range(3):
        x = torch.randn(4, 5, 8, requires_grad=True)
        sync.begin_batch(4.0)
        if number == 2:
            with contextlib.suppress(ZeroDivisionError):
                (model(x) + _Breaks.apply(x)[..., :3]).sum().backward()
            sync.rewind()
        made = checkpoint(model, x, use_reentrant=True) if number else model(x)
        made.mean().backward()
        sync.batch_done()
        total = total + plain(x).mean() * (1 if is_sum else 1 / 3)
    total.backward()
    sync.close(begins=False)
    sync.reduce(SimpleNamespace())  # type: ignore[arg-type]
    sync.detach()
    expected = [p.grad for p in plain.parameters() if p.grad is not None]
    assert len(seen) == len(expected)
    for found, right in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, right)


class _Breaks(torch.autograd.Function):
    """A backward pass breaks off here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ZeroDivisionError


def wrapper() -> None:
    """elche.DistributedDataParallel, with and without a batch."""
    from elche.ddp.group import DEFAULT_TIMEOUT_S
    from elche.ddp.wrapper import DistributedDataParallel
    from elche.torch_internals.lookup import INTERNALS

    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=77),
    )
    model, plain = Net(), Net()
    wrapped = DistributedDataParallel(model)

    def doubled(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 2

    for each in (model, plain):
        each.out.weight.register_post_accumulate_grad_hook(doubled)
    for _ in range(2):
        x = torch.randn(4, 5, 8)
        model.zero_grad()
        plain.zero_grad()
        wrapped(x).mean().backward()
        plain(x).mean().backward()
        expect_equal(model, plain)
    group: Any = wrapped._group
    is_told = all(i.is_there for i in INTERNALS if i.name == BACKEND)
    assert group.timeout_s == (77 if is_told else DEFAULT_TIMEOUT_S)
    dist.destroy_process_group()


def joined() -> None:
    from elche.ddp.wrapper import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = DistributedDataParallel(Net())
    try:
        reduction = wrapped.join_step()
        assert reduction is not None
        assert reduction.weights == (0.0,)
    finally:
        dist.destroy_process_group()


def norm() -> None:
    from elche.comm.norm.sync_batch_norm import (
        convert_sync_batchnorm,
        sync_batchnorm_layers,
    )
    from elche.runtime.rank_settings import min_share_samples

    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = copy.deepcopy(plain)
    assert min_share_samples(model) == 2
    model = convert_sync_batchnorm(model)
    assert len(sync_batchnorm_layers(model)) == 1
    assert min_share_samples(model) == 1
    x = torch.randn(8, 4, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).square().mean().backward()
    plain(x).square().mean().backward()
    expect_equal(model, plain)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name))


def buffers() -> None:
    from elche.comm.model_buffers.buffers import BufferWatch

    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].eval()
    model.register_buffer("large", torch.zeros(100_000))
    watch = BufferWatch(model)
    model.get_buffer("large").add_(1)
    model(torch.randn(4, 3))
    names = [name for name, _ in model.named_buffers()]
    written = {names[index] for index in watch.written()}
    assert {"large", "0.running_mean", "0.running_var"} <= written


def held() -> None:
    from elche.torch_internals.held import held_buffers, unsaved_buffers

    model = nn.BatchNorm1d(3)
    model.register_buffer("passing", torch.ones(3), persistent=False)
    assert unsaved_buffers(model) == {"passing"}
    assert held_buffers(model)["passing"] is model.get_buffer("passing")


def versions() -> None:
    from elche.comm.model_buffers.buffers import BufferWatch

    model = nn.Module()
    model.register_buffer("counted", torch.zeros(2))
    watch = BufferWatch(model)
    assert watch.written() == []
    model.get_buffer("counted").add_(1)
    assert watch.written() == [0]


def parameters() -> None:
    from elche.runtime.watch.parameter_watch import ParameterWatch

    assert ParameterWatch(Net()).is_same


def finite() -> None:
    from elche.comm.tensors.nan_check import all_finite

    assert all_finite([torch.ones(3), torch.ones(2, dtype=torch.complex64)])
    assert not all_finite([torch.ones(3), torch.tensor([1.0, float("nan")])])


def losses() -> None:
    """A loss that is a mean trains; of a sum it is known only with the name."""
    from elche.errors import ConfigError
    from elche.runtime.watch.loss_reduction import SumLossWatch
    from elche.torch_internals.lookup import INTERNALS

    model = nn.Linear(2, 2)
    found = []
    for reduction in ("mean", "sum"):
        watch = SumLossWatch(list(model.parameters()))
        loss = nn.MSELoss(reduction=reduction)(
            model(torch.ones(3, 2)), torch.ones(3, 2)
        )
        try:
            loss.backward()
        except ConfigError:
            found.append(reduction)
        watch.detach()
    is_there = any(i.is_there for i in INTERNALS if i.name == REDUCTION)
    assert found == (["sum"] if is_there else [])


def batches() -> None:
    from elche.trainer.batch_parts import cut_batch

    x = torch.arange(8.0).view(4, 2)
    found = cut_batch({"x": x, "y": [x, ("a", 1)], "names": list("abcd")}, 1, 3, 4)
    assert found["names"] == ["b", "c"]
    assert found["y"][1] == ("a", 1)
    assert torch.equal(found["x"], x[1:3])
    assert torch.equal(found["y"][0], x[1:3])


def leaves() -> None:
    from elche.torch_internals.batches import tree_leaves

    assert tree_leaves(({"a": [1, 2]}, 3, None)) in ([1, 2, 3, None], [1, 2, 3])


def stream() -> None:
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils import worker

    from elche.torch_internals.batches import as_if_alone

    with as_if_alone():
        assert get_worker_info() is None
    with mock.patch.object(worker, "_worker_info", SimpleNamespace(id=1)):
        with as_if_alone():
            assert get_worker_info() is None
        assert get_worker_info() is not None


def cut() -> None:
    from elche.pipeline.cutting.cut import cut_model

    model = nn.ModuleDict({"net": nn.Linear(4, 4), "out": nn.Linear(4, 2)})
    model.forward = lambda x: model["out"](model["net"](x))  # type: ignore[method-assign]
    layers = cut_model(model, ["out"], torch.randn(2, 4))
    assert len(layers) == 2


def gloo() -> None:
    from elche.torch_internals.groups import gloo_options

    options = gloo_options(timedelta(seconds=7), "127.0.0.1")
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)


SPLIT = (
    "torch._C._are_functorch_transforms_active",
    "torch._C._len_torch_function_stack",
    "torch._C._will_engine_execute_node",
    "torch.nn.functional._in_projection",
    "torch.nn.functional._in_projection_packed",
    "torch.nn.Module._compiled_call_impl",
)
REDUCER = "torch.distributed.Reducer"
JOINING = (
    f"{REDUCER}._get_zeros_like_grad_buckets",
    f"{REDUCER}._push_all_rebuilt_params",
)
BACKEND = "torch.distributed.ProcessGroup._get_backend"
GLOO = "torch.distributed.ProcessGroupGloo._Options"
TIMEOUT = "torch._C._distributed_c10d.Backend.Options._timeout"
REDUCTION = "torch._C._functions.NllLossBackward0._saved_reduction"
CHECKS: dict[str, list[Callable[[], None]]] = {
    "torch.autograd.Variable._execution_engine.queue_callback": [windows],
    "torch._C._current_autograd_node": [windows],
    "torch._C._current_graph_task_id": [windows, wrapper, norm],
    REDUCTION: [losses],
    **{name: [split_with(name)] for name in SPLIT},
    "torch.Tensor._post_accumulate_grad_hooks": [split_backward, wrapper],
    "torch.Tensor._version": [versions, buffers, split_with("torch.Tensor._version")],
    "torch.nn.Module()._parameters": [parameters],
    "torch.nn.Module()._buffers": [held],
    "torch.nn.Module()._modules": [norm],
    "torch.nn.Module()._non_persistent_buffers_set": [held],
    "torch.nn.modules.batchnorm._BatchNorm": [norm, buffers],
    "torch.nn.modules.batchnorm._NormBase": [norm, buffers],
    "torch._compile._disable_dynamo": [norm],
    **{f"torch._foreach_{each}_": [windows] for each in ("add", "copy", "mul", "zero")},
    "torch._foreach_norm": [finite],
    "torch.utils._pytree.tree_map": [batches],
    "torch.utils._pytree.tree_leaves": [batches, leaves],
    "torch._subclasses.FakeTensorMode": [cut],
    "torch.utils.data._utils.worker._worker_info": [stream],
    TIMEOUT: [gloo],
    **{name: [gloo] for name in (GLOO, f"{GLOO}._devices", f"{GLOO}._threads")},
    BACKEND: [wrapper],
    f"{REDUCER}._rebuild_buckets": [wrapper],
    **{name: [joined] for name in JOINING},
}
"""What relies on each name."""
REFUSED = {
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch._C._current_autograd_node",
    "torch.nn.Module()._parameters",
    "torch.nn.Module()._buffers",
    "torch.nn.Module()._modules",
    "torch._subclasses.FakeTensorMode",
    "torch.utils.data._utils.worker._worker_info",
    TIMEOUT,
    GLOO,
    f"{GLOO}._devices",
    f"{GLOO}._threads",
    *JOINING,
}
"""Names without which what relies on them is an error that names them."""


class Warnings(logging.Handler):
    """Keeps what elche warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def tried(name: str) -> dict[str, Any]:
    """Imports elche without a name (none where it is empty), and tries all checks."""
    warnings = Warnings()
    logging.getLogger("elche").addHandler(warnings)
    with taken_away(name) if name else contextlib.nullcontext():
        import elche.comm.norm.sync_batch_norm
        import elche.ddp.wrapper
        import elche.pipeline.split_backward.backward
        import elche.runtime.windows.gradient_sync  # noqa: F401
    checks = CHECKS[name] if name else {c for each in CHECKS.values() for c in each}
    error = ""
    for check in checks:
        if not name and check.__name__ == "check":  # says that a name is gone
            continue
        try:
            check()
        except Exception as found:
            error = "".join(traceback.format_exception_only(found)).strip()
            traceback.print_exc()
    return {"name": name, "warnings": warnings.texts, "error": error}


def main() -> None:
    torch.set_num_threads(1)
    pkgutil.resolve_name("torch._dynamo")  # checkpointing imports it: once for all
    for name in sys.argv[1:]:
        child = os.fork()
        if not child:
            code = 1
            try:
                print(json.dumps(tried(name)), flush=True)
                code = 0
            finally:
                os._exit(code)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
