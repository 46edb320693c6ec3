"""Rank 1 raises at its third batch."""

from common import RANK, loader, model, optimizer, start, step

start()
net = model()
opt = optimizer(net)
for number, batch in enumerate(loader()):
    if RANK == 1 and number == 2:
        raise ValueError("label 17 out of range")
    step(net, opt, batch)
