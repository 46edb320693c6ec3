"""miniray: DistributedDataParallel averages the gradients in each step."""

# -- user code
import torch
from shared import make_data, make_model
from torch.nn import functional
from torch.utils.data import DataLoader

from miniray.train import DDPTrainer


class Worker:
    def __init__(self):
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.train_loader = DataLoader(make_data(), batch_size=64, shuffle=True)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return functional.cross_entropy(self.model(images), labels)


DDPTrainer(num_workers=2, worker=Worker).train(epochs=3)
# -- end
