"""A seed gives the same run, to the bit: one worker or two, whatever threads load its rows."""

import pytest

import miniray

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

#: Of a step's line: how long it took, and nothing else.
TIMES = {"timing", "seconds", "step_seconds", "tokens_per_second", "picture_seconds"}


@pytest.fixture(scope="module")
def engine():
    with miniray.init(backend="local"):
        yield


def run(files, workers, folder):
    import train_ppo

    trainer = train_ppo.make_trainer(
        {"train": files, "test": files[:1]}, algorithm="grpo", size="tiny", steps=2,
        workers=workers, prompts=8, rollouts=2, lr=1e-3, seed=3, run_dir=folder, progress=False,
    )  # fmt: skip
    with trainer:
        history = trainer.train(steps=3, warm_up=3, warm_up_lr=1e-2).history
        weights = trainer.model_weights()
        guesses = trainer.guess()
    lines = [{key: line[key] for key in line.keys() - TIMES} for line in history]
    return [trainer.start, *lines, guesses.tolist()], weights


@pytest.mark.parametrize("workers", [1, 2])
def test_one_seed_one_run(engine, files, workers, tmp_path, monkeypatch):
    import train_ppo

    def digits(row, response):  # so that there is something to learn without a long warm-up
        return sum(c.isdigit() for c in response) / 32

    monkeypatch.setattr(train_ppo, "place_reward", digits)
    lines, weights = run(files, workers, tmp_path / "a")
    assert all(line["grad_norm"] > 0 for line in lines[1:-1])
    monkeypatch.setattr(train_ppo, "cpu_count", lambda: 16)  # more threads decode
    again, same = run(files, workers, tmp_path / "b")
    assert repr(again) == repr(
        lines
    )  # there is no answer yet: a guess is NaN, which equals nothing
    assert same.keys() == weights.keys()
    assert all(torch.equal(same[name], value) for name, value in weights.items())
