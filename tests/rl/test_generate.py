"""Sampling from a model with its cache: the same as without one, whatever else is in the batch."""

import pytest
import torch

from miniray.rl import CausalLM, Sampling, generate
from miniray.rl.models.generation import pick, row_seed, uniforms
from miniray.rl.rollouts.batch import Generated, Rollouts
from tests.rl.models_for_tests import TOKENIZER, TinyLM, make_model

PROMPTS = [torch.tensor(TOKENIZER.encode(t)) for t in ("1+2=", "7", "1+2=", "12345+67", "3+")]
SEEDS = [row_seed(0, i) for i in range(len(PROMPTS))]
LONG = Sampling(max_new_tokens=12)


def one_by_one(model, prompt, seed, sampling, eos):
    """The plain way: the whole text through the model for every token, nothing padded or kept."""
    ids, made = prompt.tolist(), []
    for number in uniforms([seed], sampling.max_new_tokens)[0]:
        x = torch.tensor([ids])
        with torch.no_grad():
            out = model(
                input_ids=x,
                attention_mask=torch.ones_like(x),
                position_ids=torch.arange(len(ids))[None],
            )
        token = pick(out.logits[:, -1], number[None], sampling).item()
        ids.append(token)
        made.append(token)
        if token == eos:
            break
    return made


def check(model, eos, sampling=LONG):
    wanted = [one_by_one(model, p, s, sampling, eos) for p, s in zip(PROMPTS, SEEDS, strict=True)]
    made = generate(model, PROMPTS, SEEDS, sampling, eos_ids=[eos])
    assert [r.tolist() for r in made] == wanted
    return wanted


def test_cache_padding_sharing_and_leaving_change_nothing():
    model = make_model()
    model.head.bias.data[TOKENIZER.eos_token_id] += 1  # so that some end early
    wanted = check(model, TOKENIZER.eos_token_id)
    lengths = {len(r) for r in wanted}
    assert len(lengths) > 2  # rows did leave the batch at different times
    assert wanted[0] != wanted[2]  # equal prompts, different seeds
    alone = [
        generate(model, [p], [s], LONG, eos_ids=[TOKENIZER.eos_token_id])[0].tolist()
        for p, s in zip(PROMPTS, SEEDS, strict=True)
    ]
    assert alone == wanted
    few = Sampling(max_new_tokens=12, batch_tokens=40)  # two at a time
    made = generate(model, PROMPTS, SEEDS, few, eos_ids=[TOKENIZER.eos_token_id])
    assert [r.tolist() for r in made] == wanted


def test_a_cache_that_cannot_be_shared_out(monkeypatch):
    from tests.rl import models_for_tests

    monkeypatch.delattr(models_for_tests.Cache, "batch_select_indices")
    check(make_model(), TOKENIZER.eos_token_id)


class HandsOn(torch.nn.Module):
    """A wrapper as PEFT's is: most of what it takes it does not name."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_base_model(self):
        return self.model

    def forward(self, input_ids=None, attention_mask=None, **more):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **more)


class Compiled(torch.nn.Module):
    """A wrapper as torch.compile's is: it names nothing of what it takes."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def forward(self, *args, **kwargs):
        return self._orig_mod(*args, **kwargs)


@pytest.mark.parametrize("wrapper", [HandsOn, Compiled])
def test_a_wrapper_is_told_what_the_model_within_takes(wrapper):
    model, eos = make_model(), TOKENIZER.eos_token_id
    made = generate(wrapper(model), PROMPTS, SEEDS, LONG, eos_ids=[eos])
    assert [r.tolist() for r in made] == check(model, eos)  # positions too, in spite of padding


class Forgetful(TinyLM):
    def forward(self, input_ids, attention_mask, position_ids, **more):
        return super().forward(input_ids, attention_mask, position_ids)


def test_a_model_without_a_cache_is_refused(raises):
    with raises(TypeError):
        generate(Forgetful(), PROMPTS, SEEDS, LONG)


def test_without_an_end_every_response_has_full_length():
    made = generate(make_model(), PROMPTS, SEEDS, Sampling(max_new_tokens=3))
    assert [len(r) for r in made] == [3] * 5


def test_what_cannot_be_generated_is_refused(raises):
    with raises(ValueError):
        generate(make_model(), [PROMPTS[0], torch.tensor([])], [1, 2], LONG)
    with raises(ValueError):
        generate(make_model(), [torch.ones(30, dtype=torch.long)], [1], LONG)
    with raises(ValueError):
        generate(make_model(), PROMPTS, [1], LONG)


def policy_log_probs(policy, budget, temperature=1.0):
    made = policy.generate([{"prompt": p.tolist()} for p in PROMPTS], SEEDS, LONG)
    rollouts = Rollouts([{}] * len(PROMPTS), range(5), range(5), made)
    for batch in rollouts.micro_batches(budget, device="cpu", temperature=temperature):
        with torch.no_grad():
            rollouts.put("logp", batch, policy.log_probs(batch))
    return made, rollouts.tokens["logp"]


def plain_log_probs(model, made, temperature=1.0):
    wanted = torch.zeros(5, max(len(r) for r in made.responses))
    for i, (p, r) in enumerate(zip(made.prompts, made.responses, strict=True)):
        ids = torch.cat((p, r))[None]
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=torch.arange(ids.shape[1])[None],
            ).logits
        logp = (logits / temperature).log_softmax(-1)[0, len(p) - 1 : -1]
        wanted[i, : len(r)] = logp.gather(-1, r[:, None])[:, 0]
    return wanted


@pytest.mark.parametrize("budget", [1, 45, 10_000])
def test_log_probs_do_not_depend_on_micro_batches(budget):
    policy = CausalLM(make_model())
    made, logp = policy_log_probs(policy, budget, temperature=0.7)
    torch.testing.assert_close(logp, plain_log_probs(policy.model, made, 0.7), rtol=1e-5, atol=1e-5)


def test_values_and_entropies_have_the_responses_shape():
    policy = CausalLM(make_model(), value_head=True)
    torch.nn.init.ones_(policy.value_head.weight)
    prompts, responses = [torch.tensor([1, 4])], [torch.tensor([5, 6, 2])]
    rollouts = Rollouts([{}], [0], [0], Generated(prompts, responses, [""]))
    (batch,) = rollouts.micro_batches(100, device="cpu")
    (logp, entropies), values = policy.log_probs_and_values(batch)
    assert logp.shape == entropies.shape == values.shape == (1, 3)
    assert logp.requires_grad
    assert entropies.requires_grad
    # The value of a token is what was expected before it was chosen.
    hidden = policy.model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        output_hidden_states=True,
    ).hidden_states[-1]
    torch.testing.assert_close(values[0], hidden[0, 1:4].sum(-1))
    torch.testing.assert_close(policy.values(batch), values)


def test_a_critic_of_its_own():
    policy = CausalLM(make_model(), critic=TinyLM())
    rollouts = Rollouts(
        [{}], [0], [0], Generated([torch.tensor([1])], [torch.tensor([5, 2])], [""])
    )
    (batch,) = rollouts.micro_batches(100, device="cpu")
    _, values = policy.log_probs_and_values(batch)
    torch.nn.init.ones_(policy.value_head.weight)
    policy.values(batch).sum().backward()
    assert values.tolist() == [[0, 0]]  # they begin at 0
    assert policy.critic.words.weight.grad is not None
    assert policy.model.words.weight.grad is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_of_hugging_face(family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "llama":  # rotary positions, grouped keys
        config = transformers.LlamaConfig(
            vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
            eos_token_id=2, initializer_range=0.5,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
    else:  # learnt positions, tied embeddings
        config = transformers.GPT2Config(
            vocab_size=len(TOKENIZER), n_embd=16, n_layer=2, n_head=2, n_positions=32,
            eos_token_id=2, bos_token_id=1, initializer_range=0.5,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config).eval()
    check(model, 2)
    policy = CausalLM(model, TOKENIZER, value_head=True)
    assert policy.eos_ids == [2]
    made, logp = policy_log_probs(policy, 45)
    torch.testing.assert_close(logp, plain_log_probs(model, made), rtol=1e-4, atol=1e-4)
    rollouts = Rollouts([{}] * 5, range(5), range(5), made)
    for batch in rollouts.micro_batches(10_000, device="cpu"):
        assert policy.values(batch).shape == batch.mask.shape


def test_prompts_as_text_ids_messages_and_by_function(raises):
    class Chat:
        eos_token_id = 2

        def apply_chat_template(self, messages, add_generation_prompt, tokenize):
            assert add_generation_prompt
            return {"input_ids": [len(m["content"]) for m in messages]}

    model = make_model()
    assert CausalLM(model, TOKENIZER).encode({"prompt": "1+"}) == [1, 4, 13]
    assert CausalLM(model).encode({"prompt": [5, 6]}) == [5, 6]
    assert CausalLM(model, Chat()).encode({"prompt": [{"content": "abc"}]}) == [3]
    assert CausalLM(model, prompt=lambda row: row["q"]).encode({"q": (7,)}) == [7]
    padded = {"input_ids": torch.tensor([0, 5, 6]), "attention_mask": torch.tensor([0, 1, 1])}
    assert CausalLM(model).encode(padded) == [5, 6]  # RLHFDataset's, and with tokenize=False:
    assert CausalLM(model, Chat()).encode({"raw_prompt": [{"content": "abc"}]}) == [3]
    with raises(KeyError):
        CausalLM(model).encode({"q": [7]})
    with raises(TypeError):
        CausalLM(model).encode({"prompt": "text"})
    with raises(ValueError):
        CausalLM(model, TOKENIZER).encode({"prompt": "x"})
    assert CausalLM(model, TOKENIZER).decode(torch.tensor([4, 13, 2])) == "1+"


class SeeingLM(TinyLM):
    """Adds a number it sees to the first token of a prompt, which is never sampled."""

    def __init__(self):
        super().__init__()
        self.head.bias.data[TOKENIZER.bos_token_id] = -100

    def forward(self, input_ids, attention_mask, position_ids, pixels=None, **more):
        self.pixels = torch.zeros(len(input_ids)) if pixels is None else pixels
        self.first = input_ids == TOKENIZER.bos_token_id
        return super().forward(input_ids, attention_mask, position_ids, **more)

    def words_of(self, embedded):
        return embedded + 3 * (self.first * self.pixels[:, None])[..., None]


class Seeing(CausalLM):
    def extra_inputs(self, rows):
        return {"pixels": torch.tensor([float(row["image"][0]) for row in rows])}


def test_rows_with_images_are_seen_in_prompts_and_log_probs():
    torch.manual_seed(0)
    model = SeeingLM()
    model.words.register_forward_hook(lambda module, _, out: model.words_of(out))
    policy = Seeing(model, TOKENIZER)
    rows = [{"prompt": "1+2=", "image": bytes([i])} for i in (0, 1, 2)]
    rows = [rows[0], rows[0], rows[1], rows[2]]
    # Equal texts and seeds: what differs is seen.
    made = policy.generate(rows, [5] * 4, LONG)
    texts = made.texts
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    # Inputs created by a processor are passed on without a custom method.
    inputs = [{"multi_modal_inputs": {"pixels": torch.ones(i) * i}} for i in (0, 1, 2)]
    plain = CausalLM(model, TOKENIZER)
    assert plain.extra_inputs([*inputs, {}])["pixels"].tolist() == [1, 2, 2]
    assert plain.extra_inputs(rows) == {}
    # The log-prob pass has the same inputs: its most likely tokens are the generated ones.
    greedy = policy.generate(rows, [5] * 4, Sampling(max_new_tokens=3, temperature=0))
    rollouts = Rollouts(rows, range(4), range(4), greedy)
    (batch,) = rollouts.micro_batches(1000, device="cpu")
    with torch.no_grad():
        likeliest = policy._run(model, batch).logits[:, -batch.width - 1 : -1].argmax(-1)
    assert likeliest[batch.mask].tolist() == batch.responses[batch.mask].tolist()
