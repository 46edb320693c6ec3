"""The trainers with one worker in this process: learning, resuming, what goes wrong."""

import json
import math

import numpy as np
import pytest
import torch

from miniray.errors import ActorDiedError
from miniray.rl import (
    CausalLM,
    GRPOConfig,
    GRPOTrainer,
    KLPenalty,
    PPOConfig,
    PPOTrainer,
    Sampling,
)
from miniray.train import Callback, Checkpoint, LRSchedule
from tests.rl.models_for_tests import TOKENIZER, digits, make_model, rows
from tests.rl.trainers_for_tests import BANDITS, SMALL, Bandit, make, pull


@pytest.mark.parametrize("kind", [GRPOTrainer, PPOTrainer])
def test_the_reward_rises(kind):
    config = (GRPOConfig if kind is GRPOTrainer else PPOConfig)(
        prompts_per_step=8, rollouts=4, epochs=2, mini_batches=2, lr=1e-2
    )
    with make(kind, config=config, optimizer=None, eval_data=rows(5), eval_interval=12) as trainer:
        history = trainer.train(steps=12).history
        scores = trainer.evaluate()
    assert history[0]["reward"] < 0.8
    assert sum(line["reward"] for line in history[-3:]) / 3 > 0.9
    assert history[-1]["val_reward"] == scores["reward"] > 0.9


def test_a_step_leaves_its_numbers_and_settings_in_the_run_directory():
    with make(run_dir="run") as trainer:
        result = trainer.train(steps=2)
    lines = [json.loads(line) for line in open("run/metrics.jsonl")]
    assert [line["epoch"] for line in lines] == [0, 1]
    assert lines[1]["reward"] == result["reward"]
    assert result["counts"]["sequences"] == 16
    assert result["counts"]["prompts"] == 4
    assert result["counts"]["tokens"] == pytest.approx(result["response_tokens"] * 16)
    assert result["timing"].keys() == {"data", "rollout", "reward", "log_prob", "update"}
    assert result["loss"] == pytest.approx(result["policy_loss"] + 0.001 * result["kl"])
    described = json.load(open("run/run.json"))["config"]
    assert described["algorithm"]["kl"]["coef"] == 0.001
    assert described["sampling"]["max_new_tokens"] == 6


def test_with_one_update_a_step_old_log_probs_are_the_updates_own():
    """One pass less; the same as making them and then updating."""
    with make() as trainer:
        saving = trainer.train(steps=3)
        weights = trainer.model_weights()
    with make(on_error="skip") as trainer:  # needs the old ones first, to skip what is NaN
        plain = trainer.train(steps=3)
        again = trainer.model_weights()
    assert saving["kl"] == pytest.approx(plain["kl"])
    for name, value in weights.items():
        torch.testing.assert_close(again[name], value)


def test_autocast_to_bfloat16_learns_too():
    config = GRPOConfig(prompts_per_step=4, rollouts=4, epochs=2)
    with make(precision="bf16", config=config) as trainer:
        result = trainer.train(steps=2)
        weights = trainer.model_weights()
    assert math.isfinite(result["loss"])
    assert result["grad_norm"] > 0
    assert {value.dtype for value in weights.values()} == {torch.float32}


# -- resuming -------------------------------------------------------------------------------------


def loaders(rank, world_size):
    return [rows(12)[i : i + 4] for i in range(0, 12, 4)]


@pytest.mark.parametrize("kind", [GRPOTrainer, PPOTrainer])
@pytest.mark.parametrize("data", [rows(10), loaders], ids=["list", "loader"])
def test_a_resumed_run_goes_on_bit_for_bit(kind, data):
    config = (GRPOConfig if kind is GRPOTrainer else PPOConfig)(
        prompts_per_step=4, rollouts=2, epochs=2, mini_batches=2,
        kl=KLPenalty(0.1, target=0.01, horizon=100),
    )  # fmt: skip
    settings = {"config": config, "data": data, "callbacks": [Checkpoint(every=3)]}
    with make(kind, run_dir="whole", **settings) as trainer:
        wanted = trainer.train(steps=5)
        weights = trainer.model_weights()
    with make(kind, run_dir="cut", **settings) as trainer:
        trainer.train(steps=3)
    # Another seed: what was random in the run is the run's own.
    with make(kind, run_dir="cut", **{**settings, "seed": 99}) as trainer:
        result = trainer.train(steps=5, resume=True)
        again = trainer.model_weights()
    for name, value in weights.items():
        assert torch.equal(again[name], value), name
    for mine, theirs in zip(result.history, wanted.history, strict=True):
        for name in ("reward", "loss", "kl", "kl_coef", "grad_norm", "counts"):
            assert mine[name] == theirs[name], name
    assert wanted.history[4]["kl"] > 0
    assert len({line["kl_coef"] for line in wanted.history}) > 1


def test_a_resumed_run_has_the_rate_of_its_own_config():
    made = [make(config=GRPOConfig(**SMALL, lr=lr), optimizer=None, run_dir="r") for lr in (1, 0)]
    with made[0] as trainer:
        trainer.train(steps=1)
        weights = trainer.model_weights()
        trainer.save_checkpoint()
    with made[1] as trainer:
        trainer.train(steps=2, resume=True)
        for name, value in trainer.model_weights().items():
            assert torch.equal(value, weights[name])


@pytest.mark.filterwarnings("ignore:resuming a run of")
def test_loaders_without_memory_drop_as_many_steps_on_another_number_of_workers(tmp_path):
    log = tmp_path / "seen"

    def reward(row, response):
        with log.open("a") as file:
            file.write(row["prompt"])
        return 0.0

    def make_loader(rank, world_size):
        return rows(12)[rank::world_size]

    def made(workers):
        return make(
            data=make_loader, reward=reward, config=GRPOConfig(prompts_per_step=4, rollouts=1),
            num_workers=workers, sync="weights", run_dir="run",
        )  # fmt: skip

    with made(2) as trainer:
        trainer.train(steps=1)
        trainer.save_checkpoint()
    for workers in (1, 4):
        first = log.read_text()
        with made(workers) as trainer, pytest.warns(UserWarning, match="state_dict"):
            trainer.train(steps=3, resume=True)
        seen = log.read_text().split("=")[:-1]
        assert sorted(seen) == sorted(row["prompt"][:-1] for row in rows(12))  # each once
        log.write_text(first)


def test_a_learning_rate_schedule_reaches_the_optimizer():
    with make(callbacks=[LRSchedule(lambda epoch: 0.0)]) as trainer:
        trainer.train(steps=1)
        weights = trainer.model_weights()
    torch.manual_seed(7)
    for name, value in CausalLM(make_model(), TOKENIZER).state_dict().items():
        assert torch.equal(weights[name], value)


# -- custom policies ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GRPOTrainer, PPOTrainer])
def test_a_policy_class_with_rows_it_decodes_itself(kind):
    config = (GRPOConfig if kind is GRPOTrainer else PPOConfig)(
        prompts_per_step=2, rollouts=16, kl=KLPenalty(0)
    )
    with make(
        kind, policy=Bandit, reward=pull, data=BANDITS, config=config, eval_data=BANDITS
    ) as trainer:
        history = trainer.train(steps=25).history
        assert 0 <= trainer.evaluate()["pulled"] <= 2  # what else the reward function tells
        weights = trainer.model_weights()
    assert weights["table"].argmax(-1).tolist() == [0, 2]
    assert history[-1]["reward"] > 0.9
    assert "kl" not in history[-1]  # no reference model
    if kind is PPOTrainer:
        assert (weights["worth"] > 0.5).all()


class Checkpointed(Bandit):
    """With a layer as those of transformers are with gradient checkpointing."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Dropout())
        self.layer.gradient_checkpointing = True

    def _logits(self, rows):
        assert self.layer.training == torch.is_grad_enabled()  # in updates, and nowhere else
        assert not self.layer[0].training
        return super()._logits(rows)


def test_layers_with_gradient_checkpointing_are_in_training_in_updates_alone():
    with make(policy=Checkpointed, reward=pull, data=BANDITS) as trainer:
        trainer.train(steps=2)


def test_what_a_policy_lacks_is_named():
    with pytest.raises(ActorDiedError, match=r"\bLinear\b"):
        make(policy=lambda: torch.nn.Linear(1, 1)).train(steps=1)
    with pytest.raises(ActorDiedError, match=r"(?s)torch\.nn\.Module.*3"):
        make(policy=lambda: 3).train(steps=1)
    encoder = type("T5", (torch.nn.Module,), {"forward": lambda s, input_ids, decoder_input_ids: 1})
    with pytest.raises(ActorDiedError, match=r"\bT5\b"):
        make(policy=encoder).train(steps=1)
    without = type("NoValues", (torch.nn.Module,), {"generate": 1, "log_probs": 1})
    with pytest.raises(ActorDiedError, match=r"NoValues.*values\(\)"):
        make(PPOTrainer, policy=without).train(steps=1)
    with pytest.raises(ActorDiedError, match="value_head=True"):
        make(PPOTrainer, policy=lambda: CausalLM(make_model(), TOKENIZER)).train(steps=1)

    class Own(torch.nn.Module):
        generation_config = type("Config", (), {"eos_token_id": 2})

        def forward(self, input_ids):
            return input_ids

    with pytest.raises(ActorDiedError, match=r"config\.hidden_size.*Own"):
        make(PPOTrainer, policy=Own).train(steps=1)

    class Wide(Bandit):
        def log_probs(self, batch):
            return super().log_probs(batch)[:, :1].expand(-1, 5)

    with pytest.raises(ValueError, match=r"Wide.*log_probs.*\(\d+, 1\).*\(\d+, 5\)"):
        make(policy=Wide, reward=pull, data=BANDITS * 2).train(steps=1)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"data": []},
        {"data": ["text"]},
        {"data": 5},
        {"data": "train.parquet"},
        {"data": {"prompt": ["1+1="]}},
        {"policy": make_model()},
        {"sampling": {"max_new_tokens": 3}},
        {"eval_sampling": 3},
        {"reward_timeout": 0},
        {"reward": None},
        {"reward": lambda source, text, truth: 0.0},
        {"policy": lambda size: make_model()},
        {"data": lambda rank: rows(4)},
        {"sync": "both"},
        {"num_workers": 5},
        {"eval_every_steps": 1, "eval_interval": 1, "eval_data": rows(4)},
        {"eval_every_steps": 0},
        {"mode": "async", "sync": "weights"},
        {"eval_interval": 1},
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(arguments, raises):
    settings = {"tokenizer": TOKENIZER, "config": GRPOConfig(**SMALL), **arguments}
    data, reward = settings.pop("data", rows(4)), settings.pop("reward", digits)
    with raises((TypeError, ValueError)):
        GRPOTrainer(settings.pop("policy", make_model), reward, data, **settings)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"config": PPOConfig()}, "GRPOConfig"), ({"momentun": 1}, "'momentun'")],
)
def test_config_of_a_different_trainer_and_unknown_option_are_refused(options, name):
    with pytest.raises(TypeError, match=name):
        GRPOTrainer(make_model, digits, rows(4), tokenizer=TOKENIZER, **options)


@pytest.mark.parametrize(
    "made",
    [
        lambda: GRPOConfig(rollouts=0),
        lambda: GRPOConfig(agg="mean"),
        lambda: GRPOConfig(lr=-1),
        lambda: GRPOConfig(dual_clip=1),
        lambda: GRPOConfig(kl=KLPenalty(place="reward")),
        lambda: GRPOConfig(kl=0.1),
        lambda: PPOConfig(gamma=1.5),
        lambda: KLPenalty(-1),
        lambda: KLPenalty(0, target=1),
        lambda: KLPenalty(kind="k4"),
        lambda: KLPenalty(target="1"),
        lambda: GRPOConfig(clip_norm="1"),
        lambda: GRPOConfig(rollouts=True),
        lambda: Sampling(top_p=0),
        lambda: Sampling(stop_ids=5),
        lambda: Sampling(stop_ids=("end",)),
    ],
)
def test_settings_are_checked_when_they_are_made(made, raises):
    with raises((TypeError, ValueError)):
        made()


def test_numbers_of_numpy_are_numbers():
    config = GRPOConfig(rollouts=np.int64(4), lr=np.float32(0.5), dual_clip=np.float64(3))
    assert (config.rollouts, config.lr) == (4, 0.5)


class Columns:
    """Dataset that isn't a list: rows can only be read one by one."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        assert type(i) is int, i  # neither a slice nor a number of numpy's
        return rows(3)[i]


def test_rows_need_not_be_a_list(raises):
    with make(data=Columns(), eval_data=Columns()) as trainer:
        trainer.train(steps=1)
        assert trainer.evaluate() == trainer.evaluate(Columns()) == trainer.evaluate(rows(3))
        with raises(ValueError):
            trainer.evaluate([])
        with raises(TypeError):
            trainer.evaluate(lambda rank, world_size: rows(3))
    with raises(TypeError):
        make(data=[*rows(3), "1+1="]).train(steps=1)


def test_the_seed_is_that_of_datasets_made_in_workers_too(monkeypatch):
    def make_loader(rank, world_size):
        from miniray.data import DataLoader, IndexedDataset

        data = IndexedDataset(rows(4), rank=rank, world_size=world_size, shuffle=True)
        return DataLoader(data, 2, transform=lambda row: {**row, "seed": data.seed})

    def reward(row, response):
        return {"reward": 0, "seen": row["seed"]}

    monkeypatch.setenv("MINIRAY_RUN_SEED", "77")
    for seed, wanted in [(5, 5), (None, 77)]:
        config = GRPOConfig(rollouts=4)
        with make(data=make_loader, reward=reward, seed=seed, config=config) as trainer:
            assert trainer.train(steps=1)["seen"] == wanted


def test_evaluate_before_train_raises(raises):
    trainer = make()
    with raises(RuntimeError):
        trainer.evaluate()


def test_gradients_need_workers_that_run_at_the_same_time():
    with pytest.raises(NotImplementedError, match='backend="local"'):
        make(num_workers=2).train(steps=1)


@pytest.mark.parametrize(
    "option",
    [
        {"lr": 3},
        {"top_k": 3},
        {"data": rows(3)},
    ],
)
def test_what_nobody_takes_is_refused_by_train(option, raises):
    with make() as trainer, raises(TypeError):
        trainer.train(steps=1, **option)


def test_hooks_and_methods_of_a_subclass_get_what_train_is_given():
    seen = []

    class Trainer(GRPOTrainer):
        def create_worker(self, worker_id, extra, **kwargs):
            seen.append(extra)
            return super().create_worker(worker_id)

    class Tells(Callback):
        def on_epoch_end(self, trainer, epoch, result, tag=None, **kwargs):
            seen.append(tag)

    with make(Trainer, callbacks=[Tells()], config=GRPOConfig(**SMALL)) as trainer:
        trainer.train(steps=1, extra=5, tag="a")
    assert seen == [5, "a"]


@pytest.mark.parametrize(
    "option",
    [
        {"sync_interval": 2},
        {"momentum": 0.9},
        {"num_worker": 2},
        {"rollouts": 2},
        {"max_steps": 2},
    ],
)
def test_options_that_would_be_ignored_are_refused(option, raises):
    with raises(TypeError):
        make(**option)
