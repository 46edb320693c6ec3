"""No DistributedSampler: every rank trains on everything."""

from common import dataset, model, optimizer, start, step
from torch.utils.data import DataLoader

start()
net = model()
opt = optimizer(net)
for batch in DataLoader(dataset(), batch_size=2, shuffle=True):
    step(net, opt, batch)
