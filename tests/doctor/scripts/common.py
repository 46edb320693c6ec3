"""What the scripts of the fault catalogue share: a small model on small data, in DDP."""

import datetime
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def start():
    torch.manual_seed(0)
    limit = datetime.timedelta(seconds=int(os.environ.get("TIMEOUT", "1800")))  # torch's default
    dist.init_process_group("gloo", timeout=limit)


def dataset(samples=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(samples=32, batch_size=2, **options):
    data = dataset(samples)
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, **options))


def model(buffers=False, **options):
    layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)]
    if buffers:
        layers.insert(1, torch.nn.BatchNorm1d(8))
    return DistributedDataParallel(torch.nn.Sequential(*layers), **options)


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.01)


def step(net, opt, batch):
    x, y = batch
    opt.zero_grad()
    loss = torch.nn.functional.mse_loss(net(x), y)
    loss.backward()
    opt.step()
    return loss
