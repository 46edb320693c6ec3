"""The recipe's folder on the path, as when its scripts are run by hand, a few rows, and a run."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import miniray

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "geoguessr"


@pytest.fixture(scope="session", autouse=True)
def recipe():
    sys.path.insert(0, str(RECIPE))
    yield RECIPE
    sys.path.remove(str(RECIPE))


@pytest.fixture(scope="session")
def files(recipe):
    pytest.importorskip("pyarrow")
    pytest.importorskip("PIL")
    import checks

    with checks.some_rows(None, 60) as paths:
        yield paths


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A run of the tiny policy on two workers, with warm-up; 13 held-out rows, so uneven parts."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("PIL")
    pytest.importorskip("torch")
    import make_data
    import train_ppo

    from miniray.rl import Sampling

    class Watched(train_ppo.PlaceGRPO):
        def call_workers(self, method, *args, **kwargs):
            made = super().call_workers(method, *args, **kwargs)
            answers.setdefault(method, []).append(made)
            return made

    folder = tmp_path_factory.mktemp("geoguessr")
    answers = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_ppo, "PlaceGRPO", Watched)
        made = make_data.write_set(folder / "data", 48, 13, rows_per_group=8, processes=1)
        files = {split: [str(path) for path in paths] for split, paths in made.items()}
        trainer = train_ppo.make_trainer(
            files, algorithm="grpo", size="tiny", steps=3, workers=2, prompts=16, rollouts=2,
            lr=1e-3, seed=0, run_dir=folder / "run", backend="local", progress=False,
            eval_sampling=Sampling(max_new_tokens=32, temperature=0),
        )  # fmt: skip
    with trainer:
        result = trainer.train(steps=3, warm_up=40, warm_up_lr=1e-2)
        trainer.guesses["GRPO"] = trainer.guess()
        return SimpleNamespace(
            trainer=trainer,
            result=result,
            files=files,
            answers=answers,
            folder=folder,
            evaluated=trainer.evaluate(),
            weights=[miniray.get(worker.get_weights.remote()) for worker in trainer.workers],
        )
