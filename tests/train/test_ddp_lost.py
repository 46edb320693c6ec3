"""A rank that is lost outside of an epoch: it costs the call it was in, and no bit of the run."""

import os
import signal

import pytest

import miniray
from miniray.errors import ActorDiedError, WorkerTimeoutError
from miniray.train import Callback, DDPTrainer

torch = pytest.importorskip("torch")

from torch import distributed, nn  # noqa: E402

from tests.train.ddp_for_tests import SEED, Stepper, read_events  # noqa: E402

pytestmark = pytest.mark.timeout(120)  # processes start slowly on a machine that is busy


@pytest.fixture(autouse=True, scope="module")
def engine():
    """One engine for all: its first worker loads torch for the others."""
    with miniray.init(backend="local", num_workers=2):
        yield


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """Run in an empty directory and keep the engine running."""
    monkeypatch.chdir(tmp_path)


class Mortal(Stepper):
    """Worker of which one rank is killed once, when it reaches ``where`` for the ``when``-th time.

    Dropout in training and the loader in evaluation both draw random numbers.
    """

    def __init__(self, worker_id, where="", when=1, victim=1):
        super().__init__(worker_id, n=32)
        self.model.insert(1, nn.Dropout(0.3))
        self.where, self.left = where if worker_id == victim else "", when
        self.model.register_state_dict_pre_hook(lambda *_: self.at("weights"))
        self.at("init")

    def at(self, here):
        self.left -= here == self.where
        if here == self.where and not self.left and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def validation_step(self, batch, batch_idx):
        self.at("evaluate")
        return super().validation_step(batch, batch_idx)

    def get_state(self):
        self.at("state")
        return {}

    def set_state(self, state):
        self.at("set_state")

    def met(self, factor):
        """A call of the user's in which the ranks need each other."""
        total = torch.ones(1_000_000)
        distributed.all_reduce(total)
        self.at("met")
        distributed.all_reduce(total)
        return total[0].item() * factor

    def set_lr(self, lr):
        self.at("set_lr")
        self.optimizer.param_groups[0]["lr"] = lr

    def pid(self):
        return os.getpid()


class Busy(DDPTrainer):
    """Does after each epoch what can be done there."""

    def on_epoch_end(self, epoch, result):
        self.call_workers("set_lr", 0.01 / (epoch + 1))
        result["met"] = self.call_workers("met", 2)
        self.save_checkpoint()
        self.save_final_model()


def run(kind=Busy, epochs=2, shard="none", callbacks=(), max_failures=0, **kwargs):
    """(what each epoch gave, weights, events)"""
    options = {"worker": Mortal, "seed": SEED, "progress": False, "eval_interval": 1}
    options["snapshot_every"] = None  # it would call get_state() more often
    with kind(2, shard=shard, callbacks=callbacks, max_failures=max_failures, **options) as trainer:
        result = trainer.train(epochs=epochs, **kwargs)
        keys = ("loss", "val_loss", "val_num_samples", "met")
        told = [tuple(record.get(key) for key in keys) for record in result.history]
        return told, trainer.model_weights(), read_events(trainer)


def train_undisturbed(folder, shard):
    before = os.getcwd()
    os.chdir(folder)
    told, weights, events = run(shard=shard)
    os.chdir(before)
    assert not events
    assert [met for *_, met in told] == [[8.0, 8.0]] * 2
    return told, weights


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), "none")


@pytest.fixture(scope="module")
def undisturbed_shards(tmp_path_factory):
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), "full")


def with_slow(fast, slow):
    """Return parameters for ``make test``, one per code path, and more for ``make test-slow``."""
    return [*fast, *(pytest.param(*values, marks=pytest.mark.slow) for values in slow)]


#: With ``max_failures``, rank 0 returns its weights after setup (1), the epoch (2), set_lr (3) and
#: met (4), for the checkpoint (5) and the model (6), and so on. All ranks return their state then,
#: except for the model, and also after evaluations.
PLACES = with_slow(
    [("init", 1, 1), ("evaluate", 1, 1), ("met", 2, 0), ("weights", 5, 0)],
    [
        *[("init", 1, 0), ("evaluate", 1, 0), ("set_lr", 1, 0), ("met", 1, 1)],
        *[("weights", when, 0) for when in (1, 6)],
        *[("state", when, 1) for when in (1, 3, 6)],
    ],
)


def find_errors(caplog):
    """Return what the driver logged, such as failed calls whose results were never read."""
    return [record.getMessage() for record in caplog.records if record.name == "miniray"]


@pytest.mark.parametrize(("where", "when", "victim"), PLACES)
def test_all_goes_on_with_the_same_bits(undisturbed, caplog, where, when, victim):
    check_same("none", undisturbed, where, when, victim)
    assert find_errors(caplog) == []


@pytest.mark.parametrize(
    ("where", "when", "victim"),
    with_slow(
        [("weights", 2, 1)],
        [("evaluate", 1, 1), ("met", 2, 0), ("weights", 5, 0), ("state", 3, 1)],
    ),
)
def test_where_each_holds_a_part_of_the_model_too(undisturbed_shards, caplog, where, when, victim):
    """All are asked for the weights then, and wait for each other."""
    check_same("full", undisturbed_shards, where, when, victim)
    assert find_errors(caplog) == []


def check_same(shard, expected, where, when, victim):
    told, weights, events = run(shard=shard, max_failures=1, where=where, when=when, victim=victim)
    assert [event["event"] for event in events] == ["worker_failed", "ranks_restarted"]
    assert events[0]["worker"] == victim
    assert "SIGKILL" in events[0]["reason"]
    assert told == expected[0]
    assert all(torch.equal(weights[key], value) for key, value in expected[1].items())


@pytest.mark.parametrize(
    ("shard", "where", "when", "victim"),
    with_slow(
        [("none", "met", 1, 1)],
        [
            *[("none", where, 1, 1) for where in ("init", "evaluate", "set_lr", "state")],
            *[("none", "weights", 1, 0), ("full", "weights", 1, 1), ("full", "weights", 2, 0)],
        ],
    ),
)
def test_without_failures_to_spare_the_one_error_is_the_lost_ranks(
    caplog, shard, where, when, victim
):
    with pytest.raises(ActorDiedError) as error:
        run(shard=shard, where=where, when=when, victim=victim)
    assert (error.value.rank, error.value.signal) == (victim, "SIGKILL")
    assert "Connection" not in str(error.value)
    assert find_errors(caplog) == []


class LookAgain(Callback):
    """Asks the ranks for something while they are started again."""

    def __init__(self):
        self.heard = []

    def on_worker_replaced(self, trainer, worker_id):
        if worker_id == 0:
            self.heard.append(trainer.call_workers("met", 1))


@pytest.mark.slow
def test_what_is_lost_while_ranks_start_again_is_a_failure_more(undisturbed):
    """One rank is killed in an evaluation, then a restarted rank in a call from a callback."""

    class TwiceMortal(Mortal):
        def at(self, here):
            again = here == "met" and os.path.exists("killed") and self.rank == 0
            if again and not os.path.exists("killed again"):
                open("killed again", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            super().at(here)

    def train(max_failures):
        callback = LookAgain()
        options = {"worker": TwiceMortal, "seed": SEED, "progress": False, "eval_interval": 1}
        with Busy(2, callbacks=callback, max_failures=max_failures, **options) as trainer:
            trainer.train(epochs=2, where="evaluate", victim=1)
            return callback.heard, trainer.failures, trainer.model_weights()

    with pytest.raises(ActorDiedError) as error:
        train(max_failures=1)
    assert error.value.rank == 0
    os.unlink("killed")
    os.unlink("killed again")
    heard, failures, weights = train(max_failures=2)
    assert (heard, failures) == ([[4.0, 4.0]], 2)
    assert all(torch.equal(weights[key], value) for key, value in undisturbed[1].items())


def test_a_rank_killed_after_the_run_is_replaced_in_the_next_call():
    with Busy(2, max_failures=1, worker=Mortal, seed=SEED, progress=False) as trainer:
        trainer.train(epochs=1)
        weights = trainer.model_weights()
        os.kill(trainer.call_workers("pid")[0], signal.SIGKILL)
        again = trainer.model_weights()
        assert trainer.failures == 1
    assert all(torch.equal(again[key], value) for key, value in weights.items())


@pytest.mark.slow
def test_after_the_run_too(undisturbed):
    """Ranks are killed or stopped while idle; the next call continues with their replacements."""
    options = {"worker": Mortal, "seed": SEED, "progress": False, "eval_interval": 1}
    with Busy(2, max_failures=2, **options) as trainer:
        trainer.train(epochs=2)
        os.kill(trainer.call_workers("pid")[0], signal.SIGKILL)
        weights = trainer.model_weights()
        assert all(torch.equal(weights[key], value) for key, value in undisturbed[1].items())
        os.kill(trainer.call_workers("pid")[1], signal.SIGSTOP)
        scores = trainer.evaluate()
        assert scores["loss"] == undisturbed[0][-1][1]
        assert trainer.failures == 2
        os.kill(trainer.call_workers("pid")[0], signal.SIGSTOP)
        for call in (lambda: trainer.call_workers("met", 1), trainer.model_weights):
            with pytest.raises(WorkerTimeoutError, match="SIGSTOP") as caught:
                call()
            assert caught.value.rank == 0


class SelfEvaluated(Mortal):
    """Worker whose ``evaluate`` updates running statistics: the model stays in training mode."""

    def __init__(self, worker_id, **kwargs):
        super().__init__(worker_id, **kwargs)
        self.model.append(nn.BatchNorm1d(3))

    def training_step(self, batch, batch_idx):
        self.at("training")
        return super().training_step(batch, batch_idx)

    def evaluate(self):
        with torch.no_grad():
            return {"loss": self.model(torch.randn(8, 4)).mean().item(), "num_samples": 8}


def test_what_an_evaluation_of_ones_own_has_changed_is_not_lost():
    """The sixth step is the second one of the second epoch."""

    def train(**kwargs):
        options = {"worker": SelfEvaluated, "seed": SEED, "progress": False, "eval_interval": 1}
        with DDPTrainer(2, max_failures=1, **options) as trainer:
            result = trainer.train(epochs=2, **kwargs)
            return result.history, trainer.model_weights()

    history, weights = train()
    again, weights_again = train(where="training", when=6)
    assert [record.get("restarts") for record in again] == [None, 1]
    assert [record["val_loss"] for record in again] == [record["val_loss"] for record in history]
    assert weights["4.num_batches_tracked"] == 10
    assert all(torch.equal(weights_again[key], value) for key, value in weights.items())


class Refusing(Mortal):
    """Cannot be made a second time."""

    def __init__(self, worker_id, **kwargs):
        super().__init__(worker_id, **kwargs)
        if os.path.exists("killed"):
            raise ValueError("the data is gone")


@pytest.mark.slow
def test_what_code_raises_is_not_tried_again():
    options = {"worker": Refusing, "seed": SEED, "progress": False, "eval_interval": 1}
    with DDPTrainer(2, max_failures=5, **options) as trainer:
        with pytest.raises(ActorDiedError, match="the data is gone"):
            trainer.train(epochs=1, where="evaluate")
        assert trainer.failures == 1


@pytest.mark.parametrize("shard", ["none", "full"])
def test_there_are_no_weights_before_there_are_ranks(shard, raises):
    with raises(RuntimeError):
        DDPTrainer(2, worker=Stepper, shard=shard).model_weights()
