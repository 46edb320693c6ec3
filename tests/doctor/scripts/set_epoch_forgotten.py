"""A DistributedSampler that is never told the epoch."""

from common import loader, model, optimizer, start, step

start()
net = model()
opt = optimizer(net)
batches = loader(samples=40)
for _ in range(3):
    for batch in batches:
        step(net, opt, batch)
