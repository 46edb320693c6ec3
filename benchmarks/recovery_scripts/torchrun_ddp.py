"""torchrun: it restarts all ranks, which load the newest checkpoint that the script has written."""

# -- user code
import itertools
import os

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workload import EVERY, STEPS, make_data, make_model

dist.init_process_group("gloo")
model = DistributedDataParallel(make_model())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = make_data()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler)
step = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < STEPS:
    epoch, done = divmod(step, len(loader))
    sampler.set_epoch(epoch)
    for images, labels in itertools.islice(loader, done, done + STEPS - step):
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if EVERY and step % EVERY == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, "checkpoint.tmp")
            os.replace("checkpoint.tmp", "checkpoint.pt")
dist.destroy_process_group()
# -- end
