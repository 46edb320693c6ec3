"""Rank 1 is stopped by a signal in the middle of training."""

import os
import signal

from common import RANK, loader, model, optimizer, start, step

start()
net = model()
opt = optimizer(net)
for number, batch in enumerate(loader(samples=64)):
    if RANK == 1 and number == 5:
        os.kill(os.getpid(), signal.SIGSTOP)
    step(net, opt, batch)
