"""The same with a named barrier."""

from common import RANK, dist, loader, model, optimizer, start, step, torch

from miniray import doctor

start()
net = model()
opt = optimizer(net)
for number, batch in enumerate(loader()):
    step(net, opt, batch)
    if RANK == 0 and number == 2:
        doctor.barrier("save", timeout=600)
    dist.all_reduce(torch.ones(1))
