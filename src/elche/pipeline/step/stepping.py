"""One step or evaluation of a pipeline, run by all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, final

import torch

from elche.comm.transport.messages import Message
from elche.errors import ConfigError
from elche.pipeline.checkpoints.loader_passes import LoaderPasses
from elche.pipeline.cutting.own_loss import IGNORED, OwnLoss
from elche.pipeline.peers.communicator import PipelineCommunicator
from elche.pipeline.replicas.replica_groups import (
    ReplicaGroups,
    ReplicaShares,
    read_shares,
)
from elche.pipeline.replicas.replicas import Replicas
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.stage import LayerCaches, modes_kept
from elche.pipeline.step.executor import StepInput, StepResults
from elche.pipeline.step.inputs import (
    COMPARED_STEPS,
    Call,
    InputReport,
    check_reports,
    read_call,
    scale_of,
    warn_of_other_batch,
)
from elche.pipeline.step.microbatches import Given, Microbatches
from elche.pipeline.step.outputs import (
    EvaluationOutput,
    OutputRanks,
    StepOutput,
    joined_gradients,
)
from elche.pipeline.step.variants import CutVariants
from elche.pipeline.trees import flatten, join_batches, unflatten

logger = logging.getLogger(__name__)


@final
class Stepping:
    """Runs the steps of a pipeline on this rank.

    Attributes:
        communicator: connections to all ranks.
        groups: the replicas.
        parts: this rank's stages and plan.
        config: the settings, including measured ones.
        passes: this rank's passes over the loader.
        replicas: all replicas, as this rank uses them.
        variants: executors of the layers, and of their variants.
        steps: number of steps so far, including those before a resume.
    """

    def __init__(
        self,
        communicator: PipelineCommunicator,
        groups: ReplicaGroups,
        parts: Parts,
    ) -> None:
        self.communicator = communicator
        self.passes, self.config = LoaderPasses(), parts.given.config
        self._is_warned = False
        self.steps = 0
        self._cutter = Microbatches(parts)  # stores the decisions on values to cut
        self._connect(groups, parts, are_equal=False)

    def _connect(self, groups: ReplicaGroups, parts: Parts, are_equal: bool) -> None:
        """Connects the replicas, at the start and after one is lost."""
        self.groups, self.parts, ranks = groups, parts, self.communicator
        self.replicas = Replicas.join(
            groups, parts, ranks, self.config.timeout_s, are_equal
        )
        mine = {name for one in parts.stages.values() for name in one.stage.keywords}
        self._named = ranks.exchange(sorted(mine), "the keywords of layers")
        self.variants = CutVariants(parts, ranks)
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
        former = self.replicas.buffers
        executor = replace(
            self.parts.executor,
            rank=peers.rank,
            schedule=schedule,
            transport=peers.transport,
            after_stage=None,
        )
        plan = replace(plan, schedule=schedule)
        self._connect(groups, replace(self.parts, plan=plan, executor=executor), True)
        for one in self.replicas.buffers:
            one.continue_from(former)

    def step(self, call: Call) -> StepOutput:
        """Runs one step: forward and backward."""
        self.communicator.check_open()
        if self.communicator.rebuild is None:
            return self._step(call)
        parameters = [*self.parts.named_parameters().values()]
        gradients = [one.grad for one in parameters]
        buffers = [
            (module, name, buffer, buffer.clone())
            for layer in self.parts.layers
            for module in layer.module.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

        def step() -> StepOutput:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer.copy_(value))  # may have been replaced
            return self._step(call)

        return self.communicator.surviving(step)

    def _step(self, call: Call) -> StepOutput:
        # From the step's start, since a replica may be lost in its last exchange.
        replicas, train = self.replicas, self.parts.executor.train
        given, shares, _ = self._begin(call)
        asked = self._input(
            given,
            shares,
            weights=shares.weights(shares.index, scale_of(call.loss_scale)),
            input_gradients=call.input_gradients,
            keeps_outputs=call.outputs is not None,
        )
        outputs: list[Any] = []

        def carry_out() -> StepResults:
            if replicas.reduction is None:
                results = train(asked)
            else:
                results = replicas.reduction.run(train, asked, bool(shares.mine))
            outputs.append(self._outputs(results, shares, call.outputs))
            return results

        # Nothing is sent afterwards: a rank that repeats the step has not finished it.
        results, gathered, wants_cut = self.communicator.run(
            carry_out, self.passes.pauses.wants_cut
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
            outputs=outputs[0],
        )

    def evaluate(
        self, call: Call, caches: LayerCaches | None = None
    ) -> EvaluationOutput:
        """Runs forward only, with averaged buffers; in generation with caches."""
        self.communicator.check_open()
        given, shares, omitted = self._begin(call)
        executor = self.variants.executor(omitted, caches is not None)
        self.replicas.average_buffers(self.communicator, self.config.timeout_s)
        asked = self._input(given, shares, caches=caches)
        layers = [layer.module for layer in self.parts.layers]
        with modes_kept(layers):
            for layer in layers:
                layer.train(False)
            results, gathered, _ = self.communicator.run(
                lambda: executor.evaluate(asked) if shares.mine else StepResults()
            )
        return EvaluationOutput(
            loss=shares.loss(self.replicas.losses(gathered)),
            outputs=self._outputs(results, shares, call.outputs),
        )

    def _outputs(
        self, results: StepResults, shares: ReplicaShares, wanted: OutputRanks | None
    ) -> Any:
        """This replica's outputs, on the requested ranks; None elsewhere."""
        peers, members = self.communicator.peers, self.groups.members
        if wanted is None or not shares.mine:
            return None
        to = [rank for rank in members if wanted in ("all", rank)]
        last, timeout_s = self.parts.plan.schedule.placement[-1], self.config.timeout_s
        what = "the outputs of the last stage"
        with self.communicator.ending_on_failure():
            parts = [results.outputs[i] for i in sorted(results.outputs)]
            outputs = join_batches(parts) if parts else None
            if wanted == "last" or peers is None:
                return outputs
            if peers.rank == last:
                tensors, structure = flatten(outputs, what)
                message = Message(tuple(tensors), structure)
                for rank in to:
                    if rank != last:
                        peers.send(rank, message, timeout_s, what)
                peers.transport.flush(timeout_s)
            elif peers.rank in to:
                message = peers.receive(last, timeout_s, what)
                outputs = unflatten(message.structure, message.tensors)
        return outputs if peers.rank in to else None

    def _begin(self, call: Call) -> tuple[Given, ReplicaShares, Sequence[str]]:
        """Agrees on the call with all ranks: input, shares, and omitted arguments."""
        is_step = call.what == "step"
        compares = is_step and self.steps < COMPARED_STEPS
        read: list[tuple[InputReport, Given]] = []

        def report() -> list[Any]:
            if fault := self.replicas.late_learner() or self.parts.given.meta.trouble():
                raise ConfigError(fault)
            where = self.parts, self._cutter, self.groups
            read.append(read_call(call, *where, compares))
            return list(astuple(read[0][0]))

        gathered = self.communicator.agree(report, call.what, begins=True)
        reports = [InputReport(*one) for one in gathered]
        omitted = check_reports(call.what, reports, self._named, self.groups)
        if compares:
            warn_of_other_batch(reports, self.parts, self.groups)
        if is_step and any(one.is_uneven for one in reports):
            self._warn_of_ignored()
        for runner in self.parts.stages.values():
            runner.stage.step = self.steps
        for members in self.groups.ranks:
            shapes = [reports[rank].shapes for rank in members]
            self._cutter.learn(shapes, checks_names=is_step and self.steps == 0)
        samples = [(one.samples, one.targets) for one in reports]
        reduction, counts = self.config.loss_reduction, self.replicas.counts
        needs_target = is_step and not isinstance(self.parts.given.loss_fn, OwnLoss)
        shares = read_shares(samples, self.groups, counts, reduction, needs_target)
        weighed = [
            next((w for r in members if (w := reports[r].weights)), ())
            for members in self.groups.ranks
        ]
        shares = replace(shares, counts=weighed if any(weighed) else None)
        return read[0][1], shares, omitted

    def _warn_of_ignored(self) -> None:
        if self.parts.rank == 0 and not self._is_warned:
            logger.warning(
                "microbatches have different numbers of ignored targets (%d), and are "
                "weighted by samples: a mean over the other targets differs from that "
                "of one process; pass weight_of=lambda target: (target != %d).sum(), "
                "or loss_fn=None if the model computes its own loss of labels=",
                *(IGNORED, IGNORED),
            )
        self._is_warned = True

    def _input(self, given: Given, shares: ReplicaShares, **more: Any) -> StepInput:
        cut = {
            role: self._cutter.split(one, role, shares.mine)
            for role, one in given.items()
            if one is not None
        }
        return StepInput(
            inputs=cut.get("batch", ()),
            targets=cut.get("target", ()),
            keywords=cut["keywords"],
            microbatches=len(shares.mine),
            timeout_s=self.config.timeout_s,
            **more,
        )
