"""Rank 0 validates through the DDP wrapper; the others go on to a barrier."""

from common import RANK, dataset, dist, loader, model, optimizer, start, step, torch
from torch.utils.data import DataLoader

start()
net = model(buffers=True)
opt = optimizer(net)
for batch in loader(samples=16):
    step(net, opt, batch)


def validate():
    net.eval()
    with torch.no_grad():
        for x, _ in DataLoader(dataset(8), batch_size=4):
            net(x)


if RANK == 0:
    validate()
dist.barrier()
