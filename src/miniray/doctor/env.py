"""Which rank this process is, from the environment its launcher gave it.

Known: ``miniray run``, torchrun (and what is built on it), Accelerate, Lightning, Ray Train, SLURM,
Open MPI. Nothing is guessed: without any of them it is rank 0 of 1.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's place in its launch."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    attempt: int = 0


def find_place(env: Mapping[str, str] | None = None) -> Place:
    """This process's place. ``ValueError`` names a variable that is no number or does not fit."""
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size = _number(env, "WORLD_SIZE")
        local_size = _number(env, "LOCAL_WORLD_SIZE", world_size)
        rank = _number(env, "RANK")
        local_rank = _number(env, "LOCAL_RANK", rank % max(1, local_size))
        attempt = _number(env, "TORCHELASTIC_RESTART_COUNT", 0)
        return _checked(Place(rank, world_size, local_rank, local_size, _launcher(env), attempt))
    if "LOCAL_RANK" in env and "WORLD_SIZE" in env:  # Lightning's subprocesses have no RANK
        world_size = _number(env, "WORLD_SIZE")
        local_rank = _number(env, "LOCAL_RANK")
        nodes = max(1, _number(env, "NUM_NODES", 1))
        local_size = _number(env, "LOCAL_WORLD_SIZE", max(1, world_size // nodes))
        rank = _number(env, "NODE_RANK", _number(env, "GROUP_RANK", 0)) * local_size + local_rank
        return _checked(Place(rank, world_size, local_rank, local_size, "lightning"))
    for launcher, rank_name, size_name, local_name, local_size_name in (
        ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        (
            "mpirun",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ):
        # A shell inside of an allocation has SLURM's variables, too, and is no task of a job step.
        if rank_name in env and size_name in env and env.get("SLURM_JOB_NAME") != "bash":
            size = _number(env, size_name)
            rank, local_rank = _number(env, rank_name), _number(env, local_name, 0)
            local_size = _number(env, local_size_name, size)
            return _checked(Place(rank, size, local_rank, local_size, launcher))
    return Place(0, 1, 0, 1, "lightning" if "lightning" in sys.modules else "none")


#: The parameters of ``init_process_group``, by position.
_PARAMETERS = ("backend", "init_method", "timeout", "world_size", "rank", "store")


def asked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Rank, world size and meeting place that a call of ``init_process_group`` asks for.

    None for what cannot be known.
    """
    given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
    method = given.get("init_method")
    place: str | None = str(method)
    if given.get("store") is not None:
        place = None
    elif method in (None, "env://"):
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    found: dict[str, Any] = {"place": place}
    for name in ("rank", "world_size"):
        unsaid = given.get(name) in (None, -1)
        text = os.environ.get(name.upper(), "") if unsaid else str(given[name])
        found[name] = int(text) if text.isdigit() else None
    return found


def _launcher(env: Mapping[str, str]) -> str:
    if env.get("MINIRAY_LAUNCHER"):
        return env["MINIRAY_LAUNCHER"]
    if "ray._private.workers.default_worker" in sys.modules or env.get("RAY_JOB_ID"):
        return "ray"
    if env.get("ACCELERATE_MIXED_PRECISION"):
        return "accelerate"
    if env.get("TORCHELASTIC_RUN_ID"):
        return "torchrun"
    return "environment"


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(str(text))
    except ValueError:
        raise ValueError(f"the environment's {name} is {text!r}: no whole number") from None


def _checked(place: Place) -> Place:
    if not 0 <= place.rank < place.world_size:
        raise ValueError(
            f"the environment says rank {place.rank} of {place.world_size}: a rank must be at "
            "least 0 and less than the number of ranks"
        )
    return place
