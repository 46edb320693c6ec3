"""Rank 1 changes its weights by itself, and checksums are noted."""

from common import RANK, loader, model, optimizer, start, step, torch

from miniray import doctor

start()
net = model()
opt = optimizer(net)
for number, batch in enumerate(loader(), start=1):
    step(net, opt, batch)
    if RANK == 1 and number == 4:
        with torch.no_grad():
            net.module[0].weight.add_(1.0)
    doctor.checksum(net)
