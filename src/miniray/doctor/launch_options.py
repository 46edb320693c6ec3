"""What ``miniray run`` is told, and what it tells the ranks: options, ports, environment."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from pathlib import Path

from miniray.errors import MinirayError


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run and how. ``command`` is a script with its arguments, or ``-m module ...``."""

    command: tuple[str, ...]
    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    max_restarts: int = 0
    run_dir: Path | None = None
    hang_timeout: float = 60.0
    instrument: bool = True

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    @property
    def first_rank(self) -> int:
        """Of this machine."""
        return self.node_rank * self.nproc


def check(options: Options) -> None:
    """``ValueError`` or ``FileNotFoundError`` for what cannot work, before anything starts."""
    if options.nproc < 1 or options.nnodes < 1:
        raise ValueError("--nproc and --nnodes must be at least 1")
    if not 0 <= options.node_rank < options.nnodes:
        raise ValueError(f"--node-rank must be between 0 and {options.nnodes - 1}")
    if options.hang_timeout <= 0:
        raise ValueError("--hang-timeout must be more than 0 seconds")
    if options.nnodes > 1 and options.master_port is None:
        raise ValueError("several nodes need one --master-addr and --master-port for all of them")
    if options.nnodes > 1 and options.max_restarts:
        raise ValueError("--max-restarts works on one machine only")
    if options.command[0] != "-m" and not Path(options.command[0]).is_file():
        raise FileNotFoundError(f"there is no script {options.command[0]}")


def choose_port(options: Options) -> int:
    """The port torch's rank 0 will listen on. A taken one is replaced, on one machine."""
    wanted = options.master_port
    if options.nnodes > 1:
        assert wanted is not None
        if options.node_rank == 0 and not _is_free(wanted):
            raise MinirayError(
                f"port {wanted} is taken: choose another --master-port for all nodes"
            )
        return wanted
    if wanted is not None and _is_free(wanted):
        return wanted
    port = _free_port()
    if wanted is not None:
        say(f"port {wanted} is taken, using {port}")
    return port


def environment(
    options: Options,
    local_rank: int,
    port: int,
    attempt: int,
    run_id: str,
    seed: int,
    run_dir: Path,
) -> dict[str, str]:
    """What torchrun would set for a rank, and ours."""
    rank = options.first_rank + local_rank
    env = dict(os.environ)
    if options.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(options.world_size),
        LOCAL_WORLD_SIZE=str(options.nproc),
        GROUP_RANK=str(options.node_rank),
        GROUP_WORLD_SIZE=str(options.nnodes),
        ROLE_NAME="default",
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(options.world_size),
        MASTER_ADDR=options.master_addr,
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=run_id,
        TORCHELASTIC_RESTART_COUNT=str(attempt),
        TORCHELASTIC_MAX_RESTARTS=str(options.max_restarts),
        TORCHELASTIC_USE_AGENT_STORE="False",
        PYTHONUNBUFFERED="1",
        MINIRAY_LAUNCHER="miniray run",
        MINIRAY_LAUNCHER_PID=str(os.getpid()),
        MINIRAY_RUN_DIR=str(run_dir),
        MINIRAY_RUN_SEED=str(seed),
        MINIRAY_INSTRUMENT="1" if options.instrument else "0",
    )
    return env


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def say(text: str) -> None:
    print(f"[miniray run] {text}", file=sys.stderr, flush=True)
