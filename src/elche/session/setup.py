"""`elche.setup`: shared training with the user's own loop.

One run at a time per process. On one device nothing is wrapped, hooked or started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import Unpack

from elche.config import RunConfig
from elche.runtime.data.batch_weights import WeightOf
from elche.runtime.loader import RunLoader
from elche.runtime.training import SetupConfig
from elche.session.options import SetupOptions, names_no_policy, run_config
from elche.session.start import Model, Optimizer, set_up


def setup(
    model: Model,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    config: RunConfig | None = None,
    epochs: int | None = None,
    samples_per_epoch: int | None = None,
    weight_of: WeightOf | None = None,
    schedulers: Sequence[LRScheduler] = (),
    copies: Sequence[nn.Module] = (),
    **options: Unpack[SetupOptions],
) -> tuple[Model, Optimizer, RunLoader]:
    """Shares the training of ``model`` among the ranks of this run.

    The loop below it stays plain PyTorch; the loss is the mean over the batch (or with
    ``loss_reduction="sum"`` the sum), and its backward runs before the next batch is
    asked for, or under ``sync`` after that, once for each batch. On one device only
    the placement changes: model and batches are moved to it. On several, parameters and
    buffers are broadcast from rank 0, and the loader yields this rank's share of the
    data: each sample once, on one rank. Of a batch with fewer samples than ranks (than
    two for each with BatchNorm layers) some ranks receive samples of others under
    ``sync``, with `elche.batch_weight` being 0.

    Args:
        model: the model; the same on every rank.
        optimizer: its optimizer, or several in a list, such as Muon for the matrices
            and AdamW for the rest, each of which the loop steps in every batch.
        loader: a DataLoader. Its ``batch_size`` is the global batch under every
            policy: a local step of a window takes its part by the number of ranks
            (or ``local_batch_size``). Every process of several ranks that loads (each
            rank, or each of its workers) reads all of an IterableDataset and keeps its
            part. That is exact if the stream yields the same samples in the same order
            in every process: Python's, torch's and numpy's global generators are seeded
            at every sample, its own it must seed alike, and it must not divide itself
            by rank or in ``worker_init_fn``. The first samples are compared.
        config: the settings as one value; or give them as options.
        epochs: how many epochs the loop will run, if known. ``policy="auto"`` expects
            ten otherwise: windows pay less the shorter the run.
        samples_per_epoch: samples of an epoch of an IterableDataset (whole batches
            with ``batch_size=None``); what it yields beyond is left. None for its
            ``len()``, which several ranks need.
        weight_of: weight of a batch beside those of other ranks, where it is not its
            samples: what the loss is a mean over, such as tokens that are not padding,
            as in ``weight_of=lambda batch: (batch["labels"] != -100).sum()``. Called
            with each batch as the loader makes it, and with parts of one; returns one
            number (of Python, torch or numpy), 0 for a batch that counts nowhere.
            Means of gradients and what is logged are weighted by it; under ``cadence``
            and ``async`` ranks whose batches weigh 0 are left out. Samples stay what is
            counted, shared out and scheduled by. With ``loss_reduction="sum"`` it only
            leaves out what weighs 0.
        schedulers: learning rate schedulers; see `elche.follow`.
        copies: of the model, which the loop updates (EMA); windows need them, where
            each rank's loop sees other batches. A `torch.optim.swa_utils.
            AveragedModel` is recognised by itself, and needs this only where ``auto``
            may leave its rank out; its updates follow the run's global batches, and are
            made when a window is committed. Another module becomes its mean over the
            ranks at each epoch's end.
        **options: fields of `elche.RunConfig`, such as ``policy="cadence"``.

    Returns:
        The same model and optimizer, and the loader to iterate over.

    Raises:
        ConfigError: an argument is wrong, or cannot be trained on several ranks.
        MismatchError: ranks disagree about model, data or settings.
        RemoteRankError: another rank failed meanwhile.
        CommunicationError: the ranks did not come together; `DeadlineError` where that
            took longer than ``timeout_s``.

    Asking the loader for a batch or an epoch raises these as well (ConfigError where
    ``weight_of`` fails or returns no weight, naming rank and batch), and NonFiniteError
    where a rank's update was not finite again (see `elche.WindowConfig.non_finite`).
    An error that is met when the loop is left by ``break`` is raised at the next call.
    """
    asked = SetupConfig(
        config=run_config(config, options),
        epochs=epochs,
        samples_per_epoch=samples_per_epoch,
        weight_of=weight_of,
        schedulers=schedulers,
        copies=tuple(copies),
        is_default=names_no_policy(config, options),
    )
    return set_up(model, optimizer, loader, asked)
