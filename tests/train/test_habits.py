"""Common user habits: custom argument names, counting from 1, decorators, Ctrl-C."""

import traceback

import pytest

from miniray.train import BaseTrainer, Checkpoint, EarlyStopping
from tests.train.workers_for_tests import Counter

pytestmark = pytest.mark.usefixtures("_light_workers")


class Numbering(Counter.__wrapped__):
    def train_epoch(self, epoch, method=None):
        return {"epoch": epoch + 1, "seconds": 5.0, "method": method}


def test_a_worker_that_counts_epochs_from_1_does_not_confuse_the_run():
    options = {"worker": Numbering, "backend": "inline", "progress": False, "name": "numbered"}
    with BaseTrainer(2, **options) as trainer:
        result = trainer.train(epochs=2)
        trainer.save_checkpoint()
    assert [(record["epoch"], record["seconds"]) for record in result.history] == [(0, 5), (1, 5)]
    with BaseTrainer(2, **options) as trainer:
        trainer.train(epochs=3, resume=True)
        assert [record["epoch"] for record in trainer.run.read_metrics()] == [0, 1, 2]


def test_arguments_of_train_may_have_the_names_of_our_own_parameters():
    with BaseTrainer(2, worker=Numbering, backend="inline", progress=False) as trainer:
        assert trainer.train(epochs=1, method="adam")["method"] == "adam"


@pytest.mark.parametrize("name", ["epoch", "worker_id", "history"])
def test_an_argument_that_hooks_would_get_twice_is_refused_at_once(name, raises):
    trainer = BaseTrainer(2, worker=Counter, backend="inline", progress=False)
    with raises(TypeError):
        trainer.train(epochs=1, **{name: 3})
    assert trainer.run is None


def test_a_warning_points_to_the_users_line(recwarn):
    callbacks = [EarlyStopping("accuracy"), Checkpoint(keep_best=True, monitor="f1")]
    options = {"worker": Numbering, "backend": "inline", "progress": False, "name": "warned"}
    with BaseTrainer(2, callbacks=callbacks, **options) as trainer:
        trainer.train(epochs=1)
    with BaseTrainer(1, **options) as trainer:
        trainer.train(epochs=0, resume=True)
    texts = [
        "EarlyStopping never stopped",
        "Checkpoint kept no best",
        "resuming a run of 2 workers",
    ]
    assert [str(w.message)[: len(t)] for w, t in zip(recwarn, texts, strict=True)] == texts
    assert {warning.filename for warning in recwarn} == {__file__}


def test_after_ctrl_c_in_a_hook_the_traceback_leads_there():
    class Interrupted(BaseTrainer):
        def on_epoch_start(self, epoch, **kwargs):
            self.call_workers("seen").sort(key=self.interrupt)

        def interrupt(self, value):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        Interrupted(1, worker=Counter, backend="inline", progress=False).train(epochs=1)
    functions = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert functions[-2:] == ["on_epoch_start", "interrupt"]


def test_one_callback_need_not_be_in_a_list():
    stopping = EarlyStopping("seconds", patience=1)
    options = {"worker": Numbering, "backend": "inline", "progress": False}
    with BaseTrainer(1, callbacks=stopping, **options) as trainer:
        assert trainer.train(epochs=9).epochs == 2  # always 5.0


class Yielding(Counter.__wrapped__):
    def train_epoch(self, epoch):
        yield {"loss": 1.0}


def test_an_epoch_that_yields_is_refused_before_it_begins(raises):
    trainer = BaseTrainer(1, worker=Yielding, backend="inline", progress=False)
    with raises(TypeError):
        trainer.train(epochs=1)


def timed(method):
    """As many write it: without functools.wraps, so that self is one of args."""

    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


class Decorated(Counter.__wrapped__):
    @timed
    def train_epoch(self, epoch, lr=None):
        return {"lr": lr, "seen": epoch}


def test_methods_may_be_decorated_without_wraps():
    with BaseTrainer(1, worker=Decorated, backend="inline", progress=False) as trainer:
        result = trainer.train(epochs=2, lr=0.5)
    assert (result["lr"], result["seen"]) == (0.5, 1)
