"""A small language model learns to sort digits from a reward alone: GRPO on two workers.

It starts from random weights. A few seconds of supervised warm-up show it the form of an answer,
``4172=7241``: the same digits in any order. That they should be sorted only the reward knows.

    python examples/grpo_text.py

Leaves the reward curve (``reward.png``), a report and checkpoints in the run's directory.
"""

from __future__ import annotations

import argparse
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from miniray.rl import CharTokenizer, GRPOConfig, GRPOTrainer, KLPenalty, Sampling
from miniray.train import Checkpoint

TOKENIZER = CharTokenizer("0123456789=")
DIGITS = 4


def reward(row, response):
    """The share of digits in the right place; none for an answer of the wrong length."""
    if len(response) != DIGITS:
        return {"reward": 0.0, "sorted": 0}
    right = sum(a == b for a, b in zip(response, row["answer"], strict=True))
    return {"reward": right / DIGITS, "sorted": right == DIGITS}


def make_rows(count: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    texts = ["".join(rng.choices("0123456789", k=DIGITS)) for _ in range(count)]
    return [{"prompt": f"{text}=", "answer": "".join(sorted(text))} for text in texts]


def make_model(warm_up: int) -> LlamaForCausalLM:
    """A decoder of 0.1 M parameters that answers with the prompt's digits, in any order."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENIZER), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
            bos_token_id=TOKENIZER.bos_token_id, eos_token_id=TOKENIZER.eos_token_id,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(warm_up):
        rng, batch = random.Random(step), []
        for row in make_rows(64, seed=step):
            shuffled = "".join(rng.sample(row["answer"], DIGITS))
            batch.append([*TOKENIZER.encode(row["prompt"] + shuffled), TOKENIZER.eos_token_id])
        ids = torch.tensor(batch)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(steps: int, workers: int, warm_up: int) -> None:
    with GRPOTrainer(
        lambda: make_model(warm_up),
        reward,
        make_rows(2000, seed=-1),
        tokenizer=TOKENIZER,
        config=GRPOConfig(
            prompts_per_step=32, rollouts=8, mini_batches=2, lr=1e-3, kl=KLPenalty(0)
        ),
        sampling=Sampling(max_new_tokens=DIGITS + 1),
        eval_data=make_rows(100, seed=-2),
        eval_interval=10,
        num_workers=workers,
        use_gpu=False,  # the model is tiny
        seed=0,
        callbacks=[Checkpoint(every=20, keep_best=True, monitor="val_reward")],
    ) as trainer:
        result = trainer.train(steps=steps)
        scores = trainer.evaluate()
    first, last = result.history[0], result.history[-1]
    print(f"reward {first['reward']:.2f} -> {last['reward']:.2f}")
    print(f"sorted, of {first['counts']['sequences']} samples:", end=" ")
    print(
        f"{first['sorted']:.0%} -> {last['sorted']:.0%}; held-out prompts: {scores['sorted']:.0%}"
    )
    evaluated = ["val_reward"] if result.epochs >= 10 else []
    shown = ["reward", "sorted", *evaluated, "entropy"]
    print("curve:", result.plot(result.run_dir / "reward.png", metrics=shown))
    print("report:", result.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=250, help="supervised steps before")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.workers, arguments.warm_up)
