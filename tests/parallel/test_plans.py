"""Decisions made before any worker starts: cuts, plans, layouts and rejected inputs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from miniray.train import ModelParallelTrainer, PipelineParallelTrainer  # noqa: E402
from miniray.train.parallel import timeline  # noqa: E402
from miniray.train.parallel.plan import planning  # noqa: E402
from miniray.train.parallel.plan import tensor_plan as tensor  # noqa: E402
from miniray.train.parallel.plan.job import (  # noqa: E402
    Job,
    Layout,
    Place,
)
from miniray.train.parallel.plan.layers import read_layers  # noqa: E402
from miniray.train.parallel.plan.measure import LayerCost, SavedBytes, measure  # noqa: E402
from miniray.train.parallel.plan.schedules import SCHEDULES, divisor_up_to  # noqa: E402
from miniray.train.parallel.plan.stage_plan import (  # noqa: E402
    cut_evenly,
    even_out,
    plan_stages,
    stage_bounds,
)
from miniray.train.parallel.samples import Samples, make_loader  # noqa: E402
from miniray.train.parallel.timeline import Span  # noqa: E402
from tests.parallel.split_for_tests import (  # noqa: E402
    Transformer,
    adam,
    loss,
    make_data,
    make_layers,
    make_model,
)

CPU = torch.device("cpu")

# -- cutting ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 5))
def test_no_other_cut_has_a_quicker_slowest_stage(costs, stages):
    found = cut_evenly(costs, stages)
    if stages > len(costs):
        assert found is None
        return
    assert sum(found) == len(costs)
    assert min(found) >= 1
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts
    )
    assert max(sum(costs[a:b]) for a, b in stage_bounds(found)) == best


def test_workers_with_two_stages_get_equal_work():
    """Cheap ends and six blocks of 2: in a V the first worker has the first and the last stage."""
    costs = [0.1, 2, 2, 2, 2, 2, 2, 0.1]
    holder = lambda stage: SCHEDULES["zero_bubble"].holder(stage, 2)  # noqa: E731
    sizes = even_out(costs, cut_evenly(costs, 4), holder)
    sums = [sum(costs[low:high]) for low, high in stage_bounds(sizes)]
    assert sums[0] + sums[3] == pytest.approx(6.2)
    assert sums[1] + sums[2] == pytest.approx(6.0)
    assert even_out(costs, [3, 1, 2, 2], holder, lambda low, high: False) == [3, 1, 2, 2]


def test_stages_are_balanced_by_time_and_kept_under_the_memory_limit():
    def cost(name, seconds, parameter_bytes):
        return LayerCost(name, parameter_bytes // 4, parameter_bytes, seconds, 100)

    costs = [cost("0", 6, 4000), cost("1", 1, 4000), cost("2", 1, 4000), cost("3", 4, 4000)]
    choices = {"microbatches": 4, "stages_per_worker": None, "layers_per_stage": None}

    def plan(limit):
        gpipe, layout = SCHEDULES["gpipe"], Layout(pipeline=2)
        return plan_stages(costs, gpipe, layout, **choices, memory_limit=limit)

    assert plan(None).sizes == [1, 3]  # 6 and 6 seconds
    # 4 × 4000 bytes per layer, 4 × 100 of activations: three layers are 49200 bytes, two 32800.
    assert plan(40_000).sizes == [2, 2]
    with pytest.raises(ValueError, match=r"20\.0 KB.*32\.8 KB"):
        plan(20_000)
    table = plan(None).table()
    assert "layers 1-3" in table
    assert "50 %" in table
    assert "bubble 20.0 %" in table


def test_schedules_know_who_holds_what_and_what_to_expect():
    assert SCHEDULES["1f1b"].bubble(4, 16, 1) == pytest.approx(3 / 19)  # 15.8 %
    assert SCHEDULES["interleaved"].bubble(4, 16, 2) == pytest.approx(3 / 35)
    assert SCHEDULES["interleaved"].stages_of(1, 4, 2) == [1, 5]
    assert SCHEDULES["zero_bubble"].stages_of(1, 4, 2) == [1, 6]
    for schedule, per_worker in ((SCHEDULES["interleaved"], 3), (SCHEDULES["zero_bubble"], 2)):
        for place in range(4):
            for stage in schedule.stages_of(place, 4, per_worker):
                assert schedule.holder(stage, 4) == place
    assert SCHEDULES["gpipe"].in_flight(0, 4, 16, 1) == 16
    assert [SCHEDULES["1f1b"].in_flight(place, 4, 16, 1) for place in range(4)] == [4, 3, 2, 1]
    assert [divisor_up_to(n, 4) for n in (8, 6, 5, 1)] == [4, 3, 1, 1]


def test_layout_puts_shards_next_to_each_other():
    layout = Layout(data=2, pipeline=2, tensor=2)
    assert [layout.place(rank) for rank in (0, 1, 2, 7)] == [
        Place(0, 0, 0),
        Place(0, 0, 1),
        Place(0, 1, 0),
        Place(1, 1, 1),
    ]
    assert all(layout.rank(*layout.place(rank)) == rank for rank in range(8))
    assert layout.copy_ranks(1) == [4, 5, 6, 7]


def test_bubble_is_the_share_of_time_nobody_works():
    spans = [Span("forward", 0, 0, 0.0, 1.0), Span("backward", 0, 0, 3.0, 5.0)]
    assert timeline.busy_seconds(spans) == 3.0
    # Two workers, busy for 3 and 2 of 5 seconds: 5 of 10 are lost.
    assert timeline.bubble([3.0, 2.0], [5.0, 4.0]) == pytest.approx(0.5)


# -- measuring -------------------------------------------------------------------------------------


def test_measuring_leaves_the_layers_as_they_were():
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)]
    before = [{k: v.clone() for k, v in layer.state_dict().items()} for layer in layers]
    state = torch.get_rng_state()
    costs = measure(read_layers(layers, 0), (torch.ones(6, 4),), torch.ones(6, 2),
                    nn.functional.mse_loss, CPU)  # fmt: skip
    assert torch.equal(state, torch.get_rng_state())
    for layer, kept in zip(layers, before, strict=True):
        assert all(torch.equal(v, kept[k]) for k, v in layer.state_dict().items())
        assert all(p.grad is None for p in layer.parameters())
    assert [cost.parameters for cost in costs] == [40, 16, 0, 18]
    assert [cost.parameter_bytes for cost in costs] == [160, 64, 0, 72]
    assert all(cost.seconds > 0 for cost in costs)


def test_saved_bytes_count_each_activation_once_and_no_weight():
    layer = nn.Linear(4, 8)
    x = torch.ones(6, 4, requires_grad=True)
    with SavedBytes(list(layer.parameters())) as saved:
        y = layer(x).exp()
        y = y * y
    assert saved.bytes == 6 * 4 * 4 + 6 * 8 * 4  # the input, and the result of exp


def test_a_list_of_functions_builds_only_what_is_needed():
    built = []

    def layer(index):
        def make():
            built.append(index)
            return nn.Linear(2, 2)

        return make

    layers = read_layers([layer(i) for i in range(4)], seed=0)
    stages = layers.stages([(0, 2), (2, 4)], [1], None)
    assert built == [2, 3]
    assert list(stages[1].state_dict()) == ["2.weight", "2.bias", "3.weight", "3.bias"]
    again = read_layers([layer(i) for i in range(4)], seed=0).build(2)
    assert torch.equal(again.weight, stages[1].state_dict()["2.weight"])


# -- plans of tensor parallelism -------------------------------------------------------------------


def test_a_plan_is_derived_from_kinds_names_and_order():
    model = Transformer(blocks=1)
    plan = tensor.make_plan(model, None, 2)
    assert plan.styles == {
        "embed": "rowwise",
        "blocks.0.attn.q": "colwise",
        "blocks.0.attn.k": "colwise",
        "blocks.0.attn.v": "colwise",
        "blocks.0.attn.out": "rowwise",
        "blocks.0.fc1": "colwise",
        "blocks.0.fc2": "rowwise",
        "head": "colwise_gather",
    }
    assert plan.heads == {"blocks.0.attn": "n_heads"}
    # A colwise Linear(16, 32) halves weight and bias; a rowwise one halves only the weight.
    assert plan.bytes["blocks.0.fc1.bias"] == (128, 64)
    assert plan.bytes["blocks.0.fc2.weight"] == (2048, 1024)
    assert plan.bytes["blocks.0.fc2.bias"] == (64, 64)
    assert "blocks.*.attn.q" in plan.table()
    # Nothing divides by 5 except nothing: all stays whole.
    assert tensor.make_plan(model, None, 5).styles == {}
    mlp = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1), nn.Linear(4, 4)
    )
    styles = tensor.make_plan(mlp, None, 2).styles
    assert styles == {"0": "colwise", "2": "rowwise", "4": "colwise_gather"}


def test_what_shares_a_weight_or_reads_it_by_itself_is_not_cut():
    model = Transformer(blocks=1)
    model.unembed = nn.Linear(16, 12, bias=False)
    model.unembed.weight = model.embed.weight
    model.torchs = nn.MultiheadAttention(16, 4)
    styles = tensor.make_plan(model, None, 2).styles
    assert not {"embed", "unembed", "torchs.out_proj"} & set(styles)


@pytest.mark.parametrize(
    "plan",
    [
        {"blocks.*.mlp": "colwise"},
        {"mlp": "colwise"},
        {"blocks.*.fc1": "sideways"},
        {"blocks.*": "colwise"},
        {"head": "colwise"},
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, raises):
    shards = 3 if "head" in plan else 2
    with raises(ValueError):
        tensor.make_plan(Transformer(), plan, shards)


def test_stars_stand_for_one_part_and_two_for_several():
    model = Transformer(blocks=2)
    one = tensor.make_plan(model, {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}, 2)
    assert list(one.styles) == ["blocks.0.fc1", "blocks.1.fc1", "blocks.0.fc2", "blocks.1.fc2"]
    many = tensor.make_plan(model, {"**.q": "colwise_gather"}, 2)
    assert list(many.styles) == ["blocks.0.attn.q", "blocks.1.attn.q"]


# -- wrong input -----------------------------------------------------------------------------------


def planned(model, **choices):
    settings = {"layout": Layout(pipeline=2), "schedule": "1f1b", "microbatches": 4, **choices}
    data = settings.pop("data", make_data())
    job = Job(**{"model": model, "loss": loss, "optimizer": adam, "data": data, **settings})
    return planning.make_plan(job, make_loader(data, "data"), CPU)


class TwoOutputs(nn.Module):
    def forward(self, x):
        return x, x


def test_what_cannot_be_trained_is_refused_with_what_would_fit(raises):
    assert sum(planned(make_layers).stages.sizes) == 8
    with raises(ValueError):
        planned(make_layers, microbatches=3)
    with raises(ValueError):
        planned(make_layers, layout=Layout(pipeline=9))
    with pytest.raises(RuntimeError, match=r"layer 1 \(Linear\).*\(2, 4, 5\)"):
        planned([lambda: nn.Embedding(12, 5), lambda: nn.Linear(4, 4)])
    with raises(ValueError):
        planned(make_layers, layers_per_stage=[8])
    with raises(TypeError):
        planned([nn.Embedding(12, 16), TwoOutputs(), nn.Flatten(), nn.Linear(64, 4)])
    with raises(TypeError):
        planned(Transformer, layout=Layout(pipeline=2, tensor=2))
    with raises(TypeError):
        planned(nn.Bilinear(2, 2, 2))
    with raises(TypeError):
        planned(make_layers, loss=lambda o, t: o)
    with raises(TypeError):
        planned(make_layers, data={0: torch.ones(4)}.values())
    with raises(TypeError):
        planned(make_layers, data=[torch.ones(4)].__iter__())
    with raises(TypeError):
        planned(make_layers, data=[torch.ones(4)])
    with raises(ValueError):
        planned(make_layers, data=make_data().dataset)
    with raises(TypeError):
        planned(make_model, layout=Layout(tensor=2), loss=lambda o, t: loss(o, t).detach())
    model = nn.Sequential(nn.Embedding(12, 16), TwoOutputs())
    with raises(TypeError):
        planned(model, layout=Layout(tensor=2))


def tied():
    layers = make_layers()
    layers[4][1].weight = layers[1][1].weight
    return layers


class TiedTransformer(Transformer):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embed.weight


def test_a_weight_that_two_stages_would_have_is_refused(raises):
    with raises(ValueError):
        planned(tied, layers_per_stage=[2, 6])
    assert planned(tied, layers_per_stage=[1, 7]).stages.sizes == [1, 7]
    with raises(ValueError):
        planned(TiedTransformer)


def test_a_weight_that_two_modules_have_is_cut_by_no_plan(raises):
    assert not {"embed", "head"} & set(tensor.make_plan(TiedTransformer(), None, 2).styles)
    with raises(ValueError):
        tensor.make_plan(TiedTransformer(), {"head": "colwise_gather"}, 2)


@pytest.mark.parametrize(
    "choices",
    [
        {"data": {0: 1}.keys},
        {"data": DataLoader(range(8), batch_sampler=[[0], [1]])},
        {"val_data": 3},
        {"val_data": DataLoader(range(8), batch_sampler=[[0], [1]])},
    ],
)
def test_data_that_cannot_be_dealt_out_is_refused_before_training(choices, raises):
    parts = {"model": make_layers, "loss": loss, "optimizer": adam, "data": make_data(), **choices}
    with raises(TypeError):
        Samples(Job(**parts, layout=Layout(data=2)), Place(0, 0, 0)).open()


PARTS = {"model": make_model, "loss": loss, "optimizer": adam, "data": list}


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "2f2b"},
        {"microbatches": 0},
        {"num_workers": 4, "microbatches": 2},
        {"num_workers": 4, "schedule": "interleaved", "microbatches": 9},
        {"schedule": "gpipe", "stages_per_worker": 2},
        {"parallel": {"data": 2, "pipeline": 2}},
        {"parallel": {"depth": 2}},
        {"plan": {"0": "colwise"}},
        {"parallel": [2]},
        {"stages_per_worker": "2"},
        {"eval_interval": 1},
    ],
)
def test_arguments_of_a_pipeline_that_make_no_sense(options, raises):
    with raises(ValueError):
        PipelineParallelTrainer(**{**PARTS, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 4, "tensor_parallel": 3},
        {"split": "layers", "tensor_parallel": 2},
        {"split": "rows"},
        {"loss": nn.Bilinear(4, 4, 1)},
        {"tensor_parallel": 2, "parallel": {"tensor": 2}},
    ],
)
def test_arguments_of_a_split_model_that_make_no_sense(options, raises):
    with raises(ValueError):
        ModelParallelTrainer(**{**PARTS, **options})
    with pytest.raises(TypeError, match=r"'uneven'.*DDPTrainer"):
        ModelParallelTrainer(**PARTS, uneven="pad")


class Plain(torch.optim.SGD):
    def __repr__(self):
        return "Plain()"  # The options that torch shows depend on its version.


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": 3},
        {"loss": nn.MSELoss},
        {"optimizer": Plain([torch.ones(1)], lr=1)},
        {"layers_per_stage": 4},
        {"memory_limit": "1GB"},
        {"metrics": [loss]},
        {"plan": ["fc1"]},
        {"schedule": "1f1b"},
    ],
)
def test_parts_of_the_wrong_kind_are_refused_at_once(options, raises):
    with raises(TypeError):
        ModelParallelTrainer(**{**PARTS, **options})


def test_a_part_that_is_missing_or_misspelled(raises):
    without = {name: part for name, part in PARTS.items() if name != "data"}
    with raises(TypeError):
        PipelineParallelTrainer(**without)
    with pytest.raises(TypeError, match=r"'train_data'.*data="):
        PipelineParallelTrainer(**without, train_data=PARTS["data"])
    with pytest.raises(TypeError, match=r"'micro_batches'.*'microbatches'"):
        PipelineParallelTrainer(**PARTS, micro_batches=4)
