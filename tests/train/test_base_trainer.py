"""BaseTrainer: lifecycle, hooks, keyword arguments, errors."""

import concurrent.futures
import json
import shutil

import numpy as np
import pytest

import miniray
from miniray.train import BaseTrainer, Callback
from tests.train.workers_for_tests import Counter

pytestmark = pytest.mark.usefixtures("_light_workers")


class Recording(BaseTrainer):
    """Notes every hook it sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def create_worker(self, worker_id, **kwargs):
        self.seen.append(("create_worker", worker_id, kwargs))
        return Counter.remote(worker_id)

    def on_train_start(self, **kwargs):
        self.seen.append(("train_start", kwargs))

    def on_epoch_start(self, epoch, **kwargs):
        self.seen.append(("epoch_start", epoch, kwargs))

    def on_epoch_end(self, epoch, result, **kwargs):
        super().on_epoch_end(epoch, result, **kwargs)
        self.seen.append(("epoch_end", epoch, result["loss"], kwargs))

    def on_train_end(self, history, **kwargs):
        self.returned_by_super = super().on_train_end(history)
        self.seen.append(("train_end", kwargs))


def test_hooks_come_in_order_with_the_arguments_of_train():
    trainer = Recording(num_workers=2, backend="inline", progress=False)
    result = trainer.train(epochs=2, lr=0.5)
    assert trainer.seen == [
        ("create_worker", 0, {"lr": 0.5}),
        ("create_worker", 1, {"lr": 0.5}),
        ("train_start", {"lr": 0.5}),
        ("epoch_start", 0, {"lr": 0.5}),
        ("epoch_end", 0, 1.5, {"lr": 0.5}),  # mean of 1 + 0 and 1 + 1
        ("epoch_start", 1, {"lr": 0.5}),
        ("epoch_end", 1, 1.0, {"lr": 0.5}),  # mean of 0.5 + 0 and 0.5 + 1
        ("train_end", {"lr": 0.5}),
    ]
    assert trainer.returned_by_super is result is trainer.result


def test_hooks_need_not_take_what_they_do_not_use():
    class Terse(BaseTrainer):
        def create_worker(self, worker_id):
            return Counter.remote(worker_id)

        def on_epoch_end(self, epoch, result):
            self.last = epoch

    trainer = Terse(1, backend="inline", progress=False)
    with trainer:
        trainer.train(epochs=3)
    assert trainer.last == 2


def test_constructing_starts_nothing_and_training_stops_what_it_started():
    trainer = Recording(1, backend="inline", progress=False)
    assert trainer.workers == []
    assert not miniray.is_initialized()
    with trainer:
        trainer.train(epochs=1)
        assert miniray.is_initialized()
        assert len(trainer.workers) == 1
    assert not miniray.is_initialized()
    trainer.shutdown()  # again: harmless


def test_the_users_own_engine_is_left_running():
    miniray.init(backend="inline")
    with Recording(2, progress=False) as trainer:
        trainer.train(epochs=1)
        workers = list(trainer.workers)
    assert miniray.is_initialized()
    with pytest.raises(miniray.errors.ActorDiedError):
        miniray.get(workers[0].seen.remote())


def test_of_trainers_that_share_an_engine_the_last_one_ends_it():
    first = Recording(1, backend="inline", progress=False)
    second = Recording(1, progress=False)
    first.train(epochs=1)
    second.train(epochs=1)
    workers = list(first.workers)
    first.shutdown()
    with pytest.raises(miniray.errors.ActorDiedError):
        miniray.get(workers[0].seen.remote())
    assert second.train(epochs=1).epochs == 2
    second.shutdown()
    assert not miniray.is_initialized()


def test_workers_that_ended_with_their_engine_do_not_trouble_the_next():
    first = Recording(1, backend="inline", progress=False)
    first.train(epochs=1)
    miniray.shutdown()
    with Recording(1, backend="inline", progress=False) as second:
        second.train(epochs=1)
        first.shutdown()
    assert not miniray.is_initialized()


def test_training_again_goes_on_from_where_it_was():
    with Recording(2, backend="inline", progress=False) as trainer:
        trainer.train(epochs=2)
        first = list(trainer.workers)
        result = trainer.train(epochs=3)
        assert trainer.workers == first
        assert miniray.get(first[0].seen.remote())["epochs"] == [0, 1, 2, 3, 4]
    assert [record["epoch"] for record in result.history] == [0, 1, 2, 3, 4]
    assert result.epochs == 5


def test_a_worker_class_instead_of_a_subclass():
    with BaseTrainer(2, worker=Counter, backend="inline", progress=False) as trainer:
        # Its __init__ takes lr and start, load_data_shard batch_size; BaseTrainer does not call it.
        trainer.train(epochs=1, lr=0.25, batch_size=8)
        assert miniray.get(trainer.workers[1].seen.remote())["lr"] == 0.25


def test_a_trainer_that_cannot_make_workers_says_so(raises):
    with raises(NotImplementedError):
        BaseTrainer(1, backend="inline", progress=False).train(epochs=1)
    assert not miniray.is_initialized()


def test_what_is_not_an_actor_is_refused(raises):
    class Wrong(BaseTrainer):
        def create_worker(self, worker_id, **kwargs):
            return object()

    with raises(TypeError):
        Wrong(1, backend="inline", progress=False).train(epochs=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 0},
        {"num_workers": True},
        {"resources_per_worker": {"num_cpus": 1}},
        {"worker": Counter, "resources_per_worker": {"gpu": 1}},
        {"seed": 1.5},
        {"max_failures": -1},
        {"worker_timeout": 0},
        {"worker_timeout": "5"},
        {"eval_interval": 0.5},
        {"keep_last": 0},
        {"keep_best": "loss"},
        {"name": "a/b"},
        {"backend": "locl"},
        {"callbacks": [Callback]},
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, raises):
    with raises((ValueError, TypeError)):
        Recording(**arguments)


def test_numbers_may_be_numpys():
    with Recording(np.int64(2), seed=np.int32(3), backend="inline", progress=False) as trainer:
        assert trainer.train(np.int64(1)).epochs == 1


def test_after_shutdown_nothing_is_begun_anew_in_silence(raises):
    trainer = Recording(1, backend="inline", progress=False)
    trainer.train(epochs=2)
    trainer.shutdown()
    with raises(RuntimeError):
        trainer.train(epochs=1)
    assert trainer.run.status() == "finished"
    for call in (trainer.save_checkpoint, trainer.model_weights, trainer.evaluate):
        with raises(RuntimeError):
            call()


def test_a_run_that_failed_before_its_first_epoch_may_be_tried_again():
    class Unlucky(Recording):
        def on_epoch_start(self, epoch, **kwargs):
            if len(self.seen) == 2:
                self.seen.append("failed")
                raise OSError("no data")

    trainer = Unlucky(1, backend="inline", progress=False, name="again")
    with pytest.raises(OSError, match="no data"):
        trainer.train(epochs=1)
    assert trainer.train(epochs=1).epochs == 1
    assert [a["state"] for a in trainer.run.read_run()["attempts"]] == ["failed"]


def test_what_cannot_be_written_at_the_end_hides_no_error_and_leaves_no_process(capsys):
    class Deleted(Recording):
        def on_epoch_end(self, epoch, result, **kwargs):
            shutil.rmtree(self.run.path)

    trainer = Deleted(1, backend="local", progress=False)
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        trainer.train(epochs=2)
    assert not miniray.is_initialized()
    assert f"{trainer.run.path}: " in capsys.readouterr().err


@pytest.mark.parametrize("epochs", [-1, 1.5, True, "3"])
def test_bad_numbers_of_epochs_are_refused(epochs):
    with pytest.raises(ValueError, match="epochs"):
        Recording(1, backend="inline").train(epochs=epochs)


def test_an_epoch_that_returns_no_dict_is_refused(raises):
    class Silent(Recording):
        def train_epoch(self, epoch, **kwargs):
            return None

    with raises(TypeError):
        Silent(1, backend="inline", progress=False).train(epochs=1)


def test_an_overridden_epoch_needs_no_train_epoch_in_the_worker(raises):
    @miniray.remote
    class Asked:
        def custom_method(self, x):
            return x * 2

    class Custom(BaseTrainer):
        def create_worker(self, worker_id, **kwargs):
            return Asked.remote()

        def train_epoch(self, epoch, **kwargs):
            return {"total": sum(self.call_workers("custom_method", epoch + 1))}

    with Custom(3, backend="inline", progress=False) as trainer:
        assert trainer.train(epochs=2)["total"] == 12
    with raises(TypeError):
        BaseTrainer(1, worker=Asked, backend="inline", progress=False).train(epochs=1)


def test_an_exception_in_a_worker_says_which_and_when_and_ends_the_run():
    @miniray.remote
    class Failing(Counter.__wrapped__):
        def train_epoch(self, epoch):
            if self.worker_id == 1 and epoch == 2:
                raise KeyError("missing column")
            return super().train_epoch(epoch)

    trainer = BaseTrainer(2, worker=Failing, backend="local", progress=False, name="broken")
    with pytest.raises(KeyError) as caught:
        trainer.train(epochs=5)
    error = caught.value
    assert (error.worker, error.epoch) == (1, 2)
    assert error.function.endswith("Failing.train_epoch")
    assert 'raise KeyError("missing column")' in str(error)
    assert not miniray.is_initialized()
    run = json.loads((trainer.run.path / "run.json").read_text())
    assert run["state"] == "failed"
    assert len((trainer.run.path / "metrics.jsonl").read_text().splitlines()) == 2


def test_callbacks_see_the_trainer_and_may_stop_it(capsys, check_message):
    class Stop(Callback):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            if epoch == 1:
                trainer.should_stop, trainer.stop_reason = True, "enough"

    with Recording(1, backend="inline", callbacks=[Stop()]) as trainer:
        assert trainer.train(epochs=10).epochs == 2
        check_message(capsys.readouterr().err.splitlines()[-1])
        run = json.loads((trainer.run.path / "run.json").read_text())
        assert run["stop_reason"] == "enough"
        assert trainer.train(epochs=1).epochs == 3


def test_workers_are_seeded_apart_and_alike_each_time():
    @miniray.remote
    class Roller(Counter.__wrapped__):
        def train_epoch(self, epoch):
            import random

            return {f"r{self.worker_id}": random.random() + np.random.rand()}

    def rolls():
        with BaseTrainer(2, worker=Roller, backend="local", seed=7, progress=False) as trainer:
            result = trainer.train(epochs=1)
        return result["r0"], result["r1"]

    first = rolls()
    assert first[0] != first[1]
    assert rolls() == first


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys):
    with Recording(1, backend="inline") as trainer:
        trainer.train(epochs=2)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2
    assert "loss" in shown[0]
    with Recording(1, backend="inline", progress=False) as trainer:
        trainer.train(epochs=2)
    assert capsys.readouterr().err == ""


def test_a_run_in_a_directory_of_its_own_keeps_its_name(tmp_path):
    with Recording(2, name="first", run_dir=tmp_path / "there", progress=False) as trainer:
        result = trainer.train(epochs=1)
    assert result.run_dir == tmp_path / "there"
    assert json.loads((tmp_path / "there" / "run.json").read_text())["name"] == "first"


def test_torch_is_seeded_however_late_it_is_imported():
    class Late:
        def train_epoch(self, epoch):
            import torch

            return {"roll": torch.rand(1).item()}

    with BaseTrainer(1, worker=Late, backend="local", seed=7, progress=False) as trainer:
        result = trainer.train(epochs=1)
    import torch

    assert result["roll"] == torch.rand(1, generator=torch.Generator().manual_seed(7)).item()


def test_the_variable_overrides_the_trainers_backend_each_time(monkeypatch):
    monkeypatch.setenv("MINIRAY_BACKEND", "inline")
    with BaseTrainer(1, worker=Counter, backend="local", progress=False) as trainer:
        trainer.train(epochs=1)
        assert trainer.train(epochs=1).epochs == 2


def test_a_trainer_that_forgot_its_base_says_so(raises):
    class Forgetful(BaseTrainer):
        def __init__(self):
            self.mine = 1

    with raises(RuntimeError):
        Forgetful().train(epochs=1)


def test_a_checkpoint_of_nothing_is_refused_in_words(raises):
    with Recording(1, backend="inline", progress=False) as trainer:
        trainer.train(epochs=0)
        for epoch in (None, 0):
            with raises(RuntimeError):
                trainer.save_checkpoint(epoch)


def test_a_checkpoint_is_of_the_epochs_that_were_trained_whatever_it_is_called(tmp_path):
    saved = []

    class Saver(BaseTrainer):
        def on_epoch_start(self, epoch, **kwargs):
            if epoch:
                saved.append(self.save_checkpoint(epoch).name)

        def train_epoch(self, epoch, **kwargs):
            result = super().train_epoch(epoch, **kwargs)
            saved.append(self.save_checkpoint(epoch).name)
            return result

        def on_epoch_end(self, epoch, result, **kwargs):
            saved.append(self.save_checkpoint(epoch + 1).name)

    options = {"worker": Counter, "backend": "inline", "progress": False, "name": "counted"}
    with Saver(1, keep_last=None, **options) as trainer:
        trainer.train(epochs=2)
    assert [name[6:] for name in saved] == [
        "00000000", "00000000-2", "00000000-3", "00000001", "00000001-2",
    ]  # fmt: skip
    with Saver(1, **options) as trainer:
        assert trainer.train(epochs=0, resume=True).epochs == 2


def test_trainers_in_several_threads_share_one_engine():
    def train(_):
        with BaseTrainer(1, worker=Counter, backend="local", progress=False) as trainer:
            return trainer.train(epochs=1).epochs

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        assert list(threads.map(train, range(3))) == [1, 1, 1]
    assert not miniray.is_initialized()
