"""verl's RLHFDataset in every rank: all rows read by each, DistributedSampler, verl's collate_fn.

The loader drops the last incomplete batch, as verl's trainer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_peers.common import Batch, Run


def _open(run: Run) -> Any:
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    datasets.config.HF_DATASETS_CACHE = run.scratch / "verl-cache"
    config = OmegaConf.create(
        {
            "cache_dir": str(run.scratch / "verl"),
            "filter_overlong_prompts": False,
            "shuffle": True,
            "seed": run.seed,
        }
    )
    # Neither is called here: verl tokenizes in the rollout.
    return RLHFDataset(list(run.files), tokenizer=object(), config=config, processor=object())


def prepare(run: Run) -> None:
    _open(run)


class Loader:
    def __init__(self, run: Run) -> None:
        import torch
        from torch.utils.data import DistributedSampler
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import RandomSampler
        from verl.utils.dataset.rl_dataset import collate_fn

        rows = _open(run)
        sampler: Any
        if run.world_size == 1:
            generator = torch.Generator().manual_seed(run.seed)
            sampler = RandomSampler(rows, generator=generator)
        else:
            sampler = DistributedSampler(
                rows, run.world_size, run.rank, shuffle=True, seed=run.seed
            )
        self._run = run
        self._loader = StatefulDataLoader(
            rows,
            batch_size=run.batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=True,
        )
        if run.resumed_ranks:
            self._loader.load_state_dict(run.state)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            images = [
                part["bytes"]
                for messages in batch["raw_prompt"]
                for part in messages[0]["content"]
                if part["type"] == "image"
            ]
            yield batch["index"].tolist(), self._run.images(images)

    def state(self) -> Any:
        return self._loader.state_dict()
