"""Ranks with different numbers of batches, joined as DDP wants it."""

from common import RANK, dataset, dist, model, optimizer, start, step, torch
from torch.utils.data import DataLoader, Subset

start()
mine = range(10) if RANK == 0 else range(10, 24)
batches = DataLoader(Subset(dataset(24), list(mine)), batch_size=2)
net = model()
opt = optimizer(net)
for _ in range(2):
    with net.join():
        for batch in batches:
            step(net, opt, batch)
    dist.all_reduce(torch.ones(1))
dist.barrier()
