"""A run as it should be: two epochs, validation on all ranks, a metric averaged."""

from common import dist, loader, model, optimizer, start, step, torch

start()
net = model(buffers=True)
opt = optimizer(net)
batches, validation = loader(samples=40), loader(samples=16, shuffle=False)
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    net.train()
    for batch in batches:
        step(net, opt, batch)
    net.eval()
    with torch.no_grad():
        total = sum(net(x).sum() for x, _ in validation)
    dist.all_reduce(total)
dist.barrier()
