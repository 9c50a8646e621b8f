"""CUDA graphs: detection of capture, and refusal of what cannot be followed.

Parameters are read and written where they are, never re-pointed, so a graph that was
captured over them stays valid under any policy. But a replayed graph runs no hook: a
backward pass inside one brings no gradient to a reduction. `torch.cuda.
make_graphed_callables` captures modules apart from the backward pass around them, and
is fine.
"""

from __future__ import annotations

import torch

from elche.errors import ConfigError


def refuse_capture() -> None:
    """Refuses to reduce gradients inside the capture of a CUDA graph.

    Raises:
        ConfigError: the current stream is being captured.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "gradients are reduced by hooks in the backward pass, which a CUDA graph "
            "does not replay: a graph must not hold a whole training step here; "
            "capture the model with torch.cuda.make_graphed_callables, or average "
            "parameters (policy 'async', or 'cadence'), which needs no hook"
        )
