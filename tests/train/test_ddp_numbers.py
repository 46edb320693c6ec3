"""DDP gives the same numbers as one process on the same samples."""

import pytest

import miniray

torch = pytest.importorskip("torch")

from tests.train.ddp_for_tests import (  # noqa: E402
    Looper,
    Place,
    Stepper,
    apart,
    one_process,
    run_ranks,
)

#: n, batch size of a rank, ranks, accumulate, clip_norm
CASES = [
    (64, 4, 2, 1, None),
    (64, 4, 2, 3, 0.1),  # the last step of an epoch has two micro-batches
    (57, 4, 2, 1, None),  # a last batch of one sample: rank 1 has none
    (59, 4, 2, 2, 0.2),
    (33, 4, 2, 2, None),
    (57, 4, 3, 2, None),  # two samples more than fit, in a step with others
    (45, 4, 2, 3, 0.1),  # rank 1 has no part in the last of the last step's three micro-batches
]


@pytest.fixture(autouse=True)
def _in_empty_folder():
    """Nothing is written here, and the engine is the module's."""


@pytest.fixture(scope="module")
def places():
    miniray.init(backend="local")
    yield [Place.remote() for _ in range(3)]
    miniray.shutdown()


@pytest.mark.timeout(120)  # processes start slowly on a machine that is busy
def test_losses_and_weights_are_those_of_one_process(places):
    for n, batch_size, world_size, accumulate, clip in CASES:
        ranks = run_ranks(
            places[:world_size],
            steps={"accumulate": accumulate, "clip_norm": clip},
            n=n,
            batch_size=batch_size,
        )
        size = batch_size * world_size * accumulate
        losses, weights = one_process(n, size, epochs=3, clip=clip)
        for found in ranks:
            assert apart(found["weights"], weights) < 1e-5, (n, world_size, accumulate)
        # Each rank reports the mean over its own samples.
        shares = [len(range(rank, n, world_size)) for rank in range(world_size)]
        for epoch in range(3):
            pairs = zip(ranks, shares, strict=True)
            mean = sum(found["losses"][epoch] * share for found, share in pairs) / n
            assert mean == pytest.approx(losses[epoch], abs=1e-5)
        # A rank that had no data in the last step still has the optimizer's memory of it.
        states = [found["shared"]["parts"]["optimizer"]["state"] for found in ranks]
        for other in states[1:]:
            for key, moments in states[0].items():
                assert torch.equal(moments["exp_avg"], other[key]["exp_avg"])
                assert moments["step"] == other[key]["step"]


class Twice(Stepper):
    """Goes through the model twice before it goes back, and keeps an average of the weights."""

    def __init__(self, worker_id):
        super().__init__(worker_id, n=57)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.optimizer.register_step_post_hook(lambda *_: self.ema.update_parameters(self.model))

    def training_step(self, batch, batch_idx):
        once, again = super().training_step(batch, 0), super().training_step(batch, 0)
        return (once + again) / 2

    def get_state(self):
        return list(self.ema.module.parameters())


class Halves(Stepper):
    """Worker with a model in two parts, both registered with the trainer."""

    def __init__(self, worker_id):
        super().__init__(worker_id, n=57)
        self.head = self.model[1:]
        self.model = self.model[:1]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.head(self.model(x)), y)


def test_a_rank_without_samples_takes_part_in_the_step_whatever_the_step_calls(places):
    """The last step has one sample, and the batch of rank 1 in that step has weight 0."""
    _, weights = one_process(57, 8, epochs=3)
    ranks = run_ranks(places[:2], cls=Twice)
    averages = [found["own"]["worker"] for found in ranks]
    assert all(map(torch.equal, *averages))
    for found in ranks:
        assert apart(found["weights"], weights) < 1e-5
    _, weights = one_process(57, 8, epochs=3, clip=0.1)
    both = {"models": ("model", "head"), "steps": {"clip_norm": 0.1}}
    for found in run_ranks(places[:2], cls=Halves, **both):
        named = ["model.0.weight", "model.0.bias", "head.2.weight", "head.2.bias"]
        assert list(found["weights"]) == named
        assert apart(dict(zip(weights, found["weights"].values(), strict=True)), weights) < 1e-5


def test_other_ways_to_even_out(places):
    two = places[:2]
    padded = run_ranks(two, uneven="pad", n=57)
    dropped = run_ranks(two, uneven="drop", n=57)
    for ranks in (padded, dropped):
        assert apart(ranks[0]["weights"], ranks[1]["weights"]) == 0
    # 57 samples in batches of 4 are 29 or 28 a rank: 8 batches or 7.
    assert [found["samples"] for found in padded] == [8, 8]
    assert [found["samples"] for found in dropped] == [7, 7]
    with pytest.raises(ValueError, match=r"\b29\b.*\b28\b"):
        run_ranks(two, uneven="error", n=57)


def test_running_statistics_are_the_same_everywhere_after_an_epoch(places):
    ranks = run_ranks(places[:2], n=61, norm=True)
    assert apart(ranks[0]["weights"], ranks[1]["weights"]) == 0
    assert ranks[0]["weights"]["1.num_batches_tracked"] == 8 * 3


def test_half_precision_stays_close_and_the_scaler_is_kept(places):
    exact = run_ranks(places[:2])
    for precision in ("bf16", "fp16"):
        ranks = run_ranks(places[:2], steps={"precision": precision, "clip_norm": 1.0})
        assert apart(ranks[0]["weights"], ranks[1]["weights"]) == 0
        assert 0 < apart(ranks[0]["weights"], exact[0]["weights"]) < 0.05
    assert ranks[0]["shared"]["scaler"]["_growth_tracker"] == 3 * 8  # no step was left out
    assert exact[0]["shared"]["scaler"] == {}


def test_a_loop_of_the_users_own_is_averaged_too(places):
    """Rank 0 has four batches of 4, rank 1 three: in the last step rank 0 is alone."""
    rows = [
        torch.tensor([*range(4 * i, 4 * i + 4), *range(16 + 4 * i, 20 + 4 * i)]) for i in range(3)
    ]
    rows.append(torch.arange(12, 16))
    ranks = run_ranks(places[:2], cls=ShardedLooper, rows=(16, 12))
    _, weights = one_process(28, 0, epochs=3, rows=rows, lr=0.1)
    expected = list(weights.values())
    for found in ranks:
        for mine, theirs in zip(found["weights"], expected, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)


class ShardedLooper(Looper):
    """Worker that calls ``load_data_shard`` itself because no trainer is used."""

    def __init__(self, worker_id, rows):
        super().__init__(worker_id, rows)
        self.load_data_shard(worker_id, len(rows))


class Branch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

    def forward(self, x, short):
        return self.second(x if short else self.first(x))


class Branching(Stepper):
    """On rank 1 the first layer takes no part in any loss."""

    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.model = Branch()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.model(x, short=self.rank == 1), y)


def test_parameters_may_be_unused_on_a_rank_if_that_is_said(places):
    unused = {"find_unused_parameters": True}
    ranks = run_ranks(places[:2], cls=Branching, options=unused)
    assert apart(ranks[0]["weights"], ranks[1]["weights"]) == 0
    assert apart(ranks[0]["weights"], Branch().state_dict()) > 0


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_numbers(places):
    ranks = run_ranks(places[:2], compile="eager", epochs=1)
    assert apart(ranks[0]["weights"], one_process(64, 8, epochs=1)[1]) < 1e-5
