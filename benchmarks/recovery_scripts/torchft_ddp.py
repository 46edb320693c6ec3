"""torchft: the other replicas continue without the one that was lost, and heal its successor."""

# -- user code
import os
from datetime import timedelta

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from workload import STEPS, make_data, make_model


def state_dict():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load_state_dict(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


class Model(DistributedDataParallel):
    @staticmethod
    def _comm_hook(manager, bucket):
        """Average a bucket. After an error of gloo, that of torchft 0.2.0 fails an assertion."""
        manager.allreduce(bucket.buffer()).wait()
        averaged = torch.futures.Future()
        averaged.set_result(bucket.buffer())
        return averaged


replica = int(os.environ["REPLICA_GROUP_ID"])
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"replica_{replica}",
    timeout=timedelta(seconds=30),
)
model = Model(manager, make_model())
optimizer = Optimizer(manager, torch.optim.Adam(model.parameters(), lr=1e-3))
data = make_data()
sampler = DistributedSampler(data, replica, num_replica_groups=2, group_rank=0, num_replicas=1)
loader = DataLoader(data, batch_size=64, sampler=sampler)
epoch = 0
while manager.current_step() < STEPS:
    sampler.set_epoch(epoch)
    epoch += 1
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if manager.current_step() >= STEPS:
            break
manager.shutdown()
# -- end
