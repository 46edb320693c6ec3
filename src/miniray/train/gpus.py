"""Choose how many GPUs each worker of a trainer reserves."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from miniray.checks import check_bool
from miniray.core import session
from miniray.errors import ActorUnschedulableError

#: Set in workers whose GPU the trainer reserved.
_DEVICE = "MINIRAY_DEVICE"


def check_use_gpu(use_gpu: Any, creates_workers: bool) -> None:
    """Raise ``ValueError`` if the option isn't a bool, or if ``create_worker`` is overridden."""
    if use_gpu is None:
        return
    if not creates_workers:
        raise ValueError(
            "use_gpu has no effect on an overridden create_worker(). "
            "Use MyWorker.options(num_gpus=1).remote(...) there."
        )
    check_bool("use_gpu", use_gpu)


def choose_num_gpus(
    trainer: str,
    num_workers: int,
    use_gpu: bool | None,
    requested: float | None,
    is_automatic: bool,
) -> float | None:
    """Return the number of GPUs that each worker reserves; None if the options don't set it.

    Call it after the engine has started and before workers are created.

    Args:
        trainer: Name of the trainer, for errors.
        num_workers: Number of workers.
        use_gpu: True: one GPU per worker. False: none. None: one per worker if the machine has
            GPUs and ``is_automatic`` is set.
        requested: ``num_gpus`` of the worker class or of ``resources_per_worker``.
        is_automatic: Whether the workers train with torch.

    Raises:
        ActorUnschedulableError: The machine or cluster has fewer GPUs than workers. It may have no
            GPUs if ``use_gpu`` isn't True.
        ValueError: ``use_gpu`` contradicts ``requested``.
    """
    if requested is not None:
        if use_gpu is not None and use_gpu != (requested > 0):
            raise ValueError(f"use_gpu={use_gpu} contradicts num_gpus={requested:g} of the workers")
        return requested
    if use_gpu is False:
        return 0.0
    if use_gpu is None and not is_automatic:
        return None
    engine = session.engine()
    total = int(engine.cluster_resources().get("GPU", 0))
    if total == 0 and use_gpu is None:
        return None
    if total < num_workers:
        where = "the cluster" if engine.capabilities.multi_node else "this machine"
        raise ActorUnschedulableError(_format_shortage(trainer, num_workers, total, where))
    return 1.0


def _format_shortage(trainer: str, num_workers: int, total: int, where: str) -> str:
    head = (
        f"{trainer} reserves one GPU per worker: {num_workers} in total, but {where} has {total}."
    )
    choices = ["use_gpu=False, to train on the CPU"]
    if total:
        # Two decimals, rounded down, so that the shares of a GPU add up to at most 1.
        share = math.floor(100 / math.ceil(num_workers / total)) / 100
        choices = [
            f"num_workers={total}, to use one worker per GPU",
            f'resources_per_worker={{"num_gpus": {share:g}}}, to share GPUs between workers',
            *choices,
        ]
    return "\n".join([f"{head} Pass one of these options:", *(f"  {c}" for c in choices)])


def get_options(num_gpus: float | None) -> dict[str, float]:
    """Return the option of a worker's actor that reserves this number of GPUs."""
    return {} if num_gpus is None else {"num_gpus": num_gpus}


def get_environment(num_gpus: float | None, use_gpu: bool | None) -> Mapping[str, str]:
    """Return the environment variables of a worker that reserves this number of GPUs."""
    if use_gpu is False:
        return {"CUDA_VISIBLE_DEVICES": ""}  # a worker that reserves none sees all otherwise
    return {_DEVICE: "cuda:0"} if num_gpus else {}


def find_device() -> str:
    """Return the device of a worker that lets the trainer choose it: ``"cuda:0"`` or ``"cpu"``."""
    import torch

    return os.environ.get(_DEVICE, "cpu") if torch.cuda.is_available() else "cpu"
