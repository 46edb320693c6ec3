"""Steps of RL runs: length, records, hooks, checkpoints, evaluations, resume and preemption."""

import contextlib
import json
import os
import signal

import pytest

from miniray.rl import GRPOConfig, GRPOTrainer, KLPenalty, PPOConfig, PPOTrainer, Sampling
from miniray.train import Callback, Checkpoint
from tests.rl.models_for_tests import TOKENIZER, Momentum, digits, make_model, rows

pytestmark = pytest.mark.timeout(240)  # many processes, and the machine may be busy

SYNCS = ["grad", "weights"]
KINDS = {GRPOTrainer: GRPOConfig, PPOTrainer: PPOConfig}


def make(sync="grad", kind=GRPOTrainer, *, data=None, config=None, reward=digits, **options):
    config = config or KINDS[kind](
        prompts_per_step=None if callable(data) else 4, rollouts=2, epochs=2, kl=KLPenalty(0.1)
    )
    settings = {"num_workers": 2, "seed": 3, "progress": False, "optimizer": Momentum, **options}
    return kind(
        make_model, reward, data or rows(18), tokenizer=TOKENIZER, config=config, sync=sync,
        sampling=Sampling(max_new_tokens=6), **settings,
    )  # fmt: skip


def get_bits(trainer):
    weights = trainer.call_workers("get_weights")
    return [{key: w.numpy().tobytes() for key, w in each.items()} for each in weights]


TIMES = ("seconds", "step_seconds", "tokens_per_second", "timing")


def without_times(history):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in history]


class Seen(Callback):
    def __init__(self):
        self.steps, self.scores = [], []

    def on_step_end(self, trainer, step, metrics, **kwargs):
        assert trainer.state.step == step == metrics["step"]
        self.steps.append((step, metrics["lr"], metrics["step_seconds"] > 0))

    def on_evaluate_end(self, trainer, step, scores, **kwargs):
        self.scores.append((step, scores))


def list_steps(trainer):
    return [info.path.name for info in trainer.checkpoints.list()]


@pytest.mark.parametrize(
    ("sync", "kind"),
    [
        ("grad", GRPOTrainer),
        ("weights", GRPOTrainer),
        pytest.param("grad", PPOTrainer, marks=pytest.mark.slow),
        pytest.param("weights", PPOTrainer, marks=pytest.mark.slow),
    ],
)
def test_run_in_parts_has_the_bits_of_a_whole_one(local_engine, sync, kind):
    """18 prompts are 5 steps: both interruptions are inside a pass over the prompts."""
    seen = Seen()
    options = {"eval_data": rows(3), "eval_every_steps": 2}
    with make(sync, kind, callbacks=seen, **options) as trainer:
        history = trainer.train(steps=6).history
        whole = without_times(history), get_bits(trainer)
        assert trainer.run.read_metrics() == history
    assert [line["step"] for line in history] == [1, 2, 3, 4, 5, 6]
    assert seen.steps == [(step, 0.3, True) for step in range(1, 7)]
    assert [step for step, _ in seen.scores] == [2, 4, 6]
    assert [scores["val_reward"] for _, scores in seen.scores] == [
        line["val_reward"] for line in history if "val_reward" in line
    ]
    assert all(line["tokens_per_second"] > 0 and line["grad_norm"] > 0 for line in history)

    options |= {"run_dir": "parts", "callbacks": [Checkpoint(every_steps=3)]}
    for total in (2, 5, 6, 6):
        with make(sync, kind, **options) as trainer:
            trainer.train(steps=total, resume="auto")
            assert (trainer.state.step, trainer.epoch) == (total, total)
            parts = without_times(trainer.history), get_bits(trainer)
            saved = list_steps(trainer)
    assert parts == whole
    # Every third step, and the end of each call.
    assert saved == ["epoch-00000002", "epoch-00000004", "epoch-00000005"]


def test_checkpoint_intervals_count_steps(local_engine):
    for number, (checkpoint, steps) in enumerate(
        [
            (Checkpoint(keep_last=None), [1, 2, 3, 4, 5]),
            (Checkpoint(every=2, keep_last=None), [2, 4, 5]),
            (Checkpoint(every_steps=2, keep_last=None), [2, 4, 5]),
            (Checkpoint(every=3, every_steps=2, keep_last=None), [2, 3, 4, 5]),
            (Checkpoint(every_minutes=60, keep_last=None), [5]),
            (Checkpoint(every_minutes=1e-9, keep_last=None), [1, 2, 3, 4, 5]),
        ]
    ):
        options = {"run_dir": str(number), "callbacks": checkpoint}
        with make(num_workers=1, **options) as trainer:
            trainer.train(steps=5)
            assert list_steps(trainer) == [f"epoch-{step - 1:08d}" for step in steps]


def test_a_reward_may_be_named_like_a_count_of_steps(local_engine):
    """``num_steps`` of a worker's result is the number of optimizer steps elsewhere."""

    def reward(row, response):
        return {"reward": digits(row, response), "num_steps": 7.0}

    with make(num_workers=1, reward=reward) as trainer:
        assert trainer.train(steps=2)["num_steps"] == 7.0
        assert trainer.state.step == 2


# -- data ------------------------------------------------------------------------------------------


class Loader:
    """Loader with a state that yields batches in a random but known order."""

    def __init__(self, rank):
        self.rank, self.epoch, self.taken = rank, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        while self.taken < 4:
            self.taken += 1
            first = (self.epoch * 5 + self.rank * 3 + self.taken) % 16
            yield rows(20)[first : first + 2]
        self.taken = 0


class Stateful(Loader):
    def state_dict(self):
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state):
        self.epoch, self.taken = state["epoch"], state["taken"]


def make_miniray_loader(rank, world_size):
    from miniray.data import DataLoader, IndexedDataset

    data = IndexedDataset(rows(18), rank=rank, world_size=world_size, shuffle=True, seed=5)
    return DataLoader(data, batch_size=2)


def make_torch_loader(rank, world_size):
    from torch.utils.data import DataLoader, Subset

    part = Subset(rows(18), range(rank, 18, world_size))
    return DataLoader(part, batch_size=2, shuffle=True, collate_fn=list)


LOADERS = {
    "plain": lambda rank, world_size: Loader(rank),
    "stateful": lambda rank, world_size: Stateful(rank),
    "miniray": make_miniray_loader,
    "torch": make_torch_loader,
}


@pytest.mark.parametrize(
    ("sync", "loader"),
    [
        ("grad", "miniray"),
        ("weights", "stateful"),
        *(
            pytest.param(sync, loader, marks=pytest.mark.slow)
            for sync in SYNCS
            for loader in LOADERS
            if (sync, loader) not in [("grad", "miniray"), ("weights", "stateful")]
        ),
    ],
)
def test_resume_inside_a_pass_over_loaders(local_engine, sync, loader):
    data = LOADERS[loader]
    with make(sync, data=data) as trainer:
        whole = without_times(trainer.train(steps=7).history), get_bits(trainer)
    for total in (3, 7):
        with make(sync, data=data, run_dir="parts", callbacks=Checkpoint()) as trainer:
            trainer.train(steps=total, resume="auto")
            parts = without_times(trainer.history), get_bits(trainer)
    assert parts == whole


# -- preemption ------------------------------------------------------------------------------------


@pytest.fixture
def own_handler():
    """A handler for SIGTERM, without which a preempted run would end this process."""
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize(
    ("sync", "number"),
    [
        ("grad", signal.SIGTERM),
        pytest.param("grad", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("weights", signal.SIGTERM, marks=pytest.mark.slow),
        ("weights", signal.SIGINT),
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint_of_its_step(
    local_engine, own_handler, sync, number
):
    driver = os.getpid()

    def signaling(row, response):
        if row["prompt"] == "7+1=" and not os.path.exists(path):
            with contextlib.suppress(FileExistsError):
                open(path, "x").close()
                os.kill(driver, number)
        return digits(row, response)

    path = os.path.abspath("signaled")
    options = {"name": "stopped", "reward": signaling}
    with make(sync) as trainer:
        whole = without_times(trainer.train(steps=8).history), get_bits(trainer)
    raised = SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    with pytest.raises(raised), make(sync, **options) as trainer:
        trainer.train(steps=8, resume="auto")
    state = json.loads(open("runs/stopped/run.json").read())
    assert state["state"] == ("preempted" if number == signal.SIGTERM else "interrupted")
    assert 1 <= state["step"] < 8
    assert os.listdir("runs/stopped/checkpoints") == [f"epoch-{state['step'] - 1:08d}"]
    with make(sync, **options) as trainer:
        trainer.train(steps=8, resume="auto")
        assert (without_times(trainer.history), get_bits(trainer)) == whole
    assert own_handler == ([number] if number == signal.SIGTERM else [])
