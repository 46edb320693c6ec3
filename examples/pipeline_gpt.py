"""Train a small GPT as a pipeline of stages, one stage per worker.

python examples/pipeline_gpt.py                                # 4 stages, 1F1B
python examples/pipeline_gpt.py --schedule zero_bubble         # same training, less idle time
python examples/pipeline_gpt.py --workers 2 --data-parallel 2  # 2 replicas of 2 stages

No worker holds the whole model. Layers are functions, and each worker builds only its own.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from miniray.limits import cpu_count
from miniray.train import PipelineParallelTrainer

TEXT = Path(__file__).with_suffix(".txt").read_text("utf-8")
LETTERS = sorted(set(TEXT))
CONTEXT, WIDTH, HEADS, BLOCKS = 64, 96, 4, 6


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))

    def forward(self, x):
        return self.letters(x) + self.places[: x.shape[1]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        rows, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.letters = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, x):
        return self.letters(self.norm(x))


LAYERS = [Embed, *[Block] * BLOCKS, Head]


def load_text(batch_size, windows=512):
    """Return windows of the text at random positions, with the next letter of each position."""
    numbers = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    starts = torch.randint(len(numbers) - CONTEXT - 1, (windows, 1))
    rows = numbers[starts + torch.arange(CONTEXT + 1)]
    return DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size, shuffle=True)


def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def generate(weights, begin, length=120):
    """Return the text that the assembled model generates after ``begin``."""
    model = nn.Sequential(*(make() for make in LAYERS)).eval()
    model.load_state_dict(weights)
    numbers = [LETTERS.index(letter) for letter in begin]
    with torch.no_grad():
        for _ in range(length):
            numbers.append(model(torch.tensor([numbers[-CONTEXT:]]))[0, -1].argmax().item())
    return "".join(LETTERS[number] for number in numbers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="number of pipeline stages")
    parser.add_argument(
        "--data-parallel", type=int, default=1, help="number of replicas of the pipeline"
    )
    parser.add_argument("--schedule", default="1f1b", help="such as gpipe or zero_bubble")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches per step")
    parser.add_argument("--epochs", type=int, default=20, help="number of epochs")
    arguments = parser.parse_args()
    trainer = PipelineParallelTrainer(
        arguments.workers * arguments.data_parallel,
        model=LAYERS,
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        data=partial(load_text, 32 // arguments.data_parallel),
        schedule=arguments.schedule,
        microbatches=arguments.microbatches,
        parallel={"data": arguments.data_parallel, "pipeline": arguments.workers},
        clip_norm=1.0,
        use_gpu=False,  # the model is tiny
        seed=0,
    )
    with trainer:
        result = trainer.train(arguments.epochs)
        first, last = result.history[0]["loss"], result["loss"]
        print(f"Loss: {first:.2f} -> {last:.2f}")
        print(f"Bubble: {result.bubble:.1%} measured, {result.bubble_formula:.1%} expected")
        if trainer.num_workers > cpu_count():
            print(f"  (the stages share {cpu_count()} cores, which increases the measured bubble)")
        kept = ", ".join(f"{n / 1e6:.1f} MB" for n in result.peak_activation_bytes)
        print(f"Peak activation memory per stage: {kept}")
        print("Timeline:", result.plot_pipeline())
        print("Model:   ", trainer.save_final_model())
        print("Report:  ", result.report())
        print(f"\nText generated after {TEXT[:CONTEXT]!r}:")
        print(generate(trainer.model_weights(), TEXT[:CONTEXT])[CONTEXT:])
