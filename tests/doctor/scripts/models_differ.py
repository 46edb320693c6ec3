"""Rank 1 has a second layer."""

from common import RANK, DistributedDataParallel, start, torch

start()
layers = [torch.nn.Linear(4, 4)] * 1
if RANK == 1:
    layers.append(torch.nn.Linear(4, 1))
net = DistributedDataParallel(torch.nn.Sequential(*layers))
