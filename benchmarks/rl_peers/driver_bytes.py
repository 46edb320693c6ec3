"""Bytes through the driver in a step: workers that own their data, and one controller for all.

Both run the same step on the same rows, each with an encoded image, on two workers that sum up
their gradients. The controller does what today's stacks do: it loads the rows, sends prompts out,
gets responses back, rewards them, sends them out for log-probs and again for reference log-probs,
computes advantages, and sends everything out for the update. Counted is what the driver pickles and
unpickles, buffers included.

    python driver_bytes.py --system workers|controller --prompts 16 --image-bytes 33000 --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from shared import KL, LR, ROLLOUTS, make_model, make_rows, make_tokenizer, score

import miniray
from miniray.rl import GRPOConfig, GRPOTrainer, KLPenalty, RLWorker, Sampling, advantages
from miniray.rl.models.generation import row_seed
from miniray.rl.rollouts.batch import Generated, Rollouts
from miniray.rl.update import Updater, run_policy

NEW_TOKENS = 8  # what is counted does not get smaller with it, and steps are quick


class DriverBytes:
    """Counts what this process sends and gets."""

    def __init__(self) -> None:
        self.total = 0
        for name, module in list(sys.modules.items()):
            if name.startswith("miniray.core.local.") and hasattr(module, "unpack"):
                module.pack = self._counted(module.pack, lambda _, made: made.nbytes)
                module.unpack = self._counted(module.unpack, _unpacked)

    def _counted(self, function, size):
        def call(*arguments, **more):
            made = function(*arguments, **more)
            self.total += size(arguments, made)
            return made

        return call


def _unpacked(arguments, made) -> int:
    data, buffers = (*arguments, ())[:2]
    return len(data) + sum(memoryview(buffer).nbytes for buffer in buffers)


class Controlled(RLWorker):
    """A worker that is told every part of a step by a controller."""

    def generate(self, rows, seeds):
        return self._generate(rows, seeds, self.setup.sampling)

    def log_probs(self, rows, ids, made, of_reference):
        policy = self.reference if of_reference else self.policy
        if policy is None:
            policy = self.reference = self._frozen_copy()
        rollouts = Rollouts(rows, ids, ids, made)
        for batch in rollouts.micro_batches(self.config.micro_batch_tokens, device=self.device):
            with torch.no_grad():
                rollouts.put("logp", batch, run_policy(policy, batch, False)[0])
        return rollouts.tokens["logp"]

    def update(self, rows, ids, made, tokens, step):
        rollouts = Rollouts(rows, ids, ids, made)
        rollouts.tokens.update(tokens)
        updater = Updater(
            self.policy,
            self.optimizer,
            self.config,
            self.collective,
            self._precision,
            device=self.device,
            on_error="raise",
        )
        return updater.update(rollouts, KL, step, 0, 1.0).export()


class ControllerTrainer(GRPOTrainer):
    """The same step from one controller."""

    worker_class = Controlled
    rows: list

    def train_epoch(self, epoch, **kwargs):
        count = self.num_workers
        ids = list(range(len(self.rows) * ROLLOUTS))
        groups = torch.tensor([i // ROLLOUTS for i in ids])
        rows = [row for row in self.rows for _ in range(ROLLOUTS)]
        parts = [slice(i * len(ids) // count, (i + 1) * len(ids) // count) for i in range(count)]
        shards = [(rows[part], ids[part]) for part in parts]

        def everywhere(method, *columns):
            calls = zip(self.workers, *columns, strict=True)
            return miniray.get([getattr(w, method).remote(*own) for w, *own in calls])

        seeds = [[row_seed(0, epoch, i) for i in own] for _, own in shards]
        own_rows, own_ids = zip(*shards, strict=True)
        made: list[Generated] = everywhere("generate", own_rows, seeds)
        rewards = torch.tensor([score(text) for part in made for text in part.texts])
        scores = advantages.grpo(rewards, groups)
        old = everywhere("log_probs", own_rows, own_ids, made, [False] * count)
        reference = everywhere("log_probs", own_rows, own_ids, made, [True] * count)
        tokens = []
        for part, logp, ref_logp, generated in zip(parts, old, reference, made, strict=True):
            lengths = torch.tensor([len(r) for r in generated.responses])
            mask = torch.arange(logp.shape[1]) < lengths[:, None]
            spread = advantages.spread(scores[part], mask)
            tokens.append({"old_logp": logp, "ref_logp": ref_logp, "advantages": spread})
        everywhere("update", own_rows, own_ids, made, tokens, [epoch] * count)
        return {"reward": float(rewards.mean())}


def main(system: str, prompts: int, image_bytes: int, steps: int) -> dict[str, list[float]]:
    texts = make_rows()

    def rows_of(low: int, high: int) -> list[dict]:
        kept = [texts[i % len(texts)]["prompt"] for i in range(low, high)]
        return [{"prompt": text, "images": [{"bytes": bytes(image_bytes)}]} for text in kept]

    def make_loader(rank: int, world_size: int) -> list[list[dict]]:
        return [rows_of(rank * prompts // world_size, (rank + 1) * prompts // world_size)]

    kind = ControllerTrainer if system == "controller" else GRPOTrainer
    miniray.init(backend="local")
    counter = DriverBytes()
    with (
        tempfile.TemporaryDirectory() as folder,
        kind(
            make_model,
            lambda row, response: score(response),
            make_loader,
            tokenizer=make_tokenizer,
            config=GRPOConfig(
                prompts_per_step=prompts, rollouts=ROLLOUTS, epochs=2, lr=LR, kl=KLPenalty(KL)
            ),
            sampling=Sampling(max_new_tokens=NEW_TOKENS),
            num_workers=2,
            seed=0,
            run_dir=Path(folder) / "run",
            progress=False,
        ) as trainer,
    ):
        trainer.rows = rows_of(0, prompts) if system == "controller" else []
        trainer.train(steps=1)
        found: dict[str, list[float]] = {"bytes": [], "seconds": []}
        for _ in range(steps):
            counter.total, began = 0, time.perf_counter()
            trainer.train(steps=1)
            found["bytes"].append(counter.total)
            found["seconds"].append(time.perf_counter() - began)
        return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", choices=["workers", "controller"], required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--image-bytes", type=int, default=33_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    made = main(chosen.system, chosen.prompts, chosen.image_bytes, chosen.steps)
    chosen.out.write_text(json.dumps(made))
