"""A progress bar that hangs a whole run, and the doctor that says so.

    python examples/deadlock_tqdm.py           # hangs; diagnosed and ended after a few seconds
    python examples/deadlock_tqdm.py --fixed   # the bar made where it belongs

Rank 0 builds its tqdm bar between two barriers. tqdm's lock is shared with child processes; one of
them, a loader worker, was killed while it held the lock. So rank 0 waits for the lock for ever, and
the other ranks, already through the first barrier, wait for rank 0 at the second one. Plain torch
says nothing for 30 minutes, and then "Timed out waiting for recv".
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

RANKS = 3


def train(fixed):
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # everybody is here

    if rank == 0:
        lose_the_lock()
    bar = None
    if rank == 0 and not fixed:
        bar = tqdm(total=20, desc="epoch 0")  # between two barriers: nobody gets past this line
    dist.barrier()  # everybody is ready
    if rank == 0 and fixed:
        tqdm.set_lock(threading.RLock())  # of this process only: no child can keep it
        bar = tqdm(total=20, desc="epoch 0")

    weights = torch.zeros(4)
    for _ in range(20):
        gradient = torch.ones(4)
        dist.all_reduce(gradient)
        weights -= 0.1 * gradient / RANKS
        if bar is not None:
            bar.update()
    if bar is not None:
        bar.close()
    if rank == 0:
        print(f"done: {weights.tolist()}")
    dist.destroy_process_group()


def lose_the_lock():
    """What a loader worker does that is killed at the wrong moment."""
    from tqdm import tqdm

    lock = tqdm.get_lock()

    def worker():
        lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=worker)
    child.start()
    child.join()


def main():
    arguments = sys.argv[1:]
    if "RANK" in os.environ:
        train(fixed="--fixed" in arguments)
        return 0
    command = [sys.executable, "-m", "miniray", "run", "--nproc", str(RANKS), "--hang-timeout", "5"]
    command += [os.path.abspath(__file__), *arguments]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
