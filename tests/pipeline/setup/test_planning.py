"""Layers, names, partitions and schedules, as users give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elche.errors import CommunicationError, ConfigError
from elche.pipeline.pipeline import Pipeline
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.building import layers_of
from elche.pipeline.setup.planning import make_plan
from elche.runtime.process.launchers import LaunchFacts
from elche.schedule.actions import Schedule, parse_action
from elche.schedule.formats import from_csv
from elche.torch_internals.groups import STEPPED_IN_BACKWARD

CONFIG = PipelineConfig()
DATA = (torch.randn(9, 6), torch.arange(9) % 3)


def pipeline(model: Any, **options: Any) -> Pipeline:
    return Pipeline(model, F.cross_entropy, micro_batches=3, **options)


def test_layers_are_divided_evenly_or_as_told() -> None:
    assert make_plan("zb-v", 4, 2, 9, CONFIG).partition == (3, 2, 2, 2)
    told = PipelineConfig(partition=(4, 1, 1, 3))
    plan = make_plan("zb-v", 4, 2, 9, told)
    assert [list(plan.layers_of(stage)) for stage in range(4)] == [
        *([0, 1, 2, 3], [4], [5], [6, 7, 8])
    ]


def test_a_run_that_replaces_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LaunchFacts(pipe=3, may_grow=True).environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="run without --rejoin; --max-restarts N"):
        pipeline([nn.Linear(6, 3)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("zb-v", 4, 4, 7, CONFIG), "8 stages, but the model has only 7 layers"),
        (("1f1b", 0, 2, 4, CONFIG), "micro_batches to be an int >= 1, got 0"),
        (("1f1b", 2.5, 2, 4, CONFIG), "micro_batches to be an int >= 1, got 2.5"),
        (("missing.csv", 4, 2, 4, CONFIG), "cannot read missing.csv"),
        (("1f1b", 2, 2, 0, CONFIG), "the model has no layers"),
        (("zb-h9", 4, 2, 4, CONFIG), "auto, got 'zb-h9'; did you mean 'zb-"),
        (
            ("1f1b", 4, 2, 4, PipelineConfig(partition=(1, 2))),
            "expected a partition of 4 layers into 2 stages",
        ),
    ],
)
def test_plans_that_cannot_be(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(*call)


def test_a_schedule_for_others_is_refused() -> None:
    made = make_plan("1f1b", 4, 2, 4, CONFIG).schedule
    with pytest.raises(ConfigError, match="is for 2 ranks, but 3 run"):
        make_plan(made, 4, 3, 4, CONFIG)
    with pytest.raises(ConfigError, match="is for 4 microbatches"):
        make_plan(made, 5, 2, 4, CONFIG)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0W0,0I0", "0W0: it comes before its I"),
        ("0F0,0B0,0B0", "0B0: it is there twice"),
        ("0F0,0F1,0B1", "lacks 0I0, 0W0"),
    ],
)
def test_a_schedule_of_one_rank_is_checked(text: str, message: str) -> None:
    made = from_csv(text)
    with pytest.raises(ConfigError, match=message):
        make_plan(made, made.num_microbatches, 1, 2, CONFIG)


def test_a_schedule_file_with_a_deadlock_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="deadlock"):
        make_plan(str(path), 2, 2, 4, CONFIG)


def test_a_schedule_of_ones_own_runs() -> None:
    text = "0F0 1F0 1B0 0I0 0F1 1F1 0W0 1I1 0I1 1W1 0W1 0F2 1F2 1B2 0B2"
    row = tuple(parse_action(one) for one in text.split())
    own = Schedule(name="own", num_microbatches=3, placement=(0, 0), actions=(row,))
    pipe = pipeline(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), schedule=own)
    pipe.step(*DATA)
    assert [action for action, _, _ in pipe.trace()] == list(row)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_reduction": "median"}, "unknown loss_reduction 'median'"),
        ({"partition": (1, 0)}, "at least one layer in each stage"),
        ({"stages_per_rank": 0}, "stages_per_rank to be an int >= 1"),
        ({"timeout_s": 0.0}, "timeout_s to be a positive finite number"),
    ],
)
def test_settings_are_checked(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(**settings)


def test_unknown_options_are_told() -> None:
    with pytest.raises(ConfigError, match="the options are loss_reduction, partition"):
        pipeline([nn.Linear(6, 3)], warmup=3)
    with pytest.raises(ConfigError, match="got both"):
        pipeline([nn.Linear(6, 3)], config=CONFIG, guard=False)
    with pytest.raises(ConfigError, match=r"a Linear is cut by tracing it: give"):
        pipeline(nn.Linear(6, 3))
    with pytest.raises(ConfigError, match="the last stage needs a loss function"):
        Pipeline([nn.Linear(6, 3)], None, micro_batches=2)
    with pytest.raises(ConfigError, match="a device for each of 1 ranks"):
        pipeline([nn.Linear(6, 3)], devices=["cpu", "cpu"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.body:
            x = torch.tanh(one(x))
        return self.head(x) + self.bias


class Head(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.inner, self.own = net.head, net.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.own


def cut(net: Net) -> list[nn.Module]:
    tanh = nn.Tanh()
    return [net.body[0], tanh, net.body[1], tanh, Head(net)]


def test_a_module_with_a_split_keeps_its_names() -> None:
    net, twin = Net().double(), Net().double()
    twin.load_state_dict(net.state_dict())
    x, y = DATA[0].double(), DATA[1]
    F.cross_entropy(twin(x), y).backward()
    pipe = pipeline(net, split=cut, schedule="zb-h1")
    pipe.step(x, y)
    expected = dict(twin.named_parameters())
    for name, one in pipe.named_parameters():
        assert (one.grad - expected[name].grad).norm() <= 1e-12
    assert pipe.state_dict().keys() == twin.state_dict().keys()


class Tied(nn.Module):
    """One weight under three names, two of them in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)
        self.body[0].weight = self.body[2].weight = self.first.weight
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.first(x)) * self.scale)


class Scaled(nn.Module):
    def __init__(self, model: Tied) -> None:
        super().__init__()
        self.inner = model.body
        self.register_buffer("by", model.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.by


def cut_tied(model: Tied) -> list[nn.Module]:
    return [model.first, Scaled(model), model.head]


def test_a_split_keeps_all_names_of_a_shared_weight() -> None:
    model = Tied()
    expected = {name: one.clone() for name, one in model.state_dict().items()}
    pipe = pipeline(model, split=cut_tied)
    made = pipe.state_dict()
    assert made.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(made[name], one)
    twin = Tied()
    twin.load_state_dict(made)
    # One of its names is enough, as in the files of safetensors' `save_model`.
    state = {n: one + 1 for n, one in expected.items() if n != "body.2.weight"}
    pipe.load_state_dict(state)
    for name, one in pipe.state_dict().items():
        assert torch.equal(one, expected[name] + 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head.wieght": 1}, "the state has head.wieght, which the model lacks;"),
        ({"1.inner.0.weight": 1}, r"the state has 1.inner.0.weight, which the model"),
        ({"head.bias": None}, "the state has no head.bias, which rank 0 needs;"),
        ({"body.2.weight": 3}, "other values of first.weight and body.2.weight, which"),
        ({"scale": 3}, r"another shape of scale \[1\] \(not \[\]\);"),
        (
            {"head.bias": None, "other": 1, "scale": 2},
            r"no head.bias, which rank 0 needs, and has another shape of scale \[1\] "
            r"\(not \[\]\), and has other, which the model lacks; nothing was loaded",
        ),
    ],
)
def test_a_state_that_is_not_the_models_changes_nothing(
    change: dict[str, int | None], said: str
) -> None:
    ones = {n: None if size is None else torch.ones(1) for n, size in change.items()}
    check_refused(pipeline(Tied(), split=cut_tied), ones, said)


def check_refused(pipe: Pipeline, change: dict[str, Any], said: str) -> None:
    """A changed state is refused, and nothing of it was loaded; None drops a name."""
    before = pipe.state_dict()
    state = {name: one + 1 for name, one in before.items()} | change
    with pytest.raises(ConfigError, match=said):
        pipe.load_state_dict({n: one for n, one in state.items() if one is not None})
    for name, one in pipe.state_dict().items():
        assert torch.equal(one, before[name])


@pytest.mark.parametrize(
    "value", [torch.ones(3, device="meta"), torch.ones(3).numpy(), [1.0, 1.0, 1.0]]
)
def test_a_state_of_other_things_than_values_changes_nothing(value: Any) -> None:
    pipe = pipeline([nn.Linear(6, 6), nn.Linear(6, 3)])
    check_refused(pipe, {"1.bias": value}, r"the state has another shape of 1\.bias ")


def test_a_split_must_hold_the_whole_model() -> None:
    with pytest.raises(ConfigError, match=r"no layer of split holds bias of the model"):
        layers_of(Net(), lambda net: [*net.body, net.head])
    with pytest.raises(ConfigError, match="which the model lacks"):
        layers_of(Net(), lambda net: [*cut(net), nn.Linear(3, 3)])
    with pytest.raises(ConfigError, match="expected split to return modules"):
        layers_of(Net(), lambda net: [torch.tanh])


def test_meta_layers_and_factories_are_built_alike() -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3))]

    with torch.device("meta"):
        meta = layers()
    built = pipeline(meta, seed=3).state_dict()
    made = pipeline([lambda: layers()[0], lambda: layers()[1]]).state_dict()
    assert built.keys() == made.keys()
    again = pipeline([*meta], seed=3)
    again.load_state_dict(made)
    assert all(torch.equal(made[k], v) for k, v in again.state_dict().items())
    with pytest.raises(ConfigError, match=r"the state has no 0\.weight"):
        again.load_state_dict({})


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def test_meta_layers_that_nobody_initialises() -> None:
    with torch.device("meta"):
        bare = Bare()
    with pytest.raises(ConfigError, match="Bare in it has no reset_parameters"):
        pipeline([bare])
    with torch.device("meta"):
        bare = Bare()
    pipe = pipeline([bare], init=lambda layer: nn.init.ones_(layer.weight))
    assert pipe.state_dict()["0.weight"].sum() == 18
    with pytest.raises(ConfigError, match=r"factory of layer 0 to make an nn\.Module"):
        pipeline([lambda: 3])
    with pytest.raises(ConfigError, match="modules or factories of modules as layers"):
        pipeline([3])


def test_loss_scale_and_sum() -> None:
    torch.manual_seed(0)
    pipe = pipeline([nn.Linear(6, 3).double()], schedule="zb-h1")
    x, y = DATA[0].double(), DATA[1]
    pipe.step(x, y)
    plain = [one.grad.clone() for one in pipe.parameters()]
    pipe.zero_grad()
    pipe.step(x, y, loss_scale=1024.0)
    assert pipe.unscale_(1024.0)
    for mine, one in zip(pipe.parameters(), plain, strict=True):
        torch.testing.assert_close(mine.grad, one, rtol=1e-12, atol=0)
    next(pipe.parameters()).grad[0, 0] = float("inf")
    assert not pipe.unscale_(1.0)
    layers = [layer.module for layer in pipe.layers]
    summed = Pipeline(
        layers,
        lambda out, target: F.cross_entropy(out, target, reduction="sum"),
        micro_batches=4,
        loss_reduction="sum",
    )
    summed.zero_grad()
    found = summed.step(x, y)
    assert found.loss == pytest.approx(float(found.losses.sum()))
    for mine, one in zip(summed.parameters(), plain, strict=True):
        torch.testing.assert_close(mine.grad, one * 9, rtol=1e-12, atol=1e-15)


def test_evaluation_keeps_modes_and_needs_no_target() -> None:
    model = [nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 3)]
    model[1].eval()
    pipe = pipeline(model)
    found = pipe.evaluate(DATA[0])
    assert found.loss is None
    torch.testing.assert_close(found.outputs, model[2](model[0](DATA[0])))
    assert [one.training for one in model] == [True, False, True]
    assert found.outputs.requires_grad is False


def test_one_process_that_has_closed_says_so() -> None:
    pipe = pipeline([nn.Linear(6, 3)])
    pipe.step(*DATA)
    pipe.close()
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(CommunicationError, match="the pipeline is closed"):
            call(*DATA)
    assert list(pipe.state_dict()) == ["0.weight", "0.bias"], "nobody else is needed"


def test_layers_that_torch_shards_or_steps_are_refused() -> None:
    sharded = type("FSDPLinear", (nn.Linear,), {"__module__": "torch.distributed.fsdp"})
    with pytest.raises(ConfigError, match="layer 1: the model is sharded by FSDP"):
        pipeline([nn.Linear(6, 6), sharded(6, 3)])
    with pytest.raises(ConfigError, match="the model: 0 is sharded by FSDP; give"):
        pipeline(nn.Sequential(sharded(6, 3)), split=list)
    stepped = nn.Linear(6, 3)
    setattr(stepped.weight, STEPPED_IN_BACKWARD, [])
    with pytest.raises(ConfigError, match="layer 0: weight is stepped inside the back"):
        pipeline([lambda: stepped])


def test_layers_without_sizes_are_refused() -> None:
    lazy = nn.LazyLinear(6)
    with pytest.raises(ConfigError, match=r"layer 0 \(LazyLinear\) has parameters"):
        pipeline([lazy, nn.Linear(6, 3)])
    lazy(DATA[0])
    pipeline([lazy, nn.Linear(6, 3)]).step(*DATA)
    model = nn.Sequential(nn.Linear(6, 6), nn.LazyBatchNorm1d())
    with pytest.raises(ConfigError, match=r"the model \(LazyBatchNorm1d\) has"):
        pipeline(model, split=list)


def test_a_loss_that_learns_is_refused_and_a_frozen_one_is_not() -> None:
    loss = nn.Sequential(nn.Linear(3, 3))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = loss

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.body(output), target)

    with pytest.raises(ConfigError, match=r"loss_fn has trainable parameters \(body"):
        Pipeline([nn.Linear(6, 3)], Loss(), micro_batches=3)
    loss.requires_grad_(False)
    Pipeline([nn.Linear(6, 3)], Loss(), micro_batches=3).step(*DATA)


@pytest.mark.parametrize("schedule", [None, 3, Path("plan.csv")])
def test_a_schedule_of_another_type_is_refused(schedule: Any) -> None:
    options = {"costs": "measure", "sample": DATA[0][:3]}
    for more in ({}, options):
        with pytest.raises(ConfigError, match="expected the name of a schedule"):
            pipeline([nn.Linear(6, 3)], schedule=schedule, **more)
