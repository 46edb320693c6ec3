"""What is checked before the ranks of a DDP run may wait for one another.

Once they wait, a difference between them is a hang. So everything they must agree on is compared on
the driver first, and the error names the ranks and shows both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miniray.errors import WeightsMismatchError

if TYPE_CHECKING:
    from miniray.train.ddp import DDPTrainer

#: What of DistributedDataParallel may be set; the rest is the trainer's business.
DDP_OPTIONS = (
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)
_CHOICES = {
    "uneven": ("join", "pad", "drop", "error"),
    "precision": ("fp32", "bf16", "fp16"),
    "on_nonfinite": ("error", "ignore"),
    "group_backend": ("auto", "gloo", "nccl"),
}


def check_arguments(
    *,
    accumulate: Any,
    clip_norm: Any,
    hang_timeout: float,
    timeout: float,
    models: Any,
    **chosen: str,
) -> None:
    """Refuse arguments of ``DDPTrainer`` that make no sense, with ``ValueError``."""
    for name, value in chosen.items():
        if value not in _CHOICES[name]:
            choices = ", ".join(map(repr, _CHOICES[name]))
            raise ValueError(f"{name} must be one of {choices}, not {value!r}")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be an int >= 1, not {accumulate!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be a number > 0 or None, not {clip_norm!r}")
    for name, limit in (("hang_timeout", hang_timeout), ("timeout", timeout)):
        if not limit > 0:
            raise ValueError(f"{name} must be a number of seconds > 0, not {limit!r}")
    if isinstance(models, str) or not models:
        raise ValueError(f"models must be names of attributes, not {models!r}")


def refuse_step_options(trainer: DDPTrainer) -> None:
    """A loop of the user's own makes its own steps: what it would not do is not accepted."""
    mine = {
        "accumulate": trainer.accumulate != 1,
        "precision": trainer.precision != "fp32",
        "clip_norm": trainer.clip_norm is not None,
        f"uneven={trainer.uneven!r}": trainer.uneven in ("pad", "drop"),
    }
    asked = [name for name, is_set in mine.items() if is_set]
    if asked:
        raise ValueError(
            f"{', '.join(asked)} need a worker with training_step(batch, batch_idx): with "
            "train_epoch(epoch) the steps are the worker's own"
        )


def agree(facts: Sequence[dict[str, Any]], accumulate: int, uneven: str) -> list[int] | None:
    """Compare what the ranks say of themselves; how many batches each brings, where that counts.

    Raises ``WeightsMismatchError`` where their models differ and ``ValueError`` where devices or
    numbers of batches do, in a way that cannot be trained.
    """
    from miniray.train.ddp_model import compare_signatures
    from miniray.train.ddp_plan import counted_windows

    problem = compare_signatures([fact["models"] for fact in facts])
    if problem is not None:
        raise WeightsMismatchError(f"the workers' models differ: {problem}")
    kinds = [fact["device"] for fact in facts]
    if len(set(kinds)) > 1:
        shown = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise ValueError(f"the workers' models are on different kinds of devices ({shown})")
    if not facts[0]["steps"] or facts[0]["planned"]:
        return None
    counts = [fact["batches"] for fact in facts]
    if all(count is not None for count in counts):
        counted_windows(counts, 0, accumulate, uneven)
        return counts
    if accumulate > 1 or (uneven != "join" and len(facts) > 1):
        raise ValueError(
            "self.train_loader has no len(): only accumulate=1 and uneven='join' can do without it"
        )
    return None


def choose_backend(wanted: str, facts: Sequence[dict[str, Any]]) -> str:
    """NCCL where every rank has a GPU that no other has, else gloo; or what the user wants."""
    if wanted != "auto":
        return wanted
    gpus = {(fact["host"], fact["gpu"]) for fact in facts if fact["gpu"] is not None}
    return "nccl" if len(gpus) == len(facts) else "gloo"
