"""Checks before the ranks of a DDP run wait for each other.

If ranks differ, they can hang in a collective. The driver therefore compares all values that must
be equal first, and the error names the ranks and shows both values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from miniray.checks import check_choice, check_int
from miniray.core.refs import ActorHandle
from miniray.train.lockstep.context import RankContext, WorkerTraits
from miniray.train.lockstep.options import RunFacts


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSettings(RunFacts):
    """Settings of all ranks; see ``DDPTrainer``. Invalid values raise ``ValueError``."""

    accumulate: int = 1
    precision: str = "fp32"
    models: Sequence[str] = ("model",)
    shard: str = "none"
    uneven: str = "join"
    compile: Any = False
    ddp_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def create_replica(self, user: Any, traits: WorkerTraits, context: RankContext) -> Any:
        if self.shard == "full":  # torch's FSDP takes a second to import
            from miniray.train.ddp.sharded import ShardedReplica

            return ShardedReplica(user, traits, self, context)
        from miniray.train.ddp.replicated import ReplicatedModel

        return ReplicatedModel(user, traits, self, context)

    def __post_init__(self) -> None:
        check_choice("shard", self.shard, ("none", "full"))
        check_choice("uneven", self.uneven, ("join", "pad", "drop", "error"))
        check_choice("precision", self.precision, ("fp32", "bf16", "fp16"))
        if isinstance(self.models, str) or not self.models:
            raise ValueError(f"models must be names of attributes, not {self.models!r}")
        if not isinstance(self.compile, (bool, str, Mapping)):
            raise ValueError(
                f"compile must be True, a backend's name or a dict of options, not {self.compile!r}"
            )
        _check_combinations(self)


def _check_combinations(settings: RankSettings) -> None:
    if settings.ddp_options.get("static_graph") and settings.accumulate > 1:
        raise ValueError(
            "static_graph=True and accumulate= can't be combined, because torch records the graph "
            "in the first step, which must average gradients"
        )
    if settings.shard == "none":
        return
    if settings.ddp_options:
        raise ValueError(
            f"{', '.join(settings.ddp_options)} "
            f"{'requires' if len(settings.ddp_options) == 1 else 'require'} "
            'DistributedDataParallel, which isn\'t used with shard="full"'
        )
    models = tuple(settings.models)
    if models != ("model",):
        raise ValueError(f'shard="full" only shards self.model and doesn\'t support {models=}')
    if settings.compile:
        raise ValueError(
            'shard="full" and compile= can\'t be combined, because weights are gathered between '
            "layers. Compile parts of the model in the worker (self.model.head.compile())"
        )


def check_min_workers(min_workers: Any, num_workers: int, settings: RankSettings) -> int:
    """Return the option ``min_workers``. Raise ``ValueError`` if it is invalid."""
    checked = check_int("min_workers", min_workers, 1)
    if checked > num_workers:
        raise ValueError(f"min_workers={checked} is more than num_workers={num_workers}")
    if settings.shard != "none":
        raise ValueError(
            f'min_workers needs shard="none": with shard={settings.shard!r}, a part of the model '
            "is lost with each worker"
        )
    return checked


def check_divisible(facts: Sequence[dict[str, Any]]) -> None:
    """Raise ``ValueError`` if the rest of an epoch can't be divided among fewer ranks."""
    ranks = [rank for rank, fact in enumerate(facts) if fact["steps"] and not fact["divisible"]]
    if ranks:
        raise ValueError(
            "min_workers needs data= or a self.train_loader that miniray shards, but rank "
            f"{ranks[0]} has a loader with its own shard or its own sampler. The rest of an epoch "
            "can't be divided among fewer workers without repeating or losing rows. Use a "
            "DataLoader over all samples, or a loader of miniray.data"
        )


def check_no_step_options(settings: RankSettings) -> None:
    """Raise ``ValueError`` for options that a worker with its own loop would ignore."""
    mine = {
        'shard="full"': settings.shard != "none",
        "accumulate": settings.accumulate != 1,
        "precision": settings.precision != "fp32",
        "clip_norm": settings.clip_norm is not None,
        f"uneven={settings.uneven!r}": settings.uneven in ("pad", "drop"),
    }
    asked = [name for name, is_set in mine.items() if is_set]
    if asked:
        raise ValueError(
            f"{', '.join(asked)} need a worker with training_step(batch, batch_idx), because a "
            "worker with train_epoch(epoch) runs its own steps"
        )


def check_can_evaluate(worker: ActorHandle[Any]) -> None:
    """Raise ``TypeError`` if the workers have neither ``evaluate`` nor ``validation_step``."""
    if not {"evaluate", "validation_step"}.intersection(worker._info.list_methods()):
        raise TypeError(
            f"worker class {worker._info.class_name} can't be evaluated. Implement "
            "validation_step(batch, batch_idx) or evaluate()"
        )


def check_val_loader(facts: Sequence[dict[str, Any]], eval_interval: int) -> None:
    """Raise ``TypeError`` if ``eval_interval`` is set and a rank has no ``val_loader``."""
    missing = [rank for rank, fact in enumerate(facts) if not fact["val_loader"]]
    if missing:
        raise TypeError(
            f"eval_interval={eval_interval} requires self.val_loader, which rank "
            f"{', '.join(map(str, missing))} doesn't have. Create it in __init__ or in "
            "load_data_shard"
        )


def check_agreement(facts: Sequence[dict[str, Any]], settings: RankSettings) -> list[int] | None:
    """Check that the ranks can train together, and return the batches per rank if they matter.

    Raise ``WeightsMismatchError`` if their models differ, and ``ValueError`` if their devices or
    numbers of batches differ in a way that can't be trained.
    """
    from miniray.train.ddp.model import check_signatures
    from miniray.train.workers.data.plan import create_counted_windows

    check_signatures([fact["models"] for fact in facts])
    kinds = [fact["device"] for fact in facts]
    if len(set(kinds)) > 1:
        shown = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise ValueError(f"the workers' models are on different kinds of devices ({shown})")
    if not facts[0]["steps"] or facts[0]["planned"]:
        return None
    counts = [fact["batches"] for fact in facts]
    if all(count is not None for count in counts):
        create_counted_windows(counts, 0, settings.accumulate, settings.uneven)
        return counts
    alone = len(facts) == 1 or (settings.uneven == "join" and len(settings.models) == 1)
    if settings.accumulate > 1 or settings.shard == "full" or not alone:
        raise ValueError(
            "self.train_loader must have len(), unless accumulate=1, uneven='join', shard='none' "
            "and there is a single model"
        )
    return None


def create_parts_error(method: str, model: str) -> RuntimeError:
    """Return the error for a model whose parts were called instead of the model itself."""
    return RuntimeError(
        f"{method} must call self.{model}(...) itself. If it calls submodules "
        f"(self.{model}.encoder(x)), gradients aren't averaged, and the ranks' models diverge"
    )


def read_output(output: Any, rank: int) -> tuple[Any, dict[str, Any]]:
    """Return the loss and all metrics from the result of a step."""
    import torch

    metrics = dict(output) if isinstance(output, Mapping) else {"loss": output}
    loss = metrics.get("loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"{type(output).__name__} {output!s:.80}"
        if isinstance(loss, float):
            what += ". Return the tensor itself, without .item()"
        elif isinstance(loss, torch.Tensor):
            what = f"a tensor of shape {tuple(loss.shape)}. Return its mean()"
        elif output is None:
            what = (
                "None. A rank can't skip a step, because the others wait for its gradients. "
                "Return a loss multiplied by 0 instead"
            )
        raise TypeError(
            f"training_step() on rank {rank} must return the loss as a scalar tensor, or a dict "
            f'with it as "loss", not {what}'
        )
    if not loss.requires_grad:
        raise RuntimeError(
            f"the loss of rank {rank} has no gradient, because it was detached or depends on no "
            "trainable parameter. A rank can't skip a step, because the others wait for its "
            "gradients. Return a loss multiplied by 0 instead"
        )
    return loss.reshape(()), metrics
