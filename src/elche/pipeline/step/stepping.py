"""One step or evaluation of a pipeline, run by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any, final

import torch

from elche.errors import ConfigError
from elche.pipeline.checkpoints.loader_passes import LoaderPasses
from elche.pipeline.peers.communicator import PipelineCommunicator, check_same_call
from elche.pipeline.replicas.replica_groups import (
    ReplicaGroups,
    ReplicaShares,
    read_shares,
)
from elche.pipeline.replicas.replicas import Replicas
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.stage import LayerCaches, modes_kept
from elche.pipeline.step.executor import Executor, StepInput, StepResults
from elche.pipeline.step.inputs import (
    COMPARED_STEPS,
    Call,
    InputReport,
    LocalInput,
    check_reports,
    part_of_call,
    read_call,
    warn_of_other_batch,
)
from elche.pipeline.step.outputs import (
    EvaluationOutput,
    OutputRanks,
    StepOutput,
    joined_gradients,
    send_outputs,
)
from elche.pipeline.trees import as_plain, join_batches, split_batch


@final
class Stepping:
    """Runs the steps of a pipeline on this rank.

    Args:
        communicator: connections to all ranks.
        groups: the replicas.
        parts: this rank's stages and plan.

    Attributes:
        communicator: connections to all ranks.
        groups: the replicas.
        parts: this rank's stages and plan.
        config: the settings, including measured ones.
        passes: this rank's passes over the loader.
        replicas: all replicas, from this rank's point of view.
        steps: number of steps so far, including those before a resume.
    """

    def __init__(
        self,
        communicator: PipelineCommunicator,
        groups: ReplicaGroups,
        parts: Parts,
    ) -> None:
        self.communicator = communicator
        self.passes = LoaderPasses()
        self.config = parts.given.config
        self.steps = 0
        self._connect(groups, parts, are_equal=False)

    def _connect(self, groups: ReplicaGroups, parts: Parts, are_equal: bool) -> None:
        """Connects the replicas, at the start and after one is lost."""
        self.groups, self.parts, ranks = groups, parts, self.communicator
        self.replicas = Replicas.join(
            groups, parts, ranks, self.config.timeout_s, are_equal
        )
        mine = {name for one in parts.stages.values() for name in one.stage.keywords}
        self._named = ranks.exchange(sorted(mine), "the keywords of layers")
        peers, ranks.rebuild = ranks.peers, None
        may_lose = self.config.split_batches and groups.are_several
        if may_lose and peers is not None and peers.transport.devices is None:
            peers.announce(groups.ranks)
            ranks.rebuild = self._rebuild

    def _rebuild(self, kept: Sequence[int]) -> None:
        """Continues without the replica of a lost rank."""
        plan, peers = self.parts.plan, self.communicator.peers
        assert peers is not None, "a rank alone loses no other"
        groups, schedule = self.groups.without_lost(plan.schedule, kept)
        executor = replace(
            self.parts.executor,
            rank=peers.rank,
            schedule=schedule,
            transport=peers.transport,
            after_stage=None,
        )
        plan = replace(plan, schedule=schedule)
        self._connect(groups, replace(self.parts, plan=plan, executor=executor), True)

    def step(self, call: Call) -> StepOutput:
        """Runs one step: forward and backward."""
        self.communicator.check_open()
        if self.communicator.rebuild is None:
            return self._step(call)
        parameters = [*self.parts.named_parameters().values()]
        gradients = [one.grad for one in parameters]
        buffers = [b for one in self.parts.layers for b in one.module.buffers()]
        before = [one.clone() for one in buffers]

        def step() -> StepOutput:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            return self._step(call)

        return self.communicator.surviving(step)

    def _step(self, call: Call) -> StepOutput:
        replicas = self.replicas
        given, shares = self._begin(call)
        asked = self._input(
            given,
            shares,
            weights=shares.weights(shares.index, given.report.loss_scale),
            input_gradients=call.input_gradients,
        )
        results, gathered, wants_cut = self.communicator.run(
            replicas.training(self.parts.executor.train, shares),
            asked,
            self.passes.pauses.wants_cut,
        )
        self.steps += 1
        self.passes.step_done(wants_cut=wants_cut)
        losses = replicas.losses(gathered)
        loss = shares.loss(losses)
        assert loss is not None, "there is a target"
        return StepOutput(
            loss=loss,
            losses=torch.tensor(
                losses[shares.index], dtype=torch.float64, device="cpu"
            ),
            input_gradients=joined_gradients(results) if call.input_gradients else (),
        )

    def evaluate(
        self,
        call: Call,
        executor: Executor | None = None,
        caches: LayerCaches | None = None,
    ) -> EvaluationOutput:
        """Runs forward only, over averaged buffers.

        Args:
            call: the script's call.
            executor: executor to use instead of the usual one; with the same modules.
            caches: caches of this rank's layers.
        """
        self.communicator.check_open()
        given, shares = self._begin(call)
        self.replicas.average_buffers(self.communicator, self.config.timeout_s)
        carry_out: Callable[[StepInput], StepResults] = _nothing
        if shares.mine:
            carry_out = (executor or self.parts.executor).evaluate
        layers = [layer.module for layer in self.parts.layers]
        with modes_kept(layers):
            for layer in layers:
                layer.train(False)
            results, gathered, _ = self.communicator.run(
                carry_out, self._input(given, shares, caches=caches)
            )
        return EvaluationOutput(
            loss=shares.loss(self.replicas.losses(gathered)),
            outputs=self._outputs(results, shares, call.outputs),
        )

    def _outputs(
        self, results: StepResults, shares: ReplicaShares, wanted: OutputRanks
    ) -> Any:
        """This replica's outputs, on the ranks that receive them."""
        members = self.groups.members
        if not shares.mine or (isinstance(wanted, int) and wanted not in members):
            return None
        parts = [as_plain(results.outputs[i]) for i in sorted(results.outputs)]
        with self.communicator.ending_on_failure():
            return send_outputs(
                *(join_batches(parts) if parts else None, wanted, members),
                *(self.parts.plan.schedule.placement[-1], self.communicator.peers),
                self.config.timeout_s,
            )

    def _begin(self, call: Call) -> tuple[LocalInput, ReplicaShares]:
        """Agrees with all ranks on the call, and computes all microbatches' samples."""
        is_step = call.what == "step"
        if self.config.split_batches and self.groups.are_several:
            call = part_of_call(call, self.groups.index, len(self.groups.ranks))
        compares = is_step and self.steps < COMPARED_STEPS
        may_rest, trouble = self.groups.are_several, self.replicas.late_learner()
        given = read_call(call, self.parts, may_rest, trouble, compares)
        report, what = list(astuple(given.report)), f"the begin of {call.what}"
        gathered = self.communicator.exchange(report, what)
        check_same_call(gathered, call.what)
        if given.raised is not None and not isinstance(given.raised, ConfigError):
            raise given.raised
        reports = [InputReport(*one) for one in gathered]
        check_reports(reports, self._named, self.groups)
        if compares:
            warn_of_other_batch(reports, self.parts)
        for runner in self.parts.stages.values():
            runner.stage.step = self.steps
        shapes = [(one.samples, one.targets) for one in reports]
        reduction, counts = self.config.loss_reduction, self.replicas.counts
        return given, read_shares(shapes, self.groups, counts, reduction, is_step)

    def _input(
        self, given: LocalInput, shares: ReplicaShares, **more: Any
    ) -> StepInput:
        sizes, has_target = shares.mine, given.target is not None
        return StepInput(
            inputs=split_batch(given.batch, sizes) if self.parts.is_first else (),
            targets=split_batch(given.target, sizes) if has_target else (),
            keywords=(split_batch(given.keywords, sizes) if given.keywords else ()),
            microbatches=len(sizes),
            timeout_s=self.config.timeout_s,
            **more,
        )


def _nothing(given: StepInput) -> StepResults:
    return StepResults()
