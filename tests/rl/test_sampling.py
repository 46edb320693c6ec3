"""One token at a time: which may be chosen, how often, and from which random number."""

import math

import pytest
import torch

from miniray.rl import Sampling
from miniray.rl.models.generation import pick, row_seed, uniforms

LOGITS = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()


def chosen(sampling, numbers):
    logits = LOGITS.expand(len(numbers), -1)
    return pick(logits, torch.tensor(numbers, dtype=torch.float64), sampling).tolist()


def test_the_number_decides_by_the_cumulative_probability():
    assert chosen(Sampling(), [0, 0.49, 0.51, 0.69, 0.71, 0.89, 0.91, 0.999999]) == [
        0, 0, 1, 1, 2, 2, 3, 3,
    ]  # fmt: skip


def test_temperature_sharpens_and_zero_takes_the_most_likely():
    # Squared: .25 .04 .04 .01 of .34.
    assert chosen(Sampling(temperature=0.5), [0.73, 0.74, 0.86, 0.98]) == [0, 1, 2, 3]
    assert chosen(Sampling(temperature=0), [0.99]) == [0]


def test_top_k_and_top_p_leave_the_most_likely():
    # 1 token, then 3 tokens with .9 in total: the first ends at .5/.9, the second at .7/.9.
    assert chosen(Sampling(top_k=1), [0.999]) == [0]
    assert chosen(Sampling(top_k=3), [0.55, 0.57, 0.77, 0.79, 0.999]) == [0, 1, 1, 2, 2]
    assert chosen(Sampling(top_p=0.5), [0.999]) == [0]
    assert chosen(Sampling(top_p=0.6), [0.7, 0.72, 0.999]) == [0, 1, 1]  # .5 and .2 of .7
    assert chosen(Sampling(top_p=1e-9), [0.999]) == [0]


def test_a_token_of_probability_zero_is_never_chosen():
    logits = torch.tensor([[-math.inf, 0, -math.inf, 0, -math.inf]])
    for number in (0.0, 0.5, 1 - 1e-16):
        token = pick(logits, torch.tensor([number], dtype=torch.float64), Sampling())
        assert token.item() in (1, 3)


def test_frequencies_are_the_probabilities():
    numbers = uniforms([row_seed(3)], 20_000)[0]
    tokens = pick(LOGITS.expand(20_000, -1), numbers, Sampling())
    share = torch.bincount(tokens, minlength=4) / 20_000
    assert (share - torch.tensor([0.5, 0.2, 0.2, 0.1])).abs().max() < 0.02


def test_numbers_come_from_the_seed_alone():
    seeds = [row_seed(1, step, row) for step in range(3) for row in range(50)]
    assert len(set(seeds)) == 150
    assert row_seed(1, 23) != row_seed(12, 3)
    table = uniforms(seeds, 7)
    assert torch.equal(table[[4, 99]], uniforms([seeds[4], seeds[99]], 7))
    assert torch.equal(table[:, :3], uniforms(seeds, 3))


@pytest.mark.parametrize(
    "wrong",
    [{"max_new_tokens": 0}, {"temperature": -1}, {"temperature": math.nan}, {"top_k": -1},
     {"top_p": 0}, {"top_p": 1.1}, {"max_prompt_tokens": 0}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)
