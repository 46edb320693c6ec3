"""SIGKILL while batches are read ahead: nothing is lost, nothing comes twice, nothing is left."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

from miniray.data import DataLoader, ParquetDataset


def work(folder, log, dies_at):
    """Write the rows of each batch with the state, and resume from the last line.

    The process is killed while it reads ahead, at row ``dies_at``.
    """
    rows = itertools.count(1)

    def transform(row):
        if next(rows) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    shard = ParquetDataset(folder, shuffle=True, seed=3)
    loader = DataLoader(shard, 5, prefetch=4, decode_workers=2, transform=transform)
    if os.path.exists(log):
        with open(log) as file:
            lines = [line for line in file if line.endswith("\n")]
        if lines:
            loader.load_state_dict(json.loads(lines[-1])["state"])
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for batch in loader:
        line = {"rows": batch["id"].tolist(), "state": loader.state_dict()}
        os.write(descriptor, json.dumps(line).encode() + b"\n")


def test_a_rank_killed_again_and_again_delivers_each_row_once(parquet_folder, tmp_path):
    log, rng = tmp_path / "log", random.Random(5)
    for dies_at in [*(rng.randrange(1, 35) for _ in range(6)), None]:  # 237 rows outlast these
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(parquet_folder, log, dies_at)
                status = 0
            finally:
                os._exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert ended == (-signal.SIGKILL if dies_at else 0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(row for line in lines for row in line["rows"]) == list(range(237))


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_worker_processes_end_with_a_killed_rank(parquet_folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from miniray.data import DataLoader, ParquetDataset

            def transform(row):
                return {"pid": os.getpid()}

            if __name__ == "__main__":
                loader = DataLoader(ParquetDataset(sys.argv[1]), 20, transform=transform,
                                    decode_workers=2, decode_processes=True)
                iterator = iter(loader)
                pids = {pid for _ in range(3) for pid in next(iterator)["pid"].tolist()}
                print(*pids, flush=True)
                time.sleep(60)
            """
        )
    )
    rank = subprocess.Popen(
        [sys.executable, str(script), str(parquet_folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        workers = [int(pid) for pid in rank.stdout.readline().split()]
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    assert workers
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(map(gone, workers)):
        time.sleep(0.02)
    assert all(map(gone, workers))
