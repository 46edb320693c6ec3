"""Rank 0 builds its progress bar between two barriers and gets stuck in tqdm's lock."""

import multiprocessing

from common import RANK, dist, start
from tqdm import tqdm

start()
dist.barrier()
if RANK == 0:
    lock = multiprocessing.RLock()
    tqdm.set_lock(lock)
    holder = multiprocessing.get_context("fork").Process(target=lock.acquire, daemon=True)
    holder.start()
    holder.join()  # it ended with the lock in its hand
    tqdm(range(10), desc="epoch 0")
dist.barrier()
