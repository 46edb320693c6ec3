"""Rank 1 looks for something that never comes."""

from common import RANK, dist, start

start()


def search():
    value = 1
    while value != 0:
        value = value % 7 + 1


if RANK == 1:
    search()
dist.barrier()
