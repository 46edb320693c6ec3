"""Rank 0 waits at a barrier that only rank 0 comes to; the others average a metric."""

from common import RANK, dist, loader, model, optimizer, start, step, torch

start()
net = model()
opt = optimizer(net)
for number, batch in enumerate(loader()):
    step(net, opt, batch)
    if RANK == 0 and number == 2:
        dist.barrier()
    dist.all_reduce(torch.ones(1))
