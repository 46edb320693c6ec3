"""A DDP script that hangs: only rank 0 calls a barrier after each epoch.

    miniray run --nproc 4 --hang-timeout 5 examples/hang_barrier.py

DDP runs a collective in every backward. While rank 0 waits in the barrier, the other ranks wait for
rank 0 in the first backward of the next epoch. Plain torch reports nothing for 30 minutes.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 2

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.randn(128, 4)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        dist.barrier()
