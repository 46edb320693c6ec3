"""``attach``: one line that makes a script of any launcher a run the doctor can read.

Which rank this process is says the environment its launcher gave it: that of ``miniray run``,
torchrun (and what is built on it), Accelerate, Lightning, Ray Train, SLURM, Open MPI. Nothing is
guessed: without any of them it is rank 0 of 1.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from miniray.checks import check_bool
from miniray.doctor import (
    instrument,
    leaving,
    processes,
    recorder,
    runfile,
)
from miniray.doctor.reader import BoxReader
from miniray.doctor.recorder import Recorder
from miniray.errors import BoxError


def attach(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    heartbeat_interval: float = 1.0,
    instrumented: bool = True,
) -> Recorder | None:
    """Record this process as a rank of a run. Put it at the top of the script, before torch.

    Rank and world size come from the environment of ``miniray run``, torchrun, Lightning,
    Accelerate, Ray Train, SLURM or Open MPI unless they are given; without any of these it is rank
    0 of 1. The run directory is ``run_dir``, else ``MINIRAY_RUN_DIR``, else
    ``runs/<script>-<time>``, on which all ranks of one launch agree (ranks of several machines do
    only on a shared file system). ``instrumented=False`` records what is told by ``doctor.step``
    and the like, and leaves torch as it is.

    Calling it again gives the same recorder, and None in a process that the rank itself has started
    (a spawned DataLoader worker imports the script again): that is part of the rank. Where an error
    does not end the process, as in Ray's workers, ``with doctor.attach(): ...`` records it.

    ``ValueError`` for an environment that contradicts itself, ``OSError`` where the run directory
    cannot be written.
    """
    check_bool("instrumented", instrumented)
    current = recorder.current()
    if current is not None:
        return current
    place = find_place()
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if rank is not None and world_size is not None:
        place = Place(rank, world_size, rank, world_size, "given")
    folder = _directory(run_dir, place)
    if _belongs_to_a_rank(folder / "ranks" / f"{place.rank}.box"):
        return None
    current = recorder.start(
        folder,
        place.rank,
        place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        launcher=place.launcher,
        attempt=place.attempt,
        heartbeat_interval=heartbeat_interval,
    )
    os.environ["MINIRAY_RUN_DIR"] = str(folder)  # ranks started from inside of this one (Lightning)
    if place.rank == 0 and not (folder / "run.json").exists():
        runfile.write_run(folder, place.world_size, place.launcher)
        atexit.register(_finish, folder, os.getpid())
    leaving.watch_threads()
    if place.launcher != "miniray run":  # which sees by itself how a rank ends
        leaving.watch()
    if instrumented:
        instrument.install()
    return current


def _belongs_to_a_rank(box: Path) -> bool:
    """Whether one of the processes above this one already is the rank."""
    try:
        with BoxReader(box) as reader:
            info = reader.info()
    except BoxError:  # nobody is yet
        return False
    owner, pid = info.get("pid"), os.getppid()
    for _ in range(64):
        if pid == owner:
            return processes.start_ticks(pid) == info.get("started")
        above = processes.parent(pid)
        if not above or above == pid:
            return False
        pid = above
    return False


def _finish(folder: Path, pid: int) -> None:
    if os.getpid() != pid:
        return
    current = recorder.current()
    failed = current is not None and current.exit_kind not in ("", "finished")
    runfile.finish_run(folder, "failed" if failed else "finished")


def _directory(run_dir: str | os.PathLike[str] | None, place: Place) -> Path:
    if run_dir is not None:
        return Path(run_dir).absolute()
    if os.environ.get("MINIRAY_RUN_DIR"):
        return Path(os.environ["MINIRAY_RUN_DIR"]).absolute()
    # Ray Train gives each worker a working directory of its own.
    root = Path(os.environ.get("TUNE_ORIG_WORKING_DIR", ".")) / "runs"
    script = re.sub(r"[^\w.-]+", "_", Path(sys.argv[0] or "run").stem).lstrip(".-") or "run"
    if place.world_size == 1:
        return runfile.new_directory(root, script).absolute()
    return (root / f"{script}-{_launch_name(place)}").absolute()


def _launch_name(place: Place) -> str:
    """What all ranks of a launch have in common and no other launch has: its time, and a digest."""
    get = os.environ.get
    keys = [get("MASTER_ADDR", ""), get("MASTER_PORT", ""), get("TORCHELASTIC_RUN_ID", "")]
    if place.launcher in ("slurm", "mpirun"):
        keys += [
            get("SLURM_JOB_ID", ""),
            get("SLURM_STEP_ID", ""),
            get("OMPI_MCA_ess_base_jobid", ""),
        ]
        return f"{place.launcher}-{_digest(keys)}"
    if place.launcher == "ray":
        return f"ray-{_digest([*keys, get('RAY_JOB_ID', '')])}"
    if place.local_world_size < place.world_size:  # other machines have other parents and clocks
        return _digest(keys)
    parent = os.getppid()
    ticks = processes.start_ticks(parent)
    return f"{_started(ticks)}-{_digest([*keys, str(parent), str(ticks)])}"


def _digest(keys: list[str]) -> str:
    return hashlib.blake2b("\0".join(keys).encode(), digest_size=3).hexdigest()


def _started(ticks: int | None) -> str:
    """The time the launcher began, to the second, computed alike by all its children."""
    if ticks is None:
        return "launch"
    import psutil

    began = psutil.boot_time() + ticks // os.sysconf("SC_CLK_TCK")
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(int(began)))


# -- the place in the launch -----------------------------------------------------------------------


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
