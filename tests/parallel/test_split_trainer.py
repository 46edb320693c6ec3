"""Checkpoints, evaluation, pictures and failures of trainers that split a model."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from miniray.errors import ActorDiedError, WorkerTimeoutError
from miniray.train import Checkpoint, ModelParallelTrainer, PipelineParallelTrainer, load_model

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.parallel.split_for_tests import (  # noqa: E402
    PARTS,
    Fault,
    accuracy,
    loss,
    make_data,
    make_layers,
    make_model,
    one_process,
)
from tests.time_scale import with_real_limits  # noqa: E402
from tests.train.ddp_for_tests import read_events  # noqa: E402

pytestmark = pytest.mark.timeout(180)


def with_dropout():
    return [*make_layers()[:4], nn.Dropout(0.2), *make_layers()[4:]]


def pipeline(**options):
    parts = {"model": make_layers, "data": make_data(), "val_data": make_data(13), **PARTS}
    return PipelineParallelTrainer(2, **{**parts, **options})


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


def test_a_run_goes_on_with_the_same_bits_and_on_another_layout(engine, tmp_path):
    """With dropout and shuffling, the random numbers of every rank continue where they stopped."""
    engine()
    shuffled = torch.utils.data.DataLoader(make_data().dataset, batch_size=8, shuffle=True)
    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    options = {"model": with_dropout, "data": shuffled, "scheduler": halving}
    with pipeline(**options) as trainer:
        trainer.train(1)
        trainer.train(1)
        whole = trainer.model_weights()
        sizes = trainer.plan.stages.sizes
    with pipeline(**options, name="first", layers_per_stage=sizes, callbacks=[Checkpoint()]) as t:
        t.train(1)
    with pipeline(**options, name="first", seed=99) as trainer:
        result = trainer.train(2, resume=True)
        assert trainer.plan.stages.sizes == sizes  # as it was, without being told
        assert same(trainer.model_weights(), whole)
        assert trainer.state.step == 10
        exported = load_model(trainer.save_final_model("model.safetensors"))
        scores = trainer.evaluate()
        assert trainer.evaluate(make_data(13).dataset.tensors) == scores
        path = trainer.save_checkpoint()
    assert [record["epoch"] for record in result.history] == [0, 1]
    plain = nn.Sequential(*with_dropout()).eval()
    plain.load_state_dict(exported)
    x, y = make_data(13).dataset.tensors
    with torch.no_grad():
        assert scores["loss"] == pytest.approx(loss(plain(x), y).item(), abs=1e-5)
    assert scores["num_samples"] == 13
    # The same checkpoint where every layer is cut, with the optimizer's memory.
    with ModelParallelTrainer(
        2, model=lambda: nn.Sequential(*with_dropout()), data=make_data(), **PARTS
    ) as trainer:
        trainer.train(0, resume=path)
        assert same(trainer.model_weights(), whole)
        state = trainer._rank_checkpoints.gather_shared()["optimizer"]["state"]
        assert state["1.1.weight"]["exp_avg"].shape == (32, 16)
        assert state["1.1.weight"]["step"].item() == 10


def test_evaluation_hooks_and_what_a_run_leaves_behind(engine, check_message):
    engine()
    seen = []

    class Watching(PipelineParallelTrainer):
        def on_epoch_end(self, epoch, result):
            seen.append((epoch, result["val_accuracy"]))

    matplotlib = pytest.importorskip("matplotlib")
    with Watching(
        2,
        **PARTS,
        model=make_layers,
        data=make_data(),
        val_data=make_data(13),
        metrics={"accuracy": accuracy},
        eval_interval=1,
        schedule="zero_bubble",
    ) as trainer:
        result = trainer.train(2)
        weights = trainer.model_weights()
        run = trainer.run.path
    assert matplotlib
    assert [epoch for epoch, _ in seen] == [0, 1]
    plain = make_model().eval()
    plain.load_state_dict(weights)
    x, y = make_data(13).dataset.tensors
    with torch.no_grad():
        assert result["val_accuracy"] == pytest.approx(accuracy(plain(x), y).item())
    (line,) = [line for line in (run / "plan.txt").read_text().splitlines() if "bubble" in line]
    check_message(line)
    assert json.loads((run / "run.json").read_text())["config"]["parallel"]["pipeline"] == 2
    picture = result.plot_pipeline()
    assert picture.read_bytes()[:4] == b"\x89PNG"
    record = json.loads((run / "pipeline.json").read_text())
    # Every microbatch went through every stage: forward, for its inputs, and for its weights.
    done = sorted((kind, stage, mb) for spans in record["workers"] for kind, stage, mb, *_ in spans)
    # On one clock: no stage begins with a microbatch before the one before it is through with it.
    forward = {
        (s, m): (b, e) for spans in record["workers"] for k, s, m, b, e in spans if k[0] == "f"
    }
    assert all(forward[s, m][1] <= forward[s + 1, m][0] for s in range(3) for m in range(4))
    kinds = ("backward", "forward", "weights")
    assert done == sorted((k, s, m) for k in kinds for s in range(4) for m in range(4))


def faulty(how, calls):
    """The 6th of 9 layers goes wrong: with 4 and 5 layers a stage it is in the second."""

    def make():
        layers = make_layers()
        return [*layers[:5], Fault(how, "gone-wrong", calls), *layers[5:]]

    return make


def test_a_stage_that_dies_is_named_and_after_a_restart_nothing_is_lost(engine):
    engine()
    options = {"model": faulty("die", 30), "layers_per_stage": [4, 5]}
    with pytest.raises(ActorDiedError, match=r"stage 1 \(layers 4-8\)") as error:
        pipeline(**options).train(2)
    assert (error.value.rank, error.value.epoch) == (1, 1)
    assert "Connection" not in str(error.value)
    with pipeline(**options) as trainer:  # the marker is there now: it trains as if nothing was
        trainer.train(2)
        expected = trainer.model_weights()
    Path("gone-wrong").unlink()
    with pipeline(**options, max_failures=1) as trainer:
        result = trainer.train(2)
        assert result["restarts"] == 1
        assert same(trainer.model_weights(), expected)


class Mortal(nn.Module):
    """A layer whose process is killed, once: in an evaluation, or when it gives its weights."""

    def __init__(self, where, when):
        super().__init__()
        self.where, self.left = where, when
        self.register_state_dict_pre_hook(lambda *_: self.at("weights"))

    def at(self, here):
        self.left -= here == self.where
        if here == self.where and not self.left and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, x):
        self.at("training" if self.training else "evaluation")
        return x


@pytest.mark.parametrize("kind", ["pipeline", pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_part_of_the_model_that_is_lost_outside_of_an_epoch_costs_no_bit(engine, kind, caplog):
    """Dropout on. Of shards all have the layer, and wait for each other for the weights."""
    engine()

    def train(where="", when=1, max_failures=0):
        def layers():
            made = make_layers()
            return [*made[:5], Mortal(where, when), nn.Dropout(0.2), *made[5:]]

        options = {"callbacks": [Checkpoint()], "eval_interval": 1, "max_failures": max_failures}
        options["snapshot_every"] = None  # it would ask for the weights once more
        parts = {"data": make_data(), "val_data": make_data(13), **PARTS, **options}
        if kind == "pipeline":
            trainer = PipelineParallelTrainer(2, model=layers, layers_per_stage=[4, 6], **parts)
        else:
            trainer = ModelParallelTrainer(2, model=lambda: nn.Sequential(*layers()), **parts)
        with trainer:
            result = trainer.train(2)
            told = [(record["loss"], record["val_loss"]) for record in result.history]
            return told, trainer.model_weights(), read_events(trainer)

    told, weights, _ = train()
    # Weights are asked for when the ranks have met, after the epoch, and for the checkpoint.
    for where, when in (("evaluation", 2), ("weights", 1), ("weights", 3)):
        Path("killed").unlink(missing_ok=True)
        told_then, weights_then, events = train(where, when, max_failures=1)
        assert [e["event"] for e in events] == ["worker_failed", "ranks_restarted"]
        assert "SIGKILL" in events[0]["reason"]
        assert told_then == told
        assert same(weights_then, weights)
    Path("killed").unlink()
    with pytest.raises(ActorDiedError, match=r"(stage|shard) \d") as error:
        train("weights", 1)
    assert error.value.signal == "SIGKILL"
    assert [record for record in caplog.records if record.name == "miniray"] == []


def test_an_error_in_a_layer_is_the_error_of_the_run_and_says_where(engine):
    engine()
    with pytest.raises(KeyError, match="a bad layer") as error:
        pipeline(model=faulty("raise", 10), layers_per_stage=[4, 5]).train(1)
    assert (error.value.rank, error.value.epoch) == (1, 0)
    assert "stage 1 fwd mb" in str(error.value) or not hasattr(error.value, "add_note")
    assert "Connection" not in str(error.value)


@with_real_limits
def test_a_stage_that_hangs_is_named_with_its_microbatch(engine, scale):
    engine()
    options = {"layers_per_stage": [4, 5], "hang_timeout": 4 * scale}
    with pytest.raises(WorkerTimeoutError, match=r"stage 1 \(layers 4-8\)") as error:
        pipeline(model=faulty("hang", 10), **options).train(1)
    assert "stage 1 fwd mb" in str(error.value)
    assert error.value.rank == 1


def test_a_loss_that_is_no_number_ends_the_run(engine, raises):
    engine()

    def broken(output, target):
        return loss(output, target) + (float("nan") if len(target) == 1 else 0.0)

    with raises(FloatingPointError):
        pipeline(loss=broken, data=make_data(41)).train(1)


def test_a_plan_that_makes_another_model_is_refused_before_training(engine):
    engine()
    model = lambda: nn.Sequential(nn.Embedding(12, 16), nn.Flatten(), nn.Linear(64, 4))  # noqa: E731
    with pytest.raises(ValueError, match=r"(?s)\bplan\b.*shape"):
        ModelParallelTrainer(
            2, model=model, data=make_data(), plan={"2": "colwise"}, **PARTS
        ).train(1)


def test_one_worker_in_the_drivers_own_process():
    import miniray

    expected = one_process(epochs=1)
    miniray.shutdown()
    with PipelineParallelTrainer(
        1, model=make_layers, data=make_data(), backend="inline", **PARTS
    ) as trainer:
        result = trainer.train(1)
        weights = trainer.model_weights()
    assert result["loss"] == pytest.approx(expected[0][0], abs=1e-4)
    assert list(weights) == list(expected[1])
