"""Rank 0 prepares the data for longer than the limit; the others wait."""

import time

from common import RANK, dist, start

from miniray import doctor

start()
dist.barrier()
if RANK == 0:
    with doctor.phase("prepare_data"):
        time.sleep(600)
dist.barrier()
