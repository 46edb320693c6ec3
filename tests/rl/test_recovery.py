"""A worker that is lost costs a step, whichever it is and whatever it does at that moment."""

import os
import signal
import time

import pytest
import torch

from miniray.errors import ActorDiedError, WorkerTimeoutError
from miniray.rl import GRPOConfig, GRPOTrainer, KLPenalty, RLWorker, Sampling
from miniray.train import Callback, LRSchedule
from tests.rl.models_for_tests import TOKENIZER, Momentum, TinyLM, digits, rows

pytestmark = pytest.mark.timeout(240)  # many processes, and the machine may be busy

STEPS = 4


def make_model():
    torch.manual_seed(7)
    return TinyLM(width=80)  # its state is over 100 KB, so it is kept in shared memory


class Killed(RLWorker):
    """Sends itself a signal at one place, once: a file names rank, step and phase."""

    order = ""  # path of a file

    def __init__(self, worker_id, setup):
        super().__init__(worker_id, setup)
        self.step = 0

    def _is_ordered(self, phase, step):
        place = f"{self.rank} {step} {phase}"
        is_here = os.path.exists(self.order) and open(self.order).read() == place
        if is_here:
            os.remove(self.order)
        return is_here

    def _kill_if(self, phase, step):
        if self._is_ordered(phase, step):
            os.kill(os.getpid(), SIGNALS.get(phase, signal.SIGKILL))

    def train_epoch(self, epoch, seed, kl_coef):
        self.step = epoch
        torch.rand(1)  # advance the random state
        return super().train_epoch(epoch, seed, kl_coef)

    def _rollout(self, rows, step, *arguments):
        self._kill_if("rollout", step)
        self._kill_if("hang", step)
        return super()._rollout(rows, step, *arguments)

    def _reward(self, rollouts, step, metrics):
        if self._is_ordered("reward", step):
            hanging.append(step)
        super()._reward(rollouts, step, metrics)

    def _advantages(self, rollouts, kl_coef, step, metrics):
        super()._advantages(rollouts, kl_coef, step, metrics)
        self._kill_if("update", step)
        if self.optimizer.step.__name__ != "killing":  # between two updates of a step
            plain = self.optimizer.step

            def killing():
                plain()
                self._kill_if("optimizer", self.step)

            self.optimizer.step = killing

    def get_snapshot(self, is_source):
        self._kill_if("snapshot", self.step)
        return super().get_snapshot(is_source)

    def evaluate(self, *arguments):
        self._kill_if("evaluate", self.step)
        self._kill_if("stop in evaluate", self.step)
        return super().evaluate(*arguments)

    def get_source(self):
        self._kill_if("checkpoint", self.step)
        return super().get_source()

    def get_random(self):
        return torch.get_rng_state(), os.getpid()


SIGNALS = {"hang": signal.SIGSTOP, "stop in evaluate": signal.SIGSTOP}
hanging = []  # in the process of a worker whose reward function hangs


def stuck_digits(row, response):
    while hanging:
        time.sleep(0.1)
    return digits(row, response)


def slow_digits(row, response):
    """Take longer than ``hang_timeout``, once."""
    if not os.path.exists("slow"):
        open("slow", "w").close()
        time.sleep(4)
    return digits(row, response)


class Kill(Callback):
    """Kills a worker between two steps, and counts what happens."""

    def __init__(self, rank=None):
        self.rank, self.replaced, self.steps = rank, [], []

    def on_step_end(self, trainer, step, metrics, **kwargs):
        self.steps.append(step)

    def on_epoch_end(self, trainer, epoch, result, **kwargs):
        if self.rank is not None and epoch == 1:
            _, pid = trainer.call_workers("get_random")[self.rank]
            os.kill(pid, signal.SIGKILL)
            self.rank = None

    def on_worker_replaced(self, trainer, worker_id):
        self.replaced.append(worker_id)


def run(kill=None, *, workers=2, callback=None, reward=digits, **options):
    """Train, and return the trainer's history, weights and random states."""
    path = os.path.abspath("kill")
    if kill is not None:
        open(path, "w").write(kill)

    class Mortal(Killed):
        order = path

    class Trainer(GRPOTrainer):
        worker_class = Mortal

    callback = callback or Kill()
    config = GRPOConfig(
        prompts_per_step=4, rollouts=2, epochs=2, kl=KLPenalty(0.1, target=0.01, horizon=50)
    )
    with Trainer(
        make_model, reward, rows(10), tokenizer=TOKENIZER, config=config,
        sampling=Sampling(max_new_tokens=6), optimizer=Momentum, num_workers=workers, seed=3,
        progress=False, callbacks=[LRSchedule(lambda step: 0.3 / (step + 1)), callback],
        **{"max_failures": 1, **options},
    ) as trainer:  # fmt: skip
        result = trainer.train(steps=STEPS)
        found = trainer.call_workers("get_random")
        weights = trainer.call_workers("get_weights")
        events = [e for e in trainer.run.read_events() if e["event"] == "ranks_restarted"]
    assert not os.path.exists(path)
    states = [state.numpy().tobytes() for state, _ in found]
    bits = [{key: w.numpy().tobytes() for key, w in each.items()} for each in weights]
    return result.history, bits, states, events


TIMES = ("seconds", "step_seconds", "tokens_per_second", "timing", "restarts")


def without_times(history):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in history]


@pytest.fixture(scope="module")
def whole(local_engine, tmp_path_factory):
    """A run without losses."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("whole"))
    yield run(max_failures=0)
    os.chdir(before)


def check_same(found, whole):
    assert without_times(found[0]) == without_times(whole[0])
    assert found[1] == whole[1]
    assert found[2] == whole[2]


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        (0, "rollout"),
        (1, "update"),
        (0, "optimizer"),
        *(
            pytest.param(rank, phase, marks=pytest.mark.slow)
            for rank, phase in [
                *((1, "rollout"), (0, "update"), (1, "optimizer")),
                *((0, "snapshot"), (1, "snapshot")),
            ]
        ),
    ],
)
def test_worker_killed_in_a_step_costs_that_step(whole, rank, phase):
    callback = Kill()
    found = run(f"{rank} 2 {phase}", callback=callback)
    check_same(found, whole)
    (event,) = found[3]
    assert (event["rank"], event["resumed_at_step"]) == (rank, 2)
    assert (event["died_at_step"], event["lost_steps"]) == (3, 1)
    assert event["seconds"] > 0
    assert "SIGKILL" in event["message"]
    assert [line.get("restarts") for line in found[0]] == [None, None, 1, None]
    assert sorted(callback.replaced) == [0, 1]
    assert callback.steps == [1, 2, 3, 4]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_worker_killed_between_two_steps_costs_none(whole, rank):
    callback = Kill(rank)
    found = run(callback=callback)
    check_same(found, whole)
    (event,) = found[3]
    assert (event["rank"], event["resumed_at_step"], event["lost_steps"]) == (rank, 2, 0)
    assert callback.steps == [1, 2, 3, 4]


@pytest.mark.slow
def test_two_losses_within_max_failures(whole):
    found = run("1 3 update", callback=Kill(0), max_failures=2)
    check_same(found, whole)
    assert [event["rank"] for event in found[3]] == [0, 1]


@pytest.mark.slow
def test_only_worker_restarts_from_its_own_state(whole):
    alone = run(workers=1, max_failures=0)
    check_same(run("0 2 optimizer", workers=1), alone)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_worker_that_is_stopped_is_found_at_once(whole, rank):
    start = time.monotonic()
    found = run(f"{rank} 2 hang")
    assert time.monotonic() - start < 60  # not hang_timeout, and not group_timeout
    check_same(found, whole)
    (event,) = found[3]
    assert (event["rank"], event["died_at_step"], event["lost_steps"]) == (rank, 3, 1)
    assert "SIGSTOP" in event["reason"]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_worker_that_hangs_in_its_reward_function_is_found(whole, rank):
    options = {"reward": stuck_digits, "reward_timeout": None, "hang_timeout": 3.0}
    found = run(f"{rank} 2 reward", **options)
    check_same(found, whole)
    (event,) = found[3]
    assert (event["rank"], event["died_at_step"]) == (rank, 3)
    assert f"rank {rank} is in reward, step 2" in event["reason"]
    assert "in stuck_digits" in event["reason"]


@pytest.mark.slow
def test_reward_function_within_its_timeout_does_not_hang(whole):
    found = run(reward=slow_digits, reward_timeout=30.0, hang_timeout=1.0)
    check_same(found, whole)
    assert found[3] == []


@pytest.mark.slow
def test_worker_that_is_stopped_in_an_evaluation_is_found(whole):
    found = run("0 2 stop in evaluate", eval_data=rows(5), eval_every_steps=3)
    assert found[1:3] == whole[1:3]
    assert [(event["rank"], event["resumed_at_step"]) for event in found[3]] == [(0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_worker_killed_in_an_evaluation_or_checkpoint(whole, rank):
    evaluating = {"eval_data": rows(5), "eval_every_steps": 3}
    found = run(f"{rank} 2 evaluate", **evaluating)
    assert found[1:3] == whole[1:3]
    assert [event["resumed_at_step"] for event in found[3]] == [3]
    plain = run(**evaluating)
    assert without_times(found[0]) == without_times(plain[0])

    class Saving(Kill):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            if epoch == 2:
                trainer.save_checkpoint()

    found = run(f"{rank} 2 checkpoint", callback=Saving(), run_dir="saved")
    check_same(found, whole)
    assert [event["lost_steps"] for event in found[3]] == [0]
    os.rename("saved", "moved")  # resume in a new run, and lose a worker at once
    check_same(run(f"{rank} 3 rollout", resume="moved", run_dir="new"), whole)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_loss_beyond_max_failures_names_the_worker(local_engine, rank):
    with pytest.raises(ActorDiedError) as caught:
        run(f"{rank} 1 rollout", max_failures=0)
    error = caught.value
    assert (error.worker, error.step, error.signal) == (rank, 1, "SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["hang", "reward"])
def test_hang_without_max_failures_names_the_worker(local_engine, phase):
    options = {"reward": stuck_digits, "reward_timeout": None, "hang_timeout": 3.0}
    with pytest.raises(WorkerTimeoutError) as caught:
        run(f"0 1 {phase}", max_failures=0, **options)
    error = caught.value
    assert (error.worker, error.rank, error.step, error.pid is None) == (0, 0, 1, False)
