"""Losses and weights of split models are those of one process on the same batches, 20 steps."""

import copy

import pytest

import miniray
from miniray.train import ModelParallelTrainer, PipelineParallelTrainer

torch = pytest.importorskip("torch")

from miniray.train.parallel.plan.layers import seed_context  # noqa: E402
from tests.parallel.split_for_tests import (  # noqa: E402
    PARTS,
    SEED,
    TOLERANCE,
    Transformer,
    adam,
    check_same,
    loss,
    make_data,
    make_layers,
    make_model,
    one_process,
)

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_every_schedule_trains_as_one_process_does(engine, schedule):
    """The norm of gradients is clipped over all stages, and the last batch has 4 samples, not 8."""
    engine()
    expected = one_process(n=44, clip=0.5)
    with PipelineParallelTrainer(
        2,
        **PARTS,
        model=make_layers,
        data=make_data(44),
        schedule=schedule,
        microbatches=4,
        clip_norm=0.5,
    ) as trainer:
        result = trainer.train(4)
        check_same(trainer, result, expected)
        stages = trainer.plan.stages
    assert sum(stages.sizes) == 8
    assert 0 <= result.bubble < 1
    assert result.bubble_formula == pytest.approx(
        {"gpipe": 0.2, "1f1b": 0.2, "interleaved": 1 / 9, "zero_bubble": 0.0}[schedule]
    )
    assert len(result.peak_activation_bytes) == 2
    assert min(result.peak_activation_bytes) > 0


class Sum(torch.nn.Module):
    """Takes two inputs, and has nothing to train."""

    def forward(self, x, shift):
        return torch.nn.functional.one_hot((x + shift) % 12, 12).flatten(1).float()


def frozen_first():
    frozen = torch.nn.Linear(48, 16).requires_grad_(False)
    return [Sum(), frozen, torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_stage_without_anything_to_train_and_layers_with_several_inputs(engine, schedule):
    engine()
    x, y = make_data().dataset.tensors
    data = torch.utils.data.TensorDataset(x, x.flip(0), y)
    with PipelineParallelTrainer(
        2,
        **PARTS,
        model=frozen_first,
        data=torch.utils.data.DataLoader(data, batch_size=8),
        schedule=schedule,
        clip_norm=0.5,
        layers_per_stage=[2, 2] if schedule == "1f1b" else [1, 1, 1, 1],
    ) as trainer:
        result = trainer.train(2)
        found = trainer.model_weights()
        trainer.save_checkpoint()
    with seed_context(SEED):
        layers = frozen_first()
    plain = torch.nn.Sequential(*layers)
    optimizer = adam(p for p in plain.parameters() if p.requires_grad)
    for _ in range(2):
        for rows in range(0, 40, 8):
            part = data[rows : rows + 8]
            value = loss(plain[1:](plain[0](*part[:2])), part[2])
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
    assert result["num_samples"] == 40
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=TOLERANCE, msg=name)


def test_copies_of_a_pipeline_train_as_one_process_on_their_batches_together(engine):
    """44 samples on 2 copies of batches of 4: the last batch of each copy has 2."""
    engine()
    expected = one_process(n=44)
    with PipelineParallelTrainer(
        4,
        **PARTS,
        model=make_layers,
        data=make_data(44, batch_size=4),
        val_data=make_data(13),
        microbatches=2,
        parallel={"data": 2, "pipeline": 2},
    ) as trainer:
        result = trainer.train(4)
        check_same(trainer, result, expected)
        scores, weights = trainer.evaluate(), trainer.model_weights()
    assert result["num_samples"] == 44
    plain = make_model()
    plain.load_state_dict(weights)
    x, y = make_data(13).dataset.tensors
    assert scores["loss"] == pytest.approx(loss(plain(x), y).item(), abs=1e-5)
    assert scores["num_samples"] == 13


def transformer():
    return Transformer(dropout=0.1)


def test_layers_cut_over_workers_train_as_one_process_does_with_dropout_too(engine):
    engine()
    expected = one_process(model=transformer, clip=0.5)
    with ModelParallelTrainer(
        2, **PARTS, model=transformer, data=make_data(), tensor_parallel=2, clip_norm=0.5
    ) as trainer:
        result = trainer.train(4)
        check_same(trainer, result, expected)
        assert trainer.plan.tensor.worker_bytes < 0.6 * trainer.plan.tensor.whole_bytes
    assert "blocks.*.attn.q" in result.plan


def test_a_model_that_torch_traces_is_dealt_out_by_layers(engine):
    engine()
    expected = one_process(model=Transformer)
    with ModelParallelTrainer(
        2, **PARTS, model=Transformer, data=make_data(), split="layers"
    ) as trainer:
        result = trainer.train(4)
        check_same(trainer, result, expected)


class Noisy(Transformer):
    """With dropout, and a buffer that is not saved."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.scale


def still(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def test_a_traced_model_is_evaluated_without_dropout_on_any_number_of_samples(engine):
    """It comes as pretrained ones do, in the mode of evaluations, and is trained with dropout."""
    engine()
    parts = {**PARTS, "optimizer": still, "model": Noisy().eval(), "microbatches": 2}
    with PipelineParallelTrainer(
        2, **parts, data=make_data(), val_data=make_data(13, 5)
    ) as trainer:
        trained = trainer.train(1)["loss"]
        scores = [trainer.evaluate(), trainer.evaluate()]
        exact = trainer.evaluate(make_data().dataset)["loss"]
        weights = trainer.model_weights()
    plain = Noisy().eval()
    plain.load_state_dict(weights)
    x, y = make_data(13).dataset.tensors
    with torch.no_grad():
        expected = loss(plain(x), y).item()
    for score in scores:
        assert score["loss"] == pytest.approx(expected, abs=1e-5)
        assert score["num_samples"] == 13
    assert trained != pytest.approx(exact, abs=1e-5)


def test_running_statistics_are_those_of_the_microbatches_and_of_nothing_else(engine):
    """torch may go through a stage before the first step, to learn about shapes."""
    engine()
    nn = torch.nn
    layers = [nn.Embedding(12, 6), nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 4)]
    alone = copy.deepcopy(nn.Sequential(*layers))
    parts = {**PARTS, "optimizer": still, "microbatches": 2, "layers_per_stage": [3, 1]}
    with PipelineParallelTrainer(2, **parts, model=layers, data=make_data()) as trainer:
        trainer.train(1)
        weights = trainer.model_weights()
    for x, _ in make_data():
        for microbatch in x.chunk(2):
            alone(microbatch)
    for name, expected in alone[2].named_buffers():
        torch.testing.assert_close(weights[f"2.{name}"], expected)
    assert weights["2.num_batches_tracked"] == 10  # five batches, two each


def test_stages_whose_layers_are_cut_train_as_one_process_does(engine):
    engine()
    expected = one_process(clip=0.5)
    with PipelineParallelTrainer(
        4,
        **PARTS,
        model=make_model,
        data=make_data(),
        parallel={"pipeline": 2, "tensor": 2},
        clip_norm=0.5,
    ) as trainer:
        result = trainer.train(4)
        check_same(trainer, result, expected)
        assert "shard" in trainer._parallelism.describe_part(1)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_copies_of_stages_whose_layers_are_cut_train_as_one_process_does(schedule):
    """Two copies of two stages in two shards each; the last batch of each copy has 2 samples."""
    miniray.shutdown()
    miniray.init(backend="local", num_workers=8)
    try:
        expected = one_process(n=44, clip=0.5)
        with PipelineParallelTrainer(
            8,
            **PARTS,
            model=make_model,
            data=make_data(44, batch_size=4),
            val_data=make_data(13),
            microbatches=2 if schedule == "1f1b" else 4,
            schedule=schedule,
            parallel={"data": 2, "pipeline": 2, "tensor": 2},
            clip_norm=0.5,
        ) as trainer:
            result = trainer.train(4)
            check_same(trainer, result, expected)
            assert trainer.evaluate()["num_samples"] == 13
        assert result["num_samples"] == 44
    finally:
        miniray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_split_models_train_on_ray():
    pytest.importorskip("ray")
    miniray.shutdown()
    try:
        with PipelineParallelTrainer(
            2,
            **PARTS,
            model=make_layers,
            data=make_data(44),
            val_data=make_data(13),
            clip_norm=0.5,
            backend="ray",
        ) as trainer:
            result = trainer.train(4)
            check_same(trainer, result, one_process(n=44, clip=0.5))
            assert trainer.evaluate()["num_samples"] == 13
        with ModelParallelTrainer(
            2, **PARTS, model=transformer, data=make_data(), clip_norm=0.5, backend="ray"
        ) as trainer:
            result = trainer.train(4)
            check_same(trainer, result, one_process(model=transformer, clip=0.5))
    finally:
        miniray.shutdown()
