"""all_gather under `if rank == 0`."""

from common import RANK, WORLD, dist, start, torch

start()
for _ in range(3):
    dist.all_reduce(torch.ones(2))
mean = torch.ones(1)
if RANK == 0:
    parts = [torch.zeros(1) for _ in range(WORLD)]
    dist.all_gather(parts, mean)
dist.broadcast(mean, src=0)
