"""The number of steps of a run, and of prompts per step."""

import pytest

from miniray.rl import GRPOConfig, KLPenalty, PPOTrainer
from miniray.rl.rollouts.sources import LoaderSource
from tests.rl.models_for_tests import rows
from tests.rl.trainers_for_tests import Batches, make


def make_config(prompts_per_step=None):
    return GRPOConfig(prompts_per_step=prompts_per_step, rollouts=2, kl=KLPenalty(0))


# -- steps of a run --------------------------------------------------------------------------------


def test_epochs_raise_and_name_the_steps_of_a_pass(golden):
    messages = []
    for trainer in (
        make(),
        make(config=make_config()),
        make(data=rows(13)),
        make(PPOTrainer),
        make(data=lambda rank, world_size: rows(4)),
    ):
        for arguments, options in (
            ((3,), {}),
            ((), {"epochs": 1}),
            ((), {"epochs": 1, "steps": 1}),
        ):
            with pytest.raises(TypeError) as caught:
                trainer.train(*arguments, **options)
        messages.append(str(caught.value))
    with pytest.raises(TypeError) as caught:
        make().train()
    golden("lengths.txt", "\n".join([*messages, str(caught.value)]) + "\n")


@pytest.mark.parametrize("steps", [1.5, True, -1])
def test_steps_must_be_a_count(steps):
    with pytest.raises(ValueError, match="steps"):
        make().train(steps=steps)


def test_steps_of_a_pass_see_each_prompt_once(tmp_path):
    log = tmp_path / "seen"

    def reward(row, response):
        with log.open("a") as file:
            file.write(f"{row['prompt']}\n")
        return 0.0

    with make(data=rows(10), reward=reward) as trainer:
        with pytest.raises(TypeError, match=r"\b3\b"):
            trainer.train(epochs=1)
        trainer.train(steps=3)
    # 4 responses per prompt.
    assert sorted(log.read_text().split()) == sorted(4 * [row["prompt"] for row in rows(10)])


# -- prompts of a step -----------------------------------------------------------------------------


def test_prompts_per_step_must_match_with_synced_weights():
    options = {"sync": "weights", "data": lambda rank, world_size: Batches(2, 8, True)}
    trainer = make(config=make_config(9), **options)
    with trainer, pytest.raises(ValueError, match="prompts_per_step=9"):
        trainer.train(steps=1)
    with make(config=make_config(8), **options) as trainer:
        assert trainer.train(steps=1)["counts"]["prompts"] == 8


def test_loaders_of_single_rows_use_prompts_per_step():
    for prompts_per_step, count in ((3, 3), (None, 64)):
        data = {"data": lambda rank, world_size: rows(64), "config": make_config(prompts_per_step)}
        with make(**data) as trainer:
            assert trainer.train(steps=1)["counts"]["prompts"] == count


def test_default_number_of_prompts_of_a_list():
    with make(data=rows(65), config=make_config()) as trainer:
        assert [line["counts"]["prompts"] for line in trainer.train(steps=2).history] == [64, 1]


def test_shorter_batch_after_resume_raises_nothing():
    class Uneven:
        def __iter__(self):
            yield rows(4)
            yield rows(1)

    source = LoaderSource(Uneven(), 4, 0, all_per_step=4)
    assert len(source.rows(0, 0)) == 4
    resumed = LoaderSource(Uneven(), 4, 0, all_per_step=4)
    resumed.load_state_dict(source.state_dict())
    assert len(resumed.rows(1, 0)) == 1
