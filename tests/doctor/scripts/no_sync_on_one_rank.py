"""Rank 1 accumulates one batch more than the others: it averages no gradients at step 3."""

import contextlib

from common import RANK, dist, loader, model, optimizer, start, step

start()
net = model()
opt = optimizer(net)
for number, batch in enumerate(loader(), start=1):
    with net.no_sync() if RANK == 1 and number == 3 else contextlib.nullcontext():
        step(net, opt, batch)
dist.barrier()
