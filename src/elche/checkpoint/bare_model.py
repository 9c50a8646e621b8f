"""A model's state by the names of the module that the user wrote."""

from __future__ import annotations

from torch import Tensor, nn

from elche.torch_internals.groups import COMPILED_MODULE as _INNER
from elche.torch_internals.passes import is_compiled


def bare_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's `state_dict`, without what `torch.compile` puts before.

    Args:
        model: unwrapped, but for modules that `torch.compile` made.
    """
    compiled = [
        f"{name}." if name else ""
        for name, module in model.named_modules(remove_duplicate=False)
        if is_compiled(module) and any(n == _INNER for n, _ in module.named_children())
    ]
    compiled.sort(key=len, reverse=True)  # inner ones first
    bare = {}
    for name, value in model.state_dict().items():
        for prefix in compiled:
            if name.startswith(f"{prefix}{_INNER}."):
                name = prefix + name.removeprefix(f"{prefix}{_INNER}.")
        if isinstance(value, Tensor):
            bare[name] = value.detach()
    return bare
