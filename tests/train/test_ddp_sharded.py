"""``shard="full"``: numbers of one process, a part of the memory, checkpoints for any layout."""

import pytest

import miniray
from miniray.core import startup
from miniray.train import DDPTrainer, load_model

torch = pytest.importorskip("torch")

from tests.train.ddp_for_tests import (  # noqa: E402
    Looper,
    Place,
    Stepper,
    apart,
    make_data,
    make_model,
    one_process,
    run_ranks,
)

pytestmark = pytest.mark.timeout(120)  # processes start slowly on a machine that is busy

#: n, batch size of a rank, ranks, accumulate, clip_norm
CASES = [
    (64, 4, 2, 3, 0.1),
    (57, 4, 2, 1, None),  # last batch has one sample: rank 1 repeats a batch
    (57, 4, 3, 2, 0.2),  # 3 rows of the last layer on 3 ranks, 8 of the first: 3, 3 and 2
]


@pytest.fixture(autouse=True, scope="module")
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    miniray.shutdown()
    miniray.init(backend="local")
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """Run in an empty directory and keep the engine running."""
    monkeypatch.chdir(tmp_path)


def test_losses_and_weights_are_those_of_one_process_and_each_rank_holds_its_part():
    with startup.actors_with(env={startup.PRELOAD: "miniray.train.ddp.sharded"}):
        places = [Place.remote() for _ in range(3)]
    for n, batch_size, world_size, accumulate, clip in CASES:
        ranks = run_ranks(
            places[:world_size],
            shard="full",
            steps={"accumulate": accumulate, "clip_norm": clip},
            n=n,
            batch_size=batch_size,
            epochs=2,
        )
        losses, weights = one_process(n, batch_size * world_size * accumulate, epochs=2, clip=clip)
        case = (n, world_size, accumulate)
        assert apart(ranks[0]["weights"], weights) < 1e-5, case
        assert [found["weights"] for found in ranks[1:]] == [{}] * (world_size - 1)
        shares = [len(range(rank, n, world_size)) for rank in range(world_size)]
        for epoch in range(2):
            pairs = zip(ranks, shares, strict=True)
            mean = sum(found["losses"][epoch] * share for found, share in pairs) / n
            assert mean == pytest.approx(losses[epoch], abs=1e-5), case
        # 67 weights, and as many first and second moments of Adam, of 4 bytes each.
        assert sum(found["bytes"] for found in ranks) == 3 * 67 * 4, case
        # For 8, 8, 3, 3 rows, the first of 2 ranks has 4, 4, 2, 2; the first of 3 has 3, 3, 1, 1.
        assert (
            ranks[0]["bytes"] == 3 * 4 * {2: 4 * 4 + 4 + 2 * 8 + 2, 3: 12 + 3 + 8 + 1}[world_size]
        )
    for precision in ("bf16", "fp16"):
        ranks = run_ranks(places[:2], shard="full", steps={"precision": precision}, epochs=1)
        assert 0 < apart(ranks[0]["weights"], one_process(64, 8, epochs=1)[1]) < 0.05


class Tied(torch.nn.Module):
    """Two lists of layers, and a head with the weight of the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.ModuleList([torch.nn.Linear(4, 6)])
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.head = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh())
        self.head[0].weight = self.embed[0].weight


def test_layers_are_gathered_one_by_one_but_for_those_that_share_a_weight():
    from miniray.train.ddp.sharded import layers_of

    model = Tied()
    assert layers_of(model) == list(model.blocks)
    assert layers_of(torch.nn.Linear(2, 2)) == []


class Dropping(Stepper):
    """With dropout, running statistics, momentum and a schedule: all that a checkpoint has."""

    def __init__(self, worker_id):
        super().__init__(worker_id, n=56)
        self.model = torch.nn.Sequential(*make_model(norm=True), torch.nn.Dropout(0.3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def test_a_checkpoint_fits_every_number_of_workers_sharded_or_not(warns):
    options = {"worker": Dropping, "seed": 1, "progress": False}
    with DDPTrainer(2, shard="full", **options) as trainer:
        trainer.train(epochs=1)
        path = trainer.save_checkpoint()
        middle = trainer.model_weights()
        trainer.train(epochs=1)
        expected, state = trainer.model_weights(), trainer._rank_checkpoints.gather_shared()
        exported = load_model(trainer.save_final_model("model.safetensors"))
        scores = trainer.evaluate()
        assert trainer.evaluate(make_data(1))["num_samples"] == 1  # rank 1 has none of it
    assert same(exported, expected)
    plain = torch.nn.Sequential(*make_model(norm=True), torch.nn.Dropout(0.3)).eval()
    plain.load_state_dict(exported)
    x, y = make_data(9).tensors
    loss = torch.nn.functional.cross_entropy(plain(x), y).item()
    assert scores["loss"] == pytest.approx(loss, abs=1e-5)
    assert scores["num_samples"] == 9
    # The same layout resumes with bit-identical weights.
    with DDPTrainer(2, shard="full", run_dir="again", **options) as trainer:
        trainer.train(epochs=2, resume=path)
        assert same(trainer.model_weights(), expected)
    # Unsharded models can also load it with the optimizer state, and reach nearly equal weights.
    with DDPTrainer(2, run_dir="whole", **options) as trainer:
        trainer.train(epochs=2, resume=path)
        assert apart(trainer.model_weights(), expected) < 1e-5
        found = trainer._rank_checkpoints.gather_shared()
        other = trainer.save_checkpoint()
    for index, numbers in state["parts"]["optimizer"]["state"].items():
        for key, value in numbers.items():
            theirs = found["parts"]["optimizer"]["state"][index][key]
            torch.testing.assert_close(value, theirs, rtol=0, atol=1e-5)
    assert found["parts"]["scheduler"]["last_epoch"] == 2
    # Back again, on three: their weights are what two had.
    with DDPTrainer(3, shard="full", run_dir="three", **options) as trainer:
        with warns(UserWarning):
            trainer.train(epochs=0, resume=other)
        assert apart(trainer.model_weights(), expected) < 1e-5
        assert trainer.train(epochs=1)["num_samples"] == 56
    assert apart(middle, expected) > 0.01  # what was compared did move


class OwnWeights(Stepper):
    def get_weights(self):
        return self.model.state_dict()


class Scalar(Stepper):
    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.model.scale = torch.nn.Parameter(torch.tensor(1.0))


class Extra(Stepper):
    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


class Alone(Looper):
    def __init__(self, worker_id):
        super().__init__(worker_id, rows=(16,))


class Uneven(Stepper):
    def load_data_shard(self, shard_id, num_shards):
        rows = torch.utils.data.Subset(make_data(16), range(16 - 4 * shard_id))
        self.train_loader = torch.utils.data.DataLoader(rows, batch_size=4)


class Unmeasured(Stepper):
    def load_data_shard(self, shard_id, num_shards):
        self.train_loader = map(tuple, self.train_loader)


@pytest.mark.parametrize(
    ("worker", "kind"),
    [
        (Unmeasured, ValueError),
        (OwnWeights, TypeError),
        (Scalar, ValueError),
        (Extra, ValueError),
        (Alone, ValueError),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_ranks_meet(worker, kind, raises):
    with raises(kind):
        DDPTrainer(1, worker=worker, shard="full", progress=False).train(epochs=1)


def test_ranks_with_different_numbers_of_batches_keep_each_other_company_or_are_evened_out():
    rows = [torch.tensor([*range(4 * i, 4 * i + 4)] * 2) for i in range(3)]
    rows.append(torch.arange(12, 16))
    for uneven, batches in (("join", rows), ("drop", rows[:3])):
        with DDPTrainer(2, worker=Uneven, shard="full", uneven=uneven, progress=False) as trainer:
            found = trainer.train(epochs=1)["num_samples"]
            _, weights = one_process(16, 0, epochs=1, rows=batches)
            assert apart(trainer.model_weights(), weights) < 1e-5
        assert found == {"join": 28, "drop": 24}[uneven]


@pytest.mark.parametrize(
    "options",
    [
        {"shard": "half"},
        {"bucket_cap_mb": 5},
        {"models": ("a", "b")},
        {"compile": True},
    ],
)
def test_options_that_do_not_go_together_are_refused_at_once(options, raises):
    with raises(ValueError):
        DDPTrainer(2, worker=Stepper, **{"shard": "full", **options})
