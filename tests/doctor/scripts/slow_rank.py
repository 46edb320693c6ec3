"""Rank 2's data comes slower from step 16 on."""

import time

from common import RANK, dataset, model, optimizer, start, step
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Slow(Dataset):
    def __init__(self):
        self.data = dataset(120)
        self.taken = 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.taken += 1
        time.sleep(0.12 if RANK == 2 and self.taken > 15 else 0.015)
        return self.data[index]


start()
data = Slow()
net = model()
opt = optimizer(net)
for batch in DataLoader(data, batch_size=1, sampler=DistributedSampler(data)):
    step(net, opt, batch)
