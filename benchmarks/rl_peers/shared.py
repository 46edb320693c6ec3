"""The same task for all: model, prompts, reward, sizes; and where steps are written down."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

PROMPTS = 64  # rows in the data
PROMPTS_PER_STEP = 8
ROLLOUTS = 8
NEW_TOKENS = int(os.environ.get("BENCH_NEW_TOKENS", "48"))
STEPS = int(os.environ.get("BENCH_STEPS", "5"))
WORKERS = int(os.environ.get("BENCH_WORKERS", "1"))
VOCABULARY = 1000
LR = 1e-5
KL = 0.04


def make_rows() -> list[dict[str, str]]:
    """Prompts of 16 to 47 words."""
    rng = random.Random(0)
    sizes = [rng.randrange(16, 48) for _ in range(PROMPTS)]
    words = [[f"w{rng.randrange(3, VOCABULARY)}" for _ in range(size)] for size in sizes]
    return [{"prompt": " ".join(chosen)} for chosen in words]


def make_tokenizer():
    """A word is a token; the first three are special."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w0"
    )


def make_model():
    """A decoder of 0.6 M parameters with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def score(text: str) -> float:
    """The share of even words."""
    words = text.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


def step_done(tokens: float) -> None:
    """Write down that a step is over and how many tokens it had, of all workers together."""
    with open(Path(os.environ["BENCH_OUT"]), "ab") as file:
        file.write(struct.pack("dd", time.monotonic(), tokens))
