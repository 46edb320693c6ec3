"""Rank 1 may have no more than 64 MB beyond what it has, and wants more."""

import resource

from common import RANK, loader, model, optimizer, start, step, torch

start()
net = model()
opt = optimizer(net)
kept = []
for number, batch in enumerate(loader()):
    if RANK == 1 and number == 2:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), -1))
        kept.append(torch.zeros(1 << 30))
    step(net, opt, batch)
