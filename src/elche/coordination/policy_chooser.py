"""Choice of the policy that the next epoch, or the rest of one, runs under. Pure."""

from __future__ import annotations

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.fatal_losses import LossLimits
from elche.coordination.policy import Member, Outcome, Policy


class PolicyChooser:
    """Owner of a run's policy; this one keeps the policy that it is given.

    Args:
        policy: decides inside the epochs.

    Attributes:
        policy: the policy in force.
        state_from: rank whose optimizer state all take before the epoch; None: each
            has its own.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state_from: int | None = None

    @property
    def loss_limits(self) -> LossLimits:
        """Losses of ranks that the policy does not survive now."""
        return self.policy.loss_limits

    def prepare(self, sync_s: float, now_s: float, *, alike: bool) -> None:
        """An epoch, or the rest of one, is about to begin: the policy may change.

        Args:
            sync_s: seconds of one reduction of the model, where ranks measured it.
            now_s: the time.
            alike: all ranks' optimizers would take the same step.
        """

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Starts an epoch, or the rest of one, under the policy in force."""
        return self.policy.begin_epoch(epoch, sizes, now_s)

    def remove(self, rank: int) -> None:
        """A rank is gone."""
        self.policy.remove(rank)

    def add(self, member: Member) -> None:
        """A rank joins, before an epoch or the rest of one begins."""
        self.policy.add(member)
