"""An exception on one rank, and a `finally` on its way that waits for the others."""

import torch.distributed as dist
from common import RANK, loader, model, optimizer, start, step

LABELS = {0: "cat", 1: "dog"}
start()
net = model()
opt = optimizer(net)
try:
    for number, batch in enumerate(loader(), start=1):
        name = LABELS[17] if RANK == 1 and number == 3 else LABELS[0]
        step(net, opt, batch)
finally:
    dist.barrier()
