"""A small transformer encoder that learns to tell what kind of sentence it reads.

The sentences are made up: are they about weather, food, travel or money? Words of the other topics
appear too, so that the whole sentence must be read.

    python examples/bert_tiny.py
"""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from miniray.train import DataParallelTrainer, TorchWorker

TOPICS = {
    "weather": ["rain", "wind", "snow", "sun"],
    "food": ["bread", "soup", "rice", "cheese"],
    "travel": ["train", "ship", "road", "plane"],
    "money": ["coin", "bank", "price", "tax"],
}
FILLERS = [
    "today",
    "not",
    "the",
    "a",
    "with",
    "under",
    "near",
    "old",
    "and",
    "while",
    "nobody",
    "says",
]
LENGTH = 12
WORDS = ["[cls]", *FILLERS, *(w for words in TOPICS.values() for w in words)]
INDEX = {word: i for i, word in enumerate(WORDS)}


def make_sentences(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels: the topic that has more words in the sentence than any other."""
    rng = random.Random(seed)
    rows, labels = [], []
    topics = list(TOPICS.values())
    for _ in range(count):
        label = rng.randrange(len(topics))
        words = [rng.choice(topics[label]) for _ in range(2)]
        words += [rng.choice(topic) for topic in topics]
        words += [rng.choice(FILLERS) for _ in range(LENGTH - 1 - len(words))]
        rng.shuffle(words)
        rows.append([INDEX[word] for word in ["[cls]", *words]])
        labels.append(label)
    return torch.tensor(rows), torch.tensor(labels)


class Encoder(nn.Module):
    def __init__(self, width: int = 48):
        super().__init__()
        self.words = nn.Embedding(len(WORDS), width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(TOPICS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(tokens) + self.places).mean(1))


class TextWorker(TorchWorker):
    def setup(self, batch_size=64):
        self.model = Encoder()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
        data = TensorDataset(*make_sentences(6000, seed=1))
        self.train_loader = DataLoader(data, batch_size, shuffle=True)

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        return functional.cross_entropy(self.model(tokens), labels)

    def validation_step(self, batch, batch_idx):
        tokens, labels = batch
        return {"accuracy": (self.model(tokens).argmax(1) == labels).float().mean()}


if __name__ == "__main__":
    with DataParallelTrainer(2, worker=TextWorker, use_gpu=False, seed=0) as trainer:
        result = trainer.train(epochs=6)
        scores = trainer.evaluate(data=TensorDataset(*make_sentences(1000, seed=2)))
        print(f"loss {result['loss']:.2g}, accuracy on new sentences {scores['accuracy']:.1%}")
        print("curve:", result.plot())
