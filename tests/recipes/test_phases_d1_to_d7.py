"""Distributed data loading for RLHF training, a test for each phase."""

import json
import math
import shutil
from pathlib import Path

import pytest

import miniray

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("PIL")


@pytest.fixture
def copied(files, tmp_path):
    """The rows in a folder of their own, where nothing is known of them yet."""
    return [shutil.copy(path, tmp_path) for path in files]


def test_d1_every_row_is_on_one_worker(files):
    import test_phase1_data_sharding as phase

    assert phase.check_example() == "2099 on 2: [0:1050] and [1050:2099]"
    phase.test_phase1(files)  # on 1, 2, 3, 8 and 65 workers


@pytest.mark.parametrize("seed", [0, 1, None])
def test_d2_max_samples_are_of_the_whole_run(files, seed, monkeypatch):
    import checks
    import test_phase1_data_sharding as phase

    monkeypatch.setenv("MINIRAY_RUN_SEED", "7")  # as engines and the launcher set it
    for shuffle in (False, True):
        parts = phase.shards(files, 4, 13, shuffle=shuffle, seed=seed)
        checks.compare([list(part.row_ids) for part in parts], 13)
    monkeypatch.delenv("MINIRAY_RUN_SEED")
    if seed is None:  # ranks that would each draw their own are refused
        with pytest.raises(ValueError, match="MINIRAY_RUN_SEED"):
            phase.shards(files, 4, 13, shuffle=True, seed=None)


def test_d3_prompts_are_measured_once_for_all_workers(copied):
    import checks
    from byte_tokenizer import ByteTokenizer
    from geoguessr_dataset_distributed import GeoguessrRLHFDatasetDistributed

    measured = []

    class Counting(ByteTokenizer):
        def apply_chat_template(self, messages, **options):
            measured.append(messages)
            return super().apply_chat_template(messages, **options)

    def start():
        before = len(measured)
        parts = [
            GeoguessrRLHFDatasetDistributed(
                copied, Counting(), checks.CONFIG, rank=rank, world_size=3
            )
            for rank in range(3)
        ]
        checks.compare([list(part.row_ids) for part in parts], 60)
        return len(measured) - before

    assert start() == 60
    assert start() == 0  # the answer is kept beside the data


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_d4_the_same_inside_actors(files, backend):
    import test_phase2_ray_workers as phase
    import worker_with_dataloader

    if backend == "ray":
        pytest.importorskip("ray")
    miniray.init(num_workers=2, backend=backend)
    try:
        lines = phase.check_workers(files, 2)
        epochs = worker_with_dataloader.run_epochs(files, 2, epochs=2)
    finally:
        miniray.shutdown()
    assert lines[0] == "counts [30, 30], 60 rows, all ids disjoint"
    assert lines[1] == "first rows [0, 30]"
    assert [line.split(",")[0] for line in epochs] == [
        "epoch 0: 60 rows once each",
        "epoch 1: 60 rows once each",
    ]


def test_d5_a_worker_loads_its_own_rows_and_decodes_late(files):
    from place_worker import PlaceLoader
    from policy import SIZES, PlacePolicy

    loaders = [PlaceLoader(files, 20, side=32, seed=0)(rank, 2) for rank in range(2)]
    parts = [list(loader) for loader in loaders]
    assert [[len(batch) for batch in part] for part in parts] == [[10, 10, 10], [10, 10, 10]]
    rows = [row for part in parts for batch in part for row in batch]
    assert sorted(row["index"] for row in rows) == list(range(60))
    assert all(row["pixels"].shape == (3, 32, 32) for row in rows)
    assert all(row["pixels"].dtype == torch.uint8 for row in rows)

    threads = list(PlaceLoader(files, 20, side=32, seed=0, decode_workers=3)(0, 2))
    for batch, other in zip(parts[0], threads, strict=True):  # any number of threads, one order
        for row, same in zip(batch, other, strict=True):
            assert row["index"] == same["index"]
            assert torch.equal(row["pixels"], same["pixels"])

    policy = PlacePolicy(SIZES["tiny"])
    first, second = rows[:2]
    made = policy.extra_inputs([first, second, first, first])
    assert made["pixel_values"].shape == (2, 3, 32, 32)  # a picture once for all its responses
    assert torch.equal(made["pixel_values"][1], second["pixels"])
    assert made["image_of"].tolist() == [0, 1, 0, 0]


def test_d5_pictures_are_decoded_ahead_and_no_further(files, monkeypatch):
    """The next two batches while one is used: neither none nor all of them."""
    import threading

    import place_worker

    decoded, changed = [], threading.Condition()
    original = place_worker.pixels

    def counted(encoded, side):
        with changed:
            decoded.append(side)
            changed.notify_all()
        return original(encoded, side)

    monkeypatch.setattr(place_worker, "pixels", counted)
    batches = iter(place_worker.PlaceLoader(files, 5, side=32)(0, 1))
    next(batches)
    with changed:  # without another next()
        assert changed.wait_for(lambda: len(decoded) >= 15, timeout=30)
    next(batches)
    with changed:
        assert changed.wait_for(lambda: len(decoded) >= 20, timeout=30)
        assert len(decoded) < 60
    batches.close()


def test_d6_the_loop_runs_where_the_data_is(trained):
    import plots

    lines = trained.result.history
    assert [line["counts"]["prompts"] for line in lines] == [16, 16, 16]
    assert [line["counts"]["sequences"] for line in lines] == [32, 32, 32]
    assert set(lines[0]["timing"]) == {"data", "rollout", "reward", "log_prob", "update"}
    # Gradients were summed: the workers are equal, though neither saw the other's rows.
    one, other = trained.weights
    assert all(torch.equal(one[name], other[name]) for name in one)
    # Scalars cross to the driver, whatever a row weighs.
    steps = trained.answers["train_epoch"]
    assert len(steps) == 3
    assert max(len(json.dumps(told)) for told in steps) < 10_000
    # 7 rows on one worker and 6 on the other: a mean over rows, not of the workers' means.
    scores = plots.scores(trained.trainer.guesses["GRPO"])
    assert scores["reward"] > 0
    for name in ("reward", "answered"):
        assert math.isclose(scores[name], trained.evaluated[name], rel_tol=1e-6)
    rewards = [told["reward"] for told in steps[0]]  # (sum, count, min, max) of each worker
    mean = sum(quad[0] for quad in rewards) / sum(quad[1] for quad in rewards)
    assert math.isclose(mean, lines[0]["reward"], rel_tol=1e-9)


def test_d7_end_to_end(trained):
    import plots

    guesses = trained.trainer.guesses
    assert list(guesses) == ["untrained", "warm-up", "GRPO"]
    assert all(made.shape == (13, 4) for made in guesses.values())
    # The same 13 places, each once.
    assert len({tuple(place) for place in guesses["GRPO"][:, 2:]}) == 13
    assert (guesses["untrained"][:, 2:] == guesses["GRPO"][:, 2:]).all()
    assert plots.scores(guesses["untrained"])["answered"] == 0
    assert plots.scores(guesses["warm-up"])["answered"] == 1
    told = trained.answers["warm_up"]
    first, last = (sum(t["loss"][0] for t in made) / 16 for made in (told[0], told[-1]))
    assert last < first / 2
    assert trained.trainer.start == pytest.approx(plots.scores(guesses["warm-up"])["reward"])
    picture = trained.folder / "geoguessr.png"
    plots.draw(trained.result.history, guesses, picture, trained.trainer.start)
    assert picture.stat().st_size > 20_000
    told = plots.speed(trained.result.history)
    assert "tokens/s" in plots.shown(told)
    parts = {"rollout", "reward", "log-probs and update", "data"}
    assert told["shares"].keys() == parts
    # Handing over pictures is a part of rollouts and updates: with it, the sum may be above 1.
    assert sum(told["shares"].values()) == pytest.approx(1, abs=0.2)
    assert (Path(trained.result.run_dir) / "metrics.jsonl").read_text().count("\n") == 3
