"""What runs in the workers of ``train_ppo.py``: their own loader, warm-up, steps and guesses.

Nothing of a row leaves its worker, except a guess and the truth at the end, for the map.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import checks
import reward as scoring
import torch
from byte_tokenizer import ByteTokenizer
from geoguessr_dataset_distributed import GeoguessrRLHFDatasetDistributed
from policy import ANSWER_TOKENS, pixels

from miniray.data import DataLoader
from miniray.rl import Quad, RLWorker, held_out, make_source, sum_gradients


@dataclasses.dataclass(frozen=True)
class PlaceLoader:
    """``make_loader(rank, world_size)``: batches of this worker's own rows, decoded ahead.

    ``batch`` rows of all workers together make a step. Pictures become pixels of ``side`` in the
    loader's threads, for the next two batches and within its memory budget.
    """

    files: Sequence[str]
    batch: int
    side: int
    seed: int | None = None  # None: in the files' order
    decode_workers: int = 0  # 0: the thread that reads decodes too

    def __call__(self, rank: int, world_size: int) -> DataLoader:
        shuffled = {"shuffle": self.seed is not None, "seed": self.seed}
        dataset = GeoguessrRLHFDatasetDistributed(
            list(self.files),
            ByteTokenizer(),
            # Padded tensors of every prompt are nothing a policy asks for.
            {**checks.CONFIG, **shuffled, "tokenize": False},
            rank=rank,
            world_size=world_size,
        )

        def small(row: Mapping[str, Any]) -> dict[str, Any]:
            found = dataset.encode(row)
            return {
                "index": found["index"],
                "pixels": pixels(row["images"][0]["bytes"], self.side),
                "prompt_ids": dataset.encoder.ids(dataset.encoder.text(found["raw_prompt"])),
                "place": tuple(found["place"].tolist()),
            }

        own = self.batch * (rank + 1) // world_size - self.batch * rank // world_size
        return dataset.loader(
            own, transform=small, collate_fn=list, decode_workers=self.decode_workers
        )


def place_reward(row: Mapping[str, Any], response: str) -> dict[str, float]:
    """``exp(-d / 1492.7)``; with it, whether there was an answer, and a near one."""
    lat, lon = row["place"]
    told = scoring.compute_score("geoguessr", response, {"lat": lat, "lon": lon})
    return {"reward": told["score"], **{name: told[name] for name in ("answered", "acc@750km")}}


class PlaceWorker(RLWorker):
    """``RLWorker`` that can also imitate right answers, and show its guesses."""

    def warm_up(self, step: int, steps: int, lr: float) -> dict[str, Quad]:
        """One supervised step, with the other workers: the form of an answer, and a first idea.

        By the run's own optimizer: it then knows how large gradients are, and the first steps of
        reinforcement learning do not undo what was learnt. The rate rises over the first tenth and
        falls to a tenth; after the last step it is the run's again.
        """
        if step == 0:
            batch = self.config.prompts_per_step
            self._lessons = make_source(self.setup.data, batch, self.rank, self.setup.num_workers)
        self.set_lr(lr * min(1.0, (step + 1) / max(1, steps // 10)) * (1 - 0.9 * step / steps))
        rows = self._lessons.rows(step, 0)
        total = float(self.collective.sum(torch.tensor(float(len(rows))), "rows of the warm-up"))
        self.optimizer.zero_grad(set_to_none=True)
        length = len(self.policy.encode(rows[0])) + ANSWER_TOKENS
        at_a_time = max(1, self.config.micro_batch_tokens // length)
        told = 0.0
        for start in range(0, len(rows), at_a_time):
            part = rows[start : start + at_a_time]
            with self._precision():
                loss = self.policy.imitation_loss(part) * len(part)
            (loss / total).backward()
            told += float(loss.detach())
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        sum_gradients(parameters, self.collective, f"gradients of warm-up step {step}")
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        self.optimizer.step()
        if step == steps - 1:
            del self._lessons
            self.set_lr(self.config.lr)
        mean = told / len(rows)
        return {"loss": (told, float(len(rows)), mean, mean)}

    def train_epoch(self, epoch: int, seed: int, kl_coef: float) -> dict[str, Quad]:
        """A step; also tells the seconds spent on handing pictures over, and the GPU's memory."""
        before = self.policy.pictures.seconds
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        told = super().train_epoch(epoch, seed, kl_coef)
        numbers = {"picture_seconds": self.policy.pictures.seconds - before}
        if self.device.type == "cuda":
            numbers["gpu_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        return {**told, **{name: (x, 1.0, x, x) for name, x in numbers.items()}}

    def guess(self, shard_id: int, num_shards: int) -> list[tuple[float, float, float, float]]:
        """(lat, lon) guessed and true of this worker's held-out rows; NaN for no answer."""
        made = []
        greedy = dataclasses.replace(self.setup.sampling, temperature=0.0)
        numbered = list(held_out(self.setup.eval_data, shard_id, num_shards))
        for start in range(0, len(numbered), self.sequences_per_step):
            part = numbered[start : start + self.sequences_per_step]
            rows = [row for _, row in part]
            texts = self._generate(rows, [i for i, _ in part], greedy).texts
            for row, text in zip(rows, texts, strict=True):
                guessed = scoring.parse_answer(text) or (math.nan, math.nan)
                made.append((*guessed, *row["place"]))
        return made
