"""Start a lighthouse and, under torchrun, two replica groups of one process each.

    python torchft_launch.py SCRIPT

Ends with the status of the first replica group that fails, else 0.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def find_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def main() -> int:
    port = find_port()
    lighthouse = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("torchft_lighthouse")),
            *("--bind", f"127.0.0.1:{port}", "--min_replicas", "1"),
            *("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
        ]
    )
    try:
        address = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
        groups = [
            subprocess.Popen(
                [*torchrun, "--standalone", "--max-restarts", "3", sys.argv[1]],
                env={**os.environ, **address, "REPLICA_GROUP_ID": str(group)},
            )
            for group in range(2)
        ]
        return max(group.wait() for group in groups)
    finally:
        lighthouse.kill()
        lighthouse.wait()


if __name__ == "__main__":
    sys.exit(main())
