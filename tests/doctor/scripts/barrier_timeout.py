"""Rank 1 does not come to a named barrier in time: rank 0's error is a consequence."""

import time

from common import RANK, start

from miniray import doctor

start()


def write_checkpoint():
    time.sleep(600)


if RANK == 1:
    write_checkpoint()
doctor.barrier("epoch end", timeout=2)
