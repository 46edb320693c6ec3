"""miniray: snapshots in shared memory, and a restart of all ranks from the newest one."""

# -- user code
import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from workload import EVERY, STEPS, make_data, make_model

from miniray.train import DDPTrainer


class Worker:
    def __init__(self):
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.train_loader = DataLoader(make_data(), batch_size=64, shuffle=True)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return functional.cross_entropy(self.model(images), labels)


if __name__ == "__main__":
    options = {"max_failures": 3} if EVERY else {"snapshot_every": None}
    DDPTrainer(num_workers=2, worker=Worker, **options).train(steps=STEPS)
# -- end
