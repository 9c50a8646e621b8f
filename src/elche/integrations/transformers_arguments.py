"""Arguments of Hugging Face's Trainer on one rank of a run."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from elche.errors import ConfigError
from elche.runtime.process.environment import read_placement

try:
    from accelerate.state import AcceleratorState, PartialState
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise ConfigError(
        "elche.integrations.transformers needs transformers and accelerate; install "
        f"them with pip install 'elche[transformers]' ({error})"
    ) from error
if TYPE_CHECKING:
    from transformers import TrainingArguments as _Base
else:
    _Base = object

if not hasattr(Trainer, "_prepare_for_training"):
    raise ConfigError(
        "expected transformers 5.23 or newer, whose Trainer has _prepare_for_training; "
        "install it with pip install 'elche[transformers]'"
    )

RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
)
"""Environment variables by which Accelerate learns of other ranks."""
REFUSED_ARGUMENTS = {
    "deepspeed": "it shards the model itself",
    "fsdp": "it shards the model itself",
    "parallelism_config": "it divides the ranks itself",
    "auto_find_batch_size": "it restarts training on the rank that ran out of memory "
    "alone; lower per_device_train_batch_size",
    "enable_jit_checkpoint": "a signal to one rank would save there alone",
    "include_num_input_tokens_seen": "it counts the tokens of one rank",
}
"""Arguments that cannot work on several ranks of elche, and why."""


class ElcheArgumentsMixin(_Base):
    """Training arguments of one rank: its device, and Accelerate alone in its process.

    For arguments of your own: ``class Args(ElcheArgumentsMixin, SFTConfig)``.

    Raises:
        ConfigError: an argument is set that cannot work on several ranks.
    """

    def __post_init__(self) -> None:
        for name, why in REFUSED_ARGUMENTS.items():
            if getattr(self, name, None) not in (None, False, "", "no"):
                raise ConfigError(f"elche does not run with {name}=: {why}")
        if getattr(self, "train_sampling_strategy", None) == "batch_rebalance":
            raise ConfigError(
                "elche shares out batches by the devices' speed, not by length; leave "
                "train_sampling_strategy='batch_rebalance' out"
            )
        super().__post_init__()
        # Else Accelerate's main process would read streams for the others.
        self.accelerator_config.dispatch_batches = False

    @cached_property
    def _setup_devices(self) -> torch.device:
        placement = read_placement()
        device = placement.device
        if self.use_cpu and device.type != "cpu":
            raise ConfigError(
                f"use_cpu=True, but the device of rank {placement.rank} is {device}; "
                "leave it out, and name devices in elche run --devices"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        local_rank = int(os.environ.get("LOCAL_RANK", placement.rank))
        AcceleratorState._reset_state(reset_partial_state=True)
        with patch.dict(os.environ):
            for name in RANK_VARIABLES:
                os.environ.pop(name, None)
            state = PartialState(cpu=device.type == "cpu")
        state.device = device
        state.process_index, state.local_process_index = placement.rank, local_rank
        self.distributed_state = state
        self._n_gpu = int(device.type == "cuda")
        return device


class ElcheTrainingArguments(ElcheArgumentsMixin, TrainingArguments):
    """``transformers.TrainingArguments``; see `ElcheArgumentsMixin`."""
