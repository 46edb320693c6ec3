"""On rank 1 the branch `b` takes no part in the loss."""

from common import RANK, DistributedDataParallel, loader, optimizer, start, step, torch


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 1)
        self.b = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.a(x) if RANK == 1 else self.a(x) + self.b(x)


start()
net = DistributedDataParallel(Two())
opt = optimizer(net)
for batch in loader():
    step(net, opt, batch)
