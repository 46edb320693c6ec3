"""``critic_lr``: separate learning rate of the value parameters; a reference without a critic."""

import copy
import math

import pytest
import torch

import miniray
from miniray.errors import ActorDiedError
from miniray.rl import CausalLM, Generated, KLPenalty, PPOConfig, PPOTrainer, RLWorker
from miniray.train import LRSchedule
from tests.rl.models_for_tests import TOKENIZER, TinyLM, make_model
from tests.rl.trainers_for_tests import SMALL, Bandit, make


class Arms(torch.nn.Module):
    """Three arms, of which any pays 1; the critic's parameter lies between those of the policy."""

    def __init__(self):
        super().__init__()
        self.before = torch.nn.Parameter(torch.zeros(3))
        self.worth = torch.nn.Parameter(torch.zeros(()))
        self.after = torch.nn.Parameter(torch.zeros(3))

    def critic_parameters(self):
        return [self.worth]

    def generate(self, rows, seeds, sampling):
        return Generated([[0]] * len(rows), [[2]] * len(rows), [""] * len(rows))

    def log_probs(self, batch):
        logp = (self.before + self.after).log_softmax(-1)
        return logp[batch.responses]

    def values(self, batch):
        return self.worth.expand(batch.mask.shape)


def arms(critic_lr, policy=Arms, **more):
    """One response a step. Its advantage is 1 - worth, nothing is clipped."""
    config = PPOConfig(
        prompts_per_step=1, lr=0.3, critic_lr=critic_lr, whiten=False, clip_norm=None,
        kl=KLPenalty(0),
    )  # fmt: skip
    settings = {"reward": lambda row, text: 1.0, "data": [{"x": 0}], **more}
    return make(PPOTrainer, policy=policy, config=config, **settings)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


@pytest.mark.parametrize(("critic_lr", "rate"), [(None, 0.3), (0.02, 0.02), (0, 0.0)])
def test_a_step_by_hand(critic_lr, rate):
    """The value loss is 0.5 * (worth - 1)**2 / 2, so its gradient at 0 is -0.5."""
    with arms(critic_lr, optimizer=sgd) as trainer:
        trainer.train(steps=1)
        weights = trainer.model_weights()
    assert float(weights["worth"]) == pytest.approx(0.5 * rate)
    for name in ("before", "after"):  # of -log softmax at 2, where all three are equal
        assert weights[name].tolist() == pytest.approx([-0.1, -0.1, 0.2])


def adamw(first, second):
    """Return ``worth`` after two updates of AdamW with these rates."""
    after_one = first  # 0 - rate * sign of the gradient
    one, two = -0.5, 0.5 * (after_one - 1)
    mean = (0.9 * 0.1 * one + 0.1 * two) / (1 - 0.9**2)
    square = (0.999 * 0.001 * one**2 + 0.001 * two**2) / (1 - 0.999**2)
    return after_one - second * mean / math.sqrt(square)


RATES = [(0.5, 0.5), (None, 0.5), (0.5, None), (0.5, 0.25)]


@pytest.mark.parametrize("sync", ["grad", "weights"])
@pytest.mark.parametrize(("saved", "resumed"), RATES)
def test_the_optimizers_state_is_kept_whether_or_not_the_rate_is_new(saved, resumed, sync):
    with arms(saved, optimizer=None, sync=sync, run_dir="run") as trainer:
        trainer.train(steps=1)
        trainer.save_checkpoint()
    with arms(resumed, optimizer=None, sync=sync, run_dir="run") as trainer:
        trainer.train(steps=2, resume=True)
        weights = trainer.model_weights()
    rates = [0.3 if rate is None else rate for rate in (saved, resumed)]
    assert adamw(*rates) != pytest.approx(rates[0] + rates[1], abs=0.005)  # a state that was lost
    assert float(weights["worth"]) == pytest.approx(adamw(*rates), rel=1e-5)
    assert weights["before"][2] > 0.3  # the second update has the same direction
    assert torch.equal(weights["before"], weights["after"])


@pytest.mark.parametrize(("saved", "resumed"), [(None, 0.5), (0.5, None)])
def test_an_optimizer_of_ones_own_must_have_the_groups_it_had(saved, resumed):
    with arms(saved, optimizer=sgd, run_dir="run") as trainer:
        trainer.train(steps=1)
        trainer.save_checkpoint()
    refused = pytest.raises(ValueError, match="parameter groups")  # torch's words
    with arms(resumed, optimizer=sgd, run_dir="run") as trainer, refused:
        trainer.train(steps=2, resume=True)


def test_a_schedule_leaves_the_critics_rate_alone():
    with arms(0.5, optimizer=None, callbacks=[LRSchedule(lambda epoch: 0.0)]) as trainer:
        trainer.train(steps=1)
        weights = trainer.model_weights()
    assert float(weights["worth"]) == pytest.approx(0.5)
    assert not weights["before"].any()


def test_a_rate_for_nothing_is_refused():
    class Frozen(Arms):
        def __init__(self):
            super().__init__()
            self.worth.requires_grad_(False)

    lacking = pytest.raises(ActorDiedError, match=r"critic_parameters\(\).*Bandit")
    with arms(0.5, policy=Bandit) as trainer, lacking:
        trainer.train(steps=1)
    nothing = pytest.raises(ActorDiedError, match=r"critic_lr=0\.5.*Frozen")
    with arms(0.5, policy=Frozen) as trainer, nothing:
        trainer.train(steps=1)


@pytest.mark.parametrize("rate", [-1, math.nan, "fast"])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="critic_lr"):
        PPOConfig(critic_lr=rate)


def test_what_only_values_need():
    def names(policy):
        own = {id(p) for p in policy.critic_parameters()}
        return [name for name, p in policy.named_parameters() if id(p) in own]

    assert names(CausalLM(make_model())) == []
    head = ["value_head.weight", "value_head.bias"]
    assert names(CausalLM(make_model(), value_head=True)) == head
    critic = [f"critic.{name}" for name, _ in TinyLM().named_parameters()]
    assert names(CausalLM(make_model(), critic=TinyLM())) == [*critic, *head]
    model, sharing = make_model(), TinyLM()
    sharing.words = model.words  # trained with the model, at its rate
    critic.remove("critic.words.weight")
    assert names(CausalLM(model, critic=sharing)) == [*critic, *head]


# -- the reference --------------------------------------------------------------------------------


def with_critic():
    model = make_model()
    return CausalLM(model, TOKENIZER, critic=TinyLM())


def without_critic(weights):
    return {name: value for name, value in weights.items() if not name.startswith("critic.")}


def held(worker_class=RLWorker, **more):
    kind = type("Trainer", (PPOTrainer,), {"worker_class": worker_class})
    config = PPOConfig(**{**SMALL, "kl": KLPenalty(0.1)})
    return make(kind, policy=with_critic, config=config, run_dir="run", **more)


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_reference_has_no_critic_and_the_policy_keeps_its_own():
    first = with_critic().state_dict()
    with held() as trainer:
        trainer.train(steps=2)
        reference = miniray.get(trainer.workers[0].get_reference.remote())
        weights = trainer.model_weights()
    same(reference, without_critic(first))
    assert list(weights) == list(first)  # in their order too, which an optimizer goes by
    moved = [name for name, value in weights.items() if not torch.equal(value, first[name])]
    assert any(name.startswith("critic.") for name in moved)
    assert any(name.startswith("model.") for name in moved)


class Earlier(RLWorker):
    """Keeps its reference as it was done before: a copy of the whole policy."""

    def get_reference(self):
        return {**copy.deepcopy(self.policy.state_dict()), **super().get_reference()}


def test_a_reference_that_was_kept_with_its_critic_is_taken_up():
    with held(Earlier) as trainer:
        trainer.train(steps=2)
        trainer.save_checkpoint()
        kept = miniray.get(trainer.workers[0].get_reference.remote())
    assert any(name.startswith("critic.") for name in kept)
    with held() as trainer:
        trainer.train(steps=0, resume=True)
        same(miniray.get(trainer.workers[0].get_reference.remote()), without_critic(kept))
        assert trainer.train(steps=1)["kl"] > 0  # it is not held to what it is now
