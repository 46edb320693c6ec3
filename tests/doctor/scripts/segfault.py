"""Rank 1 crashes in C."""

import ctypes

from common import RANK, loader, model, optimizer, start, step

start()
net = model()
opt = optimizer(net)
for number, batch in enumerate(loader()):
    if RANK == 1 and number == 3:
        ctypes.string_at(0)
    step(net, opt, batch)
