"""A tiny language model with Hugging Face's calling convention, and rows whose answer is known."""

import types

import torch
from torch import nn

from miniray.rl import CharTokenizer

TOKENIZER = CharTokenizer("0123456789+=")


class Cache:
    """Keys and values of one layer."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    def batch_select_indices(self, index):
        self.keys, self.values = self.keys[index], self.values[index]


class TinyLM(nn.Module):
    """One attention layer over learnt embeddings and positions; a few hundred parameters."""

    def __init__(self, width=16, context=32):
        super().__init__()
        vocabulary = len(TOKENIZER)
        self.config = types.SimpleNamespace(
            eos_token_id=TOKENIZER.eos_token_id, hidden_size=width, max_position_embeddings=context
        )
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(
        self,
        input_ids,
        attention_mask,
        position_ids,
        past_key_values=None,
        use_cache=False,
        output_hidden_states=False,
    ):
        x = self.words(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if past_key_values is not None:
            k = torch.cat((past_key_values.keys, k), 1)
            v = torch.cat((past_key_values.values, v), 1)
        total, new = k.shape[1], q.shape[1]
        itself = torch.eye(total, dtype=torch.bool, device=x.device)[total - new :]
        causal = torch.ones_like(itself).tril(total - new)
        seen = causal & attention_mask[:, None, :].bool()
        # A padding query sees nothing. With itself, its row is finite; the result is unused.
        seen = seen | itself
        score = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        h = x + score.softmax(-1) @ v
        h = h + torch.tanh(self.hidden(h))
        return types.SimpleNamespace(
            logits=self.head(h),
            past_key_values=Cache(k, v) if use_cache else None,
            hidden_states=(x, h) if output_hidden_states else None,
        )


def make_model():
    torch.manual_seed(7)
    return TinyLM()


def rows(count):
    numbers = [(i % 10, i // 10) for i in range(count)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in numbers]


def digits(row, response):
    """The share of a response that is digits: easy to get better at."""
    return sum(c.isdigit() for c in response) / max(1, len(response)) if response else 0.0


class Momentum:
    """SGD with momentum. Not one of torch's: the first of these takes a process two seconds."""

    def __init__(self, parameters, lr=0.3, momentum=0.5):
        self.parameters = list(parameters)
        self.param_groups = [{"lr": lr, "momentum": momentum}]
        self.velocity = [torch.zeros_like(p) for p in self.parameters]

    def zero_grad(self, set_to_none=True):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        (settings,) = self.param_groups
        for parameter, velocity in zip(self.parameters, self.velocity, strict=True):
            if parameter.grad is not None:
                velocity.mul_(settings["momentum"]).add_(parameter.grad)
                parameter.sub_(settings["lr"] * velocity)

    def state_dict(self):
        return {"velocity": self.velocity, "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state):
        self.param_groups[0]["lr"] = state["lr"]
        for mine, theirs in zip(self.velocity, state["velocity"], strict=True):
            mine.copy_(theirs)
