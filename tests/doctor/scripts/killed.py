"""Rank 1 is killed by SIGKILL, as the kernel's out-of-memory killer does it."""

import os
import signal

from common import RANK, loader, model, optimizer, start, step

start()
net = model()
opt = optimizer(net)
for number, batch in enumerate(loader()):
    if RANK == 1 and number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    step(net, opt, batch)
