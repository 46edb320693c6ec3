"""A sharded tensor that one rank does not gather: tensor parallel code in a branch."""

from common import RANK, WORLD, dist, start, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

start()
weights = distribute_tensor(torch.ones(WORLD, 2), init_device_mesh("cpu", (WORLD,)), [Shard(0)])
for number in range(3):
    if RANK != 1 or number < 2:
        weights.full_tensor()
dist.all_reduce(torch.ones(1))
