"""Ranks 0 and 1 have a group of their own; rank 1 forgets to pass it."""

from common import RANK, dist, start, torch

start()
pair = dist.new_group([0, 1])
value = torch.ones(1)
if RANK == 0:
    dist.all_reduce(value, group=pair)
elif RANK == 1:
    dist.all_reduce(value)
dist.all_reduce(value)
