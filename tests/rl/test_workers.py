"""Several workers in separate processes: same update for any number, faults, bytes."""

import os
import re
import signal
import sys

import pytest
import torch

import miniray
from miniray.doctor import read_box
from miniray.errors import ActorDiedError
from miniray.rl import (
    CausalLM,
    GRPOConfig,
    GRPOTrainer,
    KLPenalty,
    PPOConfig,
    PPOTrainer,
    RewardError,
    RLWorker,
    Sampling,
)
from tests.rl.models_for_tests import TOKENIZER, Momentum, digits, make_model, rows
from tests.rl.trainers_for_tests import Batches

pytestmark = pytest.mark.timeout(240)  # many processes, and the machine may be busy

STEPS = 3


class Watched(RLWorker):
    """Remembers the advantages of its sequences in every step."""

    def __init__(self, worker_id, setup):
        super().__init__(worker_id, setup)
        self.seen = []

    def _advantages(self, rollouts, *arguments):
        super()._advantages(rollouts, *arguments)
        ids, made = rollouts.ids.tolist(), rollouts.tokens["advantages"]
        texts = rollouts.texts
        self.seen.append(
            {i: (t, row[row != 0].tolist()) for i, t, row in zip(ids, texts, made, strict=True)}
        )

    def advantages(self):
        return self.seen


def fails_sometimes(row, response):
    if "7" in response:
        raise ValueError("no sevens")
    return digits(row, response)


def run(kind, workers):
    if kind == "ppo":
        trainer, config = PPOTrainer, PPOConfig(
            prompts_per_step=8, rollouts=2, epochs=2, mini_batches=3, micro_batch_tokens=60,
            lam=0.95, gamma=0.99, kl=KLPenalty(0.05, "k1", "reward", target=0.1),
        )  # fmt: skip
    else:
        trainer, config = GRPOTrainer, GRPOConfig(
            prompts_per_step=8, rollouts=3, epochs=2, mini_batches=2, micro_batch_tokens=60,
            entropy_coef=0.01, agg="seq-mean-token-mean", kl=KLPenalty(0.05),
        )  # fmt: skip
    made = type("Watching", (trainer,), {"worker_class": Watched})(
        make_model, fails_sometimes, rows(11), tokenizer=TOKENIZER, config=config,
        sampling=Sampling(max_new_tokens=6), num_workers=workers, seed=3, on_error="skip",
        eval_data=rows(5), eval_sampling=Sampling(max_new_tokens=9),  # not the likeliest tokens
        progress=False, backend="local", optimizer=Momentum,
    )  # fmt: skip
    with made:
        result = made.train(steps=STEPS)
        seen = miniray.get([worker.advantages.remote() for worker in made.workers])
        weights = miniray.get([worker.get_weights.remote() for worker in made.workers])
        scores = made.evaluate()
        assert made.evaluate(data=rows(5)) == scores  # the same rows through the driver
    for other in weights[1:]:  # bit for bit
        assert all(torch.equal(weights[0][key], other[key]) for key in other)
    steps = [{k: v for worker in seen for k, v in worker[step].items()} for step in range(STEPS)]
    return result.history, weights[0], steps, scores


#: Numbers of a step that must not depend on how the work was shared out.
SAME = (
    "reward", "kl", "kl_coef", "loss", "policy_loss", "entropy", "grad_norm", "clip_fraction",
    "approx_kl", "response_tokens",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_any_number_of_workers_makes_the_same_update(kind, local_engine):
    history, weights, steps, scores = run(kind, 1)
    assert any("skipped_rewards" in line for line in history)  # or that was not tested
    assert steps[2]  # the last step of an epoch has 3 prompts: less than 4 workers
    assert history[1]["counts"]["prompts"] == 3
    for workers in (2, 4):
        again, other_weights, other_steps, other_scores = run(kind, workers)
        for line, other in zip(history, again, strict=True):
            assert other["counts"] == line["counts"]
            assert other["range"] == line["range"]
            assert other.get("skipped_rewards") == line.get("skipped_rewards")
            for name in SAME + (("value_loss",) if kind == "ppo" else ()):
                assert other[name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), name
        for mine, theirs in zip(steps, other_steps, strict=True):
            assert mine.keys() == theirs.keys()
            for i, (text, made) in mine.items():
                assert theirs[i][0] == text
                assert theirs[i][1] == pytest.approx(made, rel=1e-4, abs=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(other_weights[name], value, rtol=1e-3, atol=1e-4)
        assert other_scores == pytest.approx(scores)


# -- resuming, syncing ----------------------------------------------------------------------------


def make(workers=2, *, worker_class=RLWorker, data=None, reward=digits, **more):
    settings = {
        "tokenizer": TOKENIZER,
        "config": GRPOConfig(
            prompts_per_step=None if callable(data) else 4,  # loaders yield batches
            rollouts=2,
            epochs=2,
            kl=KLPenalty(0.1, target=0.01, horizon=50),
        ),
        "sampling": Sampling(max_new_tokens=6),
        "optimizer": Momentum,
        "num_workers": workers,
        "seed": 3,
        "progress": False,
        **more,
    }
    kind = type("Trainer", (GRPOTrainer,), {"worker_class": worker_class})
    return kind(make_model, reward, data or rows(10), **settings)


def weights_of(trainer):
    return miniray.get([worker.get_weights.remote() for worker in trainer.workers])


def test_a_run_resumes_bit_for_bit_and_on_another_number_of_workers(local_engine, warns):
    with make(run_dir="run") as trainer:
        trainer.train(steps=2)
        trainer.save_checkpoint(1)
        wanted = trainer.train(steps=2)
        weights = weights_of(trainer)[0]
    with make(run_dir="run") as trainer:
        again = trainer.train(steps=4, resume=True)
        both = weights_of(trainer)
    for name, value in weights.items():
        assert torch.equal(both[0][name], value)
        assert torch.equal(both[1][name], value)
    assert again["loss"] == wanted["loss"]
    assert again["kl_coef"] == wanted["kl_coef"]
    with make(1, run_dir="run") as trainer:
        with warns(UserWarning):
            alone = trainer.train(steps=4, resume=True)
        other = weights_of(trainer)[0]
        trainer.save_checkpoint()
    with make(2, run_dir="run") as trainer:
        with warns(UserWarning):
            trainer.train(steps=6, resume=True)
        pair = weights_of(trainer)
    for name in weights:  # both restored the single worker's optimizer
        assert torch.equal(pair[0][name], pair[1][name])
    assert alone["loss"] == pytest.approx(wanted["loss"], rel=1e-4, abs=1e-6)
    assert alone["kl"] == pytest.approx(wanted["kl"], rel=1e-3)
    for name, value in weights.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)


class Dying(RLWorker):
    """Worker 1 is killed in step 1, once."""

    marker = "died"

    def _rollout(self, rows, step, *arguments):
        if self.rank == 1 and step == 1 and not os.path.exists(self.marker):
            with open(self.marker, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._rollout(rows, step, *arguments)


def test_weights_are_combined_every_so_often_and_a_worker_that_dies_is_replaced(
    local_engine, tmp_path
):
    class Mortal(Dying):
        marker = str(tmp_path / "died")

    with make(
        worker_class=Mortal, sync="weights", sync_interval=2, max_failures=1, run_dir="run"
    ) as trainer:
        trainer.train(steps=1)
        apart = weights_of(trainer)
        result = trainer.train(steps=3)
        together = weights_of(trainer)
        references = miniray.get([worker.get_reference.remote() for worker in trainer.workers])
        assert trainer.get_sync_stats()["num_syncs"] == 2
        path = trainer.save_checkpoint()
    assert (tmp_path / "died").exists()
    assert [line["synced"] for line in result.history] == [False, True, False, True]
    assert not torch.equal(apart[0]["model.head.weight"], apart[1]["model.head.weight"])
    initial = CausalLM(make_model(), TOKENIZER).state_dict()
    for name, value in together[0].items():
        assert torch.equal(together[1][name], value)
        # The new worker is held to what the policy was at the start, like the others.
        assert torch.equal(references[0][name], initial[name])
        assert torch.equal(references[1][name], initial[name])
    with make(sync="weights", sync_interval=2, resume=path) as trainer:
        assert trainer.train(steps=5)["epoch"] == 4


def test_the_death_of_a_worker_is_named_and_not_what_it_did_to_the_others(local_engine, tmp_path):
    class Mortal(Dying):
        marker = str(tmp_path / "died")

    with pytest.raises(ActorDiedError) as caught:
        make(worker_class=Mortal).train(steps=3)
    error = caught.value
    assert (error.worker, error.step, error.signal) == (1, 1, "SIGKILL")


def test_an_error_on_one_worker_ends_the_run_with_its_row(local_engine):
    class Loaders:
        def __init__(self, rank):
            self.rank = rank

        def __iter__(self):
            yield [{"prompt": "1+1=", "rank": self.rank}] * 2

    def only_rank_0(row, response):
        return 1 / (1 - row["rank"])

    with pytest.raises(RewardError, match="rank=1") as caught:
        make(data=lambda rank, world: Loaders(rank), reward=only_rank_0).train(steps=1)
    assert (caught.value.worker, caught.value.step) == (1, 0)


# -- what crosses the driver ----------------------------------------------------------------------


def test_a_step_takes_few_bytes_through_the_driver_whatever_rows_carry(local_engine, monkeypatch):
    seen = []

    def counted(function, size):
        def call(*arguments, **more):
            made = function(*arguments, **more)
            seen.append(size(arguments, made))
            return made

        return call

    def unpacked(arguments, made):
        data, buffers = (*arguments, ())[:2]
        return len(data) + sum(memoryview(b).nbytes for b in buffers)

    for name, module in list(sys.modules.items()):
        if name.startswith("miniray.core.local.") and hasattr(module, "unpack"):
            monkeypatch.setattr(module, "pack", counted(module.pack, lambda _, made: made.nbytes))
            monkeypatch.setattr(module, "unpack", counted(module.unpack, unpacked))

    def make_loader(rank, world_size):
        image = bytes(1_000_000)
        return [[{"prompt": f"{rank}+{i}=", "images": [{"bytes": image}]} for i in range(8)]]

    with make(data=make_loader) as trainer:
        trainer.train(steps=1)
        seen.clear()
        trainer.train(steps=4)
        assert 0 < sum(seen) < 4 * 20_000
        seen.clear()
        trainer.model_weights()  # or nothing was counted
        assert sum(seen) > 5000


def test_prompts_per_step_must_match_the_loaders(local_engine):
    def make_trainer(prompts_per_step):
        config = GRPOConfig(prompts_per_step=prompts_per_step, rollouts=2, kl=KLPenalty(0))
        return make(data=lambda rank, world_size: Batches(2, 8, declared=False), config=config)

    with make_trainer(64) as trainer, pytest.raises(ValueError) as caught:
        trainer.train(steps=1)
    assert "prompts_per_step=64" in str(caught.value)
    assert re.search(r"\b16\b", str(caught.value))
    assert trainer.epoch == 0
    with make_trainer(16) as trainer:
        assert trainer.train(steps=1)["counts"]["prompts"] == 16


def test_parquet_is_read_by_the_workers_and_the_rest_of_an_epoch_shared_out_anew(
    local_engine, warns
):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"id": list(range(12)), "prompt": [f"{i}+1=" for i in range(12)]}),
        "rows.parquet",
        row_group_size=2,
    )
    path = os.path.abspath("rows.parquet")

    def make_loader(rank, world_size):
        from miniray.data import DataLoader, ParquetDataset

        return DataLoader(ParquetDataset(path, rank=rank, world_size=world_size), batch_size=2)

    def reward(row, response):
        return {"reward": digits(row, response), "id": float(row["id"])}

    with make(data=make_loader, reward=reward, run_dir="run") as trainer:
        first = trainer.train(steps=2).history
        trainer.save_checkpoint(1)
    # Workers have rows 0 to 5 and 6 to 11, and took two of them twice.
    assert [line["id"] for line in first] == [(0 + 1 + 6 + 7) / 4, (2 + 3 + 8 + 9) / 4]
    alone = make(1, data=make_loader, reward=reward, run_dir="run")
    with alone, warns(UserWarning):
        history = alone.train(steps=5, resume=True).history
    assert [line["counts"]["prompts"] for line in history] == [4, 4, 2, 2, 2]
    assert history[2]["id"] + history[3]["id"] == (4 + 5 + 10 + 11) / 2
    assert history[4]["id"] == (0 + 1) / 2  # the next epoch
    assert not os.path.exists("run/ranks/1.box")  # put aside: there is no such rank any more
    box = read_box("run/ranks/0.box")  # what the doctor reads
    phases = {event.name for event in box.events if event.kind == "phase"}
    assert {"data", "rollout", "reward", "log_prob", "update"} <= phases


def test_recorded_loss_is_the_mean_over_updates():
    """Backward is called on parts of a loss, several times per step."""
    small = {"prompts_per_step": 4, "rollouts": 4, "micro_batch_tokens": 80}
    config = GRPOConfig(**small, epochs=2, mini_batches=2, kl=KLPenalty(0.05))
    with make(1, config=config, run_dir="run") as trainer:
        history = trainer.train(steps=2).history
    box = read_box("run/ranks/0.box")
    assert [step.loss for step in box.steps] == [pytest.approx(line["loss"]) for line in history]
    assert box.loss == box.steps[-1].loss
