"""Small values between ranks for Lightning: barriers, decisions, paths, metrics.

They travel through host memory in a gloo group, on whatever devices the ranks train,
and as msgpack, so that nothing received is unpickled. Where torch has no default group
it is created, because torchmetrics reduces in it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar, final

import msgpack
import torch
from torch import distributed as dist

from elche.errors import ConfigError

T = TypeVar("T")


@final
class RankExchange:
    """Exchange of values beside gradients; made on all ranks together.

    Args:
        world_size: ranks of the run; a single one exchanges nothing.
        timeout_s: most seconds that a rank waits for the others.
    """

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._world_size = world_size
        self._group: Any = None
        if world_size == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timeout)
        self._group = dist.group.WORLD
        if dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self._world_size > 1:
            dist.barrier(self._group)

    def reduce(self, value: Any, operation: Any = "mean") -> Any:
        """The sum, mean, least or greatest of a tensor over ranks; elementwise.

        Args:
            value: equal shapes on all ranks; what is no tensor comes back as it is.
            operation: a name, or torch's ReduceOp.
        """
        if self._world_size == 1 or not isinstance(value, torch.Tensor):
            return value
        name = str(operation or "mean").lower().rpartition(".")[2]
        is_mean = name in ("mean", "avg")
        if not (is_mean or name in ("sum", "min", "max")):
            raise ConfigError(
                f"expected to reduce by mean, sum, min or max, got {operation!r}"
            )
        total = value.detach().cpu().clone()
        by = getattr(dist.ReduceOp, "SUM" if is_mean else name.upper())
        dist.all_reduce(total, by, self._group)
        return (total / self._world_size if is_mean else total).to(value.device)

    def decide(self, decision: bool, needs_all: bool = True) -> bool:
        """True if all ranks say so, or any."""
        count = int(self.reduce(torch.tensor(int(decision), device="cpu"), "sum"))
        return count == self._world_size if needs_all else count > 0

    def gather(
        self, tensor: torch.Tensor, *, needs_gradient: bool = False
    ) -> torch.Tensor:
        """The tensors of all ranks, stacked in the order of ranks, without gradient.

        Raises:
            ConfigError: a gradient is asked for, or ranks bring tensors of different
                shapes or dtypes.
        """
        if self._world_size == 1:
            return tensor
        if needs_gradient:
            raise ConfigError(
                "all_gather(sync_grads=True) stacks equal tensors, and ranks train "
                "shares of different sizes; elche.all_gather() brings their rows, with "
                "gradient"
            )
        host = tensor.detach().cpu().contiguous()
        form = str(host.dtype), list(host.shape)
        forms = [self.broadcast(form, rank) for rank in range(self._world_size)]
        if any(each != forms[0] for each in forms):
            raise ConfigError(
                "all_gather stacks equal tensors, and the ranks' are "
                f"{[shape for _, shape in forms]}: ranks train shares of different "
                "sizes; elche.all_gather() takes them"
            )
        parts = [torch.empty_like(host) for _ in range(self._world_size)]
        dist.all_gather(parts, host, self._group)
        return torch.stack(parts).to(tensor.device)

    def broadcast(self, value: T, source: int = 0) -> T:
        """One rank's value of plain Python, on all ranks.

        Raises:
            ConfigError: it is something else.
        """
        if self._world_size == 1:
            return value
        packed = torch.empty(0, dtype=torch.uint8, device="cpu")
        if dist.get_rank() == source:
            try:
                raw = bytearray(msgpack.packb(value))
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(
                    "only None, numbers, strings, bytes, lists and dicts are "
                    f"broadcast, got {type(value).__name__}: {error}; a tensor goes "
                    "through elche.all_gather()"
                ) from error
            packed = torch.frombuffer(raw, dtype=torch.uint8)
        size = torch.tensor([packed.numel()], device="cpu")
        dist.broadcast(size, source, self._group)
        if dist.get_rank() != source:
            packed = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.broadcast(packed, source, self._group)
        got: T = msgpack.unpackb(packed.numpy().tobytes(), strict_map_key=False)
        return got
