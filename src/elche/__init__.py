"""Train one PyTorch model on mismatched hardware, at the sum of its speeds.

The names below are loaded when they are first used, so ``import elche`` costs nothing
and the pure parts work without torch. The others are in ``elche.errors``,
``elche.config``, ``elche.monitor``, ``elche.trainer``, ``elche.pipeline`` and
``elche.cadence``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elche import cadence as cadence
    from elche import config as config
    from elche import errors as errors
    from elche import monitor as monitor
    from elche import pipeline as pipeline
    from elche import trainer as trainer
    from elche.by_hand.replica import Replica, init_group
    from elche.comm.norm.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from elche.config import RunConfig
    from elche.config_parts import WindowConfig
    from elche.ddp.wrapper import DistributedDataParallel
    from elche.errors import ConfigError, ElcheError
    from elche.launching.launching import launch
    from elche.session.checkpoints import (
        epochs,
        register_for_checkpointing,
        resume,
        save,
        save_every,
    )
    from elche.session.metrics import (
        batch_weight,
        epoch_metrics,
        log_scalar,
        log_to,
        metrics,
        summary,
        timeline,
    )
    from elche.session.output import print as print
    from elche.session.output import progress
    from elche.session.process import shutdown
    from elche.session.progress import (
        ProgressLR,
        follow,
        load_state_dict,
        progress_samples,
        progress_steps,
        state_dict,
    )
    from elche.session.ranks import (
        all_gather,
        barrier,
        device,
        gather,
        is_main_process,
        rank,
        world_size,
    )
    from elche.session.ranks import any as any
    from elche.session.setup import setup
    from elche.session.sharing import share
    from elche.trainer.evaluation import evaluate, predict
    from elche.trainer.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "elche.by_hand.replica": "Replica init_group",
    "elche.comm.norm.sync_batch_norm": "SyncBatchNorm convert_sync_batchnorm",
    "elche.config": "RunConfig",
    "elche.config_parts": "WindowConfig",
    "elche.ddp.wrapper": "DistributedDataParallel",
    "elche.errors": "ConfigError ElcheError",
    "elche.launching.launching": "launch",
    "elche.session.checkpoints": "epochs register_for_checkpointing resume "
    "save save_every",
    "elche.session.metrics": "batch_weight epoch_metrics log_scalar log_to "
    "metrics summary timeline",
    "elche.session.output": "print progress",
    "elche.session.process": "shutdown",
    "elche.session.progress": "ProgressLR follow load_state_dict progress_samples "
    "progress_steps state_dict",
    "elche.session.ranks": "all_gather any barrier device gather is_main_process "
    "rank world_size",
    "elche.session.setup": "setup",
    "elche.session.sharing": "share",
    "elche.trainer.evaluation": "evaluate predict",
    "elche.trainer.trainer": "Trainer",
}
MODULES = {
    "cadence": ("ElChe", "ElCheConfig"),
    "config": ("DebugConfig", "OuterConfig", "TransportConfig"),
    "errors": (
        *("AbortedError", "CheckpointError", "CommunicationError"),
        *("ContributionError", "DeadlineError", "MismatchError", "NonFiniteError"),
        *("ProtocolError", "RankLostError", "RemoteRankError", "TransitionError"),
    ),
    "monitor": ("EpochMetrics", "Metrics", "WindowMetrics"),
    "pipeline": ("OwnBackward", "Pipeline", "PipelineConfig"),
    "trainer": (
        *("EarlyStopping", "EpochRecord", "RunReport", "TrainResult"),
        *("TrainerConfig", "TrainingHandle", "TrainingPhase"),
    ),
}
"""Public modules, and the names in each beside those above."""
_REMOVED = {
    "LocalReplicas": "run a process per device (elche run script.py), and reduce by "
    "hand with elche.init_group and elche.Replica",
    **dict.fromkeys(
        ("Guard", "Verdict"),
        "the coordinator has one guard of its own; switch it off by "
        "windows=elche.WindowConfig(guard=False)",
    ),
}
"""Removed names, and their replacements."""
_REFERENCES = {
    "Ddp": "elche.Replica.wrap(model, elche.init_group())",
    "DdpConfig": "elche.RunConfig, or options of elche.setup",
    "DdpHandle": "elche.trainer.TrainingHandle, from elche.Trainer(...).start()",
    "GradSyncStrategy": "elche.DistributedDataParallel(model, strategy=...)",
    "ProcessGroup": "elche.init_group()",
    "ScheduleZeroBubble": 'elche.pipeline.Pipeline(..., schedule="zb-h1")',
    "ZeroBubbleStage": "elche.pipeline.OwnBackward",
}
"""Names of flodl, axonml and boostr, and their counterparts."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_PLACE_OF = {name: home for home, names in MODULES.items() for name in names}

# Without any and print: a * import hides no builtin.
__all__ = ["ConfigError", "DistributedDataParallel", "ElcheError", "ProgressLR"]
__all__ += ["Replica", "RunConfig", "SyncBatchNorm", "Trainer", "WindowConfig"]
__all__ += ["all_gather", "barrier", "batch_weight", "convert_sync_batchnorm", "device"]
__all__ += ["epoch_metrics", "epochs", "evaluate", "follow", "gather", "init_group"]
__all__ += ["is_main_process", "launch", "load_state_dict", "log_scalar", "log_to"]
__all__ += ["metrics", "predict", "progress", "progress_samples", "progress_steps"]
__all__ += ["rank", "register_for_checkpointing", "resume", "save", "save_every"]
__all__ += ["setup", "share", "shutdown", "state_dict", "summary", "timeline"]
__all__ += ["world_size"]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    if name in MODULES:
        return import_module(f"elche.{name}")
    if name in _REMOVED:
        from elche.errors import ConfigError

        raise ConfigError(f"elche.{name} was removed: {_REMOVED[name]}")
    if name in _PLACE_OF:
        raise AttributeError(f"elche.{name} is now elche.{_PLACE_OF[name]}.{name}")
    if name in _REFERENCES:
        raise AttributeError(
            f"elche.{name} is {_REFERENCES[name]}; see docs/from_references.md"
        )
    raise AttributeError(f"module 'elche' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOME_OF, *MODULES, "__version__"])
