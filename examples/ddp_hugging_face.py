"""Train a Hugging Face language model with DDP, and save it for ``from_pretrained``.

The model and the tokenizer are created from a configuration, so nothing is downloaded.

python examples/ddp_hugging_face.py                 # 2 workers, 150 steps
python examples/ddp_hugging_face.py --steps 300     # run it again to continue the same run
"""

from __future__ import annotations

import argparse

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_scheduler,
)

from miniray.train import Checkpoint, DDPTrainer

COUNT = 20
WORDS = ["<pad>", "<eos>", *map(str, range(COUNT))]


def create_tokenizer():
    """Return a tokenizer whose tokens are the numbers from 0 to 19."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


class CountingTexts(torch.utils.data.Dataset):
    """Texts that count upward from different numbers, such as ``18 19 0 1``."""

    def __init__(self, length=8, size=400):
        texts = [" ".join(str((start + i) % COUNT) for i in range(length)) for start in range(size)]
        self.tokens = create_tokenizer()(texts, return_tensors="pt")

    def __len__(self):
        return len(self.tokens["input_ids"])

    def __getitem__(self, index):
        return {name: self.tokens[name][index] for name in ("input_ids", "attention_mask")}


class LanguageModel:
    def __init__(self, lr=3e-3):
        config = LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=WORDS.index("<pad>"),
            eos_token_id=WORDS.index("<eos>"),
        )
        self.model = LlamaForCausalLM(config)
        self.tokenizer = create_tokenizer()  # save_pretrained saves it with the model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def configure_scheduler(self, optimizer, total_steps):
        return get_scheduler(
            "cosine", optimizer, num_warmup_steps=10, num_training_steps=total_steps
        )

    def training_step(self, batch, batch_idx):
        return self.model(**batch, labels=batch["input_ids"]).loss

    validation_step = training_step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="number of workers")
    parser.add_argument("--steps", type=int, default=150, help="total number of steps")
    arguments = parser.parse_args()

    with DDPTrainer(
        arguments.workers,
        worker=LanguageModel,
        data=torch.utils.data.DataLoader(CountingTexts(), batch_size=16, shuffle=True),
        val_data=CountingTexts(size=COUNT),
        clip_norm=1.0,
        max_failures=1,
        eval_every_steps=50,
        callbacks=[Checkpoint(every_steps=50)],
        name="counting",
        seed=0,
    ) as trainer:
        result = trainer.train(steps=arguments.steps, resume="auto")
        trainer.save_pretrained("counting-model")
        print(f"Steps: {result['step']}, loss on validation data: {trainer.evaluate()['loss']:.2f}")

    model = AutoModelForCausalLM.from_pretrained("counting-model")
    tokenizer = AutoTokenizer.from_pretrained("counting-model")
    prompt = tokenizer("16 17 18", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    print("16 17 18 is continued with", tokenizer.decode(tokens[0, 3:]))
