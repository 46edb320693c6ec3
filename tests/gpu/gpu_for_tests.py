"""A worker that says where it trains, and what of a GPU workers are given."""

import os
import time

import torch
import torch.distributed as dist

from tests.train.ddp_for_tests import Stepper, local_bytes

WANTED = os.environ.get("MINIRAY_GPU_TESTS_ON", "gpu") != "cpu"
ON_GPU = WANTED and torch.cuda.is_available()

#: For ``resources_per_worker``: a GPU of its own, or half of one.
A_GPU = {"num_gpus": 1} if ON_GPU else {}
HALF_A_GPU = {"num_gpus": 0.5} if ON_GPU else {}
DEVICE = "cuda" if ON_GPU else "cpu"
OWN_BACKEND = "nccl" if ON_GPU else "gloo"


class OnGpu(Stepper):
    """Hangs on rank 1 in step 2 of the first epoch where it is told to."""

    def __init__(self, worker_id=0, n=64, hang=False):
        super().__init__(worker_id, n=n)
        self.hangs = hang and worker_id == 1

    def training_step(self, batch, batch_idx):
        if self.hangs and batch_idx == 2:
            time.sleep(1000)  # the line that hangs
        return super().training_step(batch, batch_idx)

    def whereabouts(self):
        """The model's device, the optimizer's, the group's backend, and bytes held here."""
        weight = next(self.model.parameters())
        numbers = next(iter(self.optimizer.state.values()))["exp_avg"]
        return weight.device.type, numbers.device.type, dist.get_backend(), local_bytes(self)
