"""All five phases, one after the other, as a user runs them; and the parts of the last one."""

import math
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

SMALL = ["--size", "tiny", "--warm-up", "60", "--warm-up-lr", "0.01", "--prompts", "16"]


def by_hand(recipe, folder, *command):
    done = subprocess.run(
        [sys.executable, str(recipe / command[0]), *command[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_five_phases(recipe, tmp_path):
    made = ["make_data.py", "data", "--rows", "128", "--test-rows", "24", "--quiet"]
    assert "1 train files, 1 test files" in by_hand(recipe, tmp_path, *made)
    for script in (
        "test_phase1_data_sharding",
        "test_phase2_ray_workers",
        "worker_with_dataloader",
    ):
        told = by_hand(recipe, tmp_path, f"{script}.py", "--data", "data")
        assert all(line.startswith("ok ") for line in told.splitlines())
    for algorithm in ("grpo", "ppo"):
        options = ["--algorithm", algorithm, "--steps", "4", "--data", "data", *SMALL]
        told = by_hand(recipe, tmp_path, "train_ppo.py", *options, "--run-dir", algorithm)
        rows = [line.split() for line in told.splitlines() if line]
        scores = {first: rest for first, *rest in rows}
        assert scores["untrained"][:2] == ["0.000", "0.0%"]
        assert float(scores[algorithm.upper()][0]) > 0.01
        assert float(scores[algorithm.upper()][1].rstrip("%")) > 80
        assert (tmp_path / algorithm / "geoguessr.png").exists()
    more = [*options, "--steps", "8", "--run-dir", "ppo", "--resume"]
    assert "untrained" not in by_hand(recipe, tmp_path, "train_ppo.py", *more)
    assert (tmp_path / "ppo" / "metrics.jsonl").read_text().count("\n") == 8


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_on_ray(recipe, tmp_path):
    pytest.importorskip("ray")
    options = ["--backend", "ray", "--quick", "--size", "tiny", "--run-dir", "run"]
    told = by_hand(recipe, tmp_path, "train_ppo.py", *options)
    assert "Plots:  run/geoguessr.png" in told


def test_what_was_sampled_has_the_probability_it_was_sampled_with(files):
    """Cache, padding and a shared picture change nothing: all give the same log-probs."""
    import dataclasses

    from place_worker import PlaceLoader
    from policy import SIZES, PlacePolicy

    from miniray.rl import Sampling
    from miniray.rl.rollouts.batch import Rollouts

    size = dataclasses.replace(SIZES["tiny"], reads_question=True, encoder_layers=1)
    policy = PlacePolicy(size, value_head=True).eval()
    rows = next(iter(PlaceLoader(files, 3, side=32)(0, 1)))
    rows[1]["prompt_ids"] = rows[1]["prompt_ids"][:20]  # so that prompts are padded
    asked = [rows[0], rows[0], rows[1], rows[2]]
    made = policy.generate(asked, [1, 2, 3, 4], Sampling(max_new_tokens=12))
    assert not torch.equal(made.responses[0], made.responses[1])
    greedy = policy.generate(asked, [1, 2, 3, 4], Sampling(max_new_tokens=12, temperature=0))
    rollouts = Rollouts(asked, range(4), [0, 0, 1, 2], greedy)
    (together,) = rollouts.micro_batches(10_000, device="cpu")
    with torch.no_grad():
        logp = policy.log_probs(together)
        for batch in rollouts.micro_batches(1, device="cpu"):  # one at a time
            place = together.index.tolist().index(int(batch.index))
            alone = policy.log_probs(batch)[0]
            assert torch.allclose(logp[place, : batch.width], alone, atol=1e-5)
            out = policy._run(policy.model, batch).logits[0, -batch.width - 1 : -1]
            assert torch.equal(out.argmax(-1), batch.responses[0])  # what the cache gave
        assert policy.values(together).shape == logp.shape


def test_answers_have_one_length_and_can_be_read(recipe):
    from policy import ANSWER_TOKENS, answer
    from reward import parse_answer

    for place in ((0, 0), (-89.96, 179.96), (7.31, -120.44), (90, -180)):
        text = answer(*place)
        assert len(text) + 1 == ANSWER_TOKENS
        assert np.allclose(parse_answer(text), place, atol=0.051)


def test_the_large_policy_has_more_than_100_million_parameters(recipe):
    from train_ppo import count_parameters

    assert count_parameters("small") < 5e6
    assert count_parameters("large") > 100e6


def test_scores_and_distances(recipe):
    import plots

    degree = math.pi * 6371.0088 / 180
    guesses = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [math.nan, math.nan, 0, 0]])
    assert np.allclose(plots.distances(guesses), [0, degree, math.inf])
    scores = plots.scores(guesses)
    assert scores["reward"] == pytest.approx((1 + math.exp(-degree / 1492.7)) / 3)
    assert scores["answered"] == pytest.approx(2 / 3)
    assert scores["acc@1km"] == pytest.approx(1 / 3)
    assert scores["acc@200km"] == pytest.approx(2 / 3)


def test_data_is_made_once_and_missing_files_are_named(recipe, tmp_path, capsys):
    import click
    from train_ppo import find_data

    made = find_data(tmp_path / "data", 3, 2)
    assert [len(made[split]) for split in ("train", "test")] == [1, 1]
    before = (tmp_path / "data").stat().st_mtime_ns
    assert find_data(tmp_path / "data", 3, 2) == made
    assert (tmp_path / "data").stat().st_mtime_ns == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(click.ClickException, match=r"no train-\*.parquet"):
        find_data(tmp_path / "empty", 3, 2)
    assert not list(tmp_path.glob("*.tmp"))
