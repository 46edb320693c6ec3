"""What ``miniray run`` is told, and what it tells the ranks: options, ports, environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from miniray.doctor.mirror_wire import SHORTEST_TOKEN, TOKEN_VARIABLE
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
    #: The run directory goes when who started this has read it: it is not worth naming.
    temporary: bool = False
    #: Of a run on several machines: who knows it may join. Machine 0 makes one where it has none.
    token: str = dataclasses.field(
        default_factory=lambda: os.environ.get(TOKEN_VARIABLE, ""), repr=False
    )

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
    if not options.hang_timeout > 0:  # nor is nan
        raise ValueError("--hang-timeout must be more than 0 seconds")
    if options.nnodes > 1 and options.master_port is None:
        raise ValueError(
            "--nnodes > 1 requires the same --master-addr and --master-port on all machines"
        )
    if options.node_rank and not options.token:
        raise ValueError(
            f"machine {options.node_rank} requires {TOKEN_VARIABLE} in its environment, "
            "with the value that machine 0 uses or prints"
        )
    if options.nnodes > 1 and 0 < len(options.token) < SHORTEST_TOKEN:
        raise ValueError(f"{TOKEN_VARIABLE} must have at least {SHORTEST_TOKEN} characters")
    if options.nnodes > 1 and options.max_restarts:
        raise ValueError("--max-restarts isn't supported with --nnodes > 1")
    if options.command[0] != "-m" and not Path(options.command[0]).is_file():
        raise FileNotFoundError(f"Script {options.command[0]} doesn't exist.")


@contextlib.contextmanager
def master_port(options: Options) -> Iterator[int]:
    """The port torch's rank 0 will listen on, kept for it. A taken one is replaced, on one machine.

    Rank 0 listens seconds from now. Until then the port is bound here, and not listened on: so the
    kernel gives it to nobody who asks for any free port, and rank 0, whose store sets SO_REUSEADDR
    as all servers do, still may listen on it.
    """
    wanted = options.master_port
    if options.node_rank:  # it is a port of machine 0
        assert wanted is not None
        yield wanted
        return
    held = _hold(wanted) if wanted is not None else None
    if held is None and options.nnodes > 1:
        raise MinirayError(
            f"Port {wanted} is in use. Choose a different --master-port for all machines."
        )
    if held is None:
        held = _hold_any()
        if wanted is not None:
            say(f"port {wanted} is in use; using port {held.getsockname()[1]}")
    with held:
        port = int(held.getsockname()[1])
        if sys.platform != "linux":  # elsewhere a bound port is nobody else's, whatever they set
            held.close()
        yield port


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
    env.pop(TOKEN_VARIABLE, None)  # for launchers only
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


def _hold(port: int) -> socket.socket | None:
    """A socket bound to the port; None where somebody listens on it."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("", port))
    except OSError:
        held.close()
        return None
    return held


def _hold_any() -> socket.socket:
    """A socket bound to a port that nobody else has; rank 0 may share it from now on."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.bind(("", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def say(text: str) -> None:
    print(f"[miniray run] {text}", file=sys.stderr, flush=True)


def say_at_length(text: str) -> None:
    """In lines that fit into 80 columns."""
    for line in text.splitlines():
        for part in textwrap.wrap(line, 66, subsequent_indent="  ", break_on_hyphens=False):
            say(part)
