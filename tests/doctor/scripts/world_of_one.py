"""Each process makes a world of its own."""

import os
import time
from pathlib import Path

from common import dataset, dist, model, optimizer, step, torch
from torch.utils.data import DataLoader

torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = model()
opt = optimizer(net)
for batch in DataLoader(dataset(), batch_size=2):
    step(net, opt, batch)
# Both are alive at the same time, however late the other one starts.
while len(list(Path(os.environ["MINIRAY_RUN_DIR"], "ranks").glob("*.box"))) < 2:
    time.sleep(0.01)
