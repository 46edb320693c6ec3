"""A batch of rank 1 gives NaN at step 7, and the weights of all ranks are NaN after it."""

from common import RANK, loader, model, optimizer, start, step

start()
net = model()
opt = optimizer(net)
for number, (x, y) in enumerate(loader(samples=48, shuffle=False), start=1):
    if RANK == 1 and number == 7:
        x = x * float("nan")
    step(net, opt, (x, y))
