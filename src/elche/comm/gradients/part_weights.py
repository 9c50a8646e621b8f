"""Weight of a rank's part of a step: of its gradients, and in normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from torch import nn

from elche.comm.gradients.gradient_factor import GradientFactor
from elche.comm.gradients.step_weights import StepWeights
from elche.comm.norm.norm_scope import NormScope
from elche.comm.transport.process_group import Group


class StepPart(NamedTuple):
    """This rank's part of a step, as its gradients are weighed.

    Attributes:
        scale: n_r / N; 0 for a rank without samples, which sends zeros.
        active_ranks: ranks that have samples in this step.
        weight: what the user says that this part weighs, None where its samples do.
            Without :meth:`PartWeights.weigh_by_user` only whether it is 0 counts.
        label: the step, for whoever looks at a pass of it.
    """

    scale: float
    active_ranks: int
    weight: float | None = None
    label: Any = None


class Lost(NamedTuple):
    """Missing part of a backward pass: ranks whose loop has left send zeros.

    Attributes:
        samples: part of the samples.
        ranks: part of the ranks that have samples.
    """

    samples: float = 0.0
    ranks: float = 0.0


@final
class PartWeights:
    """Weights of this rank's gradients, and the factor on their sum.

    Args:
        parameters: the trainable ones.
        group: the process group.
        norms: receives the weight of the batch in hand, if the model has SyncBatchNorm.

    Attributes:
        scale: the factor of gradients, as far as this rank knows it.
        ranks: that have samples, where losses are sums.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group, norms: NormScope | None
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._norms = norms
        self._by_user: StepWeights | None = None
        self._sums: GradientFactor | None = None
        self.scale = 0.0
        self.ranks = 1.0

    def weigh_by_user(self) -> None:
        """Steps are weighted by what each rank says; before :meth:`attach`."""
        self._by_user = StepWeights(self._parameters, self._group)

    def sum_losses(self) -> None:
        """Losses are sums over samples, not means; before :meth:`attach`.

        The gradient of the sum over the union batch is the sum of the ranks' gradients.
        But in a second backward pass before the optimizer's step ``p.grad`` already
        holds the sum of the first, on every rank, and must not be added up again. So
        the reduction is a plain mean over the ranks that have samples, and what a pass
        adds is multiplied by their number before it gets to ``p.grad``. A part that
        weighs nothing adds nothing there, and what was accumulated before takes part in
        the mean.
        """
        self._sums = GradientFactor(self._parameters)

    @property
    def are_of_sums(self) -> bool:
        """True if losses are sums."""
        return self._sums is not None

    def attach(self) -> None:
        """Hooks every parameter, where that is needed; with all ranks."""
        for each in (self._by_user, self._sums):
            if each is not None:
                each.attach()

    def detach(self) -> None:
        """Removes every hook."""
        for each in (self._sums, self._by_user):
            if each is not None:
                each.detach()

    def weigh(self, part: StepPart, ranks: float) -> None:
        """Sets all that depends on the step.

        Args:
            part: of the step.
            ranks: that have samples, where losses are sums and gradients multiplied by
                that have come already; 0: as the part says.
        """
        self.scale = part.scale
        if self._sums is not None:
            ranks = self.ranks = ranks or float(max(1, part.active_ranks))
            self._sums.value = 0.0 if part.weight == 0.0 else ranks
            self.scale = float(part.scale > 0) / ranks
        loss_weight = self.scale
        if self._by_user is not None and part.weight is not None:
            loss_weight = part.weight if part.scale > 0.0 else 0.0
            self._by_user.begin_step(loss_weight)
        elif part.weight == 0.0:
            loss_weight = 0.0
        if self._norms is not None:
            self._norms.weigh(loss_weight)

    def weigh_nothing(self) -> None:
        """No step is under way."""
        if self._sums is not None:
            self._sums.value = 1.0
        if self._by_user is not None:
            self._by_user.end_step()
        if self._norms is not None:
            self._norms.weigh(None)

    def open_pass(self, side: int) -> tuple[float, float]:
        """The factor of this rank's gradients, and seconds of waiting for others."""
        if self._by_user is None:
            return self.scale, 0.0
        scale = self._by_user.open_pass(side)
        return scale, self._by_user.wait_s

    def close_pass(self, lost: Lost) -> float:
        """Factor from the sum to the mean of the present parts."""
        if self._by_user is not None:
            return self._by_user.close_pass()
        missing = lost.samples if self._sums is None else lost.ranks
        return 1.0 / (1.0 - missing) if missing < 1.0 else 1.0

    def go_on_in(self, group: Group, source: int | None) -> float:
        """Ranks have died; as :meth:`StepWeights.go_on_in`."""
        self._group = group
        return 1.0 if self._by_user is None else self._by_user.go_on_in(group, source)
