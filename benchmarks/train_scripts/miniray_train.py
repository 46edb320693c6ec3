"""miniray: the parameter server averages the workers' weights after each epoch."""

# -- user code
import torch
from shared import make_data, make_model
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

import miniray
from miniray.train import DataParallelTrainer


@miniray.remote
class Worker:
    def __init__(self, worker_id):
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def load_data_shard(self, shard_id, num_shards):
        data = Subset(make_data(), range(shard_id, 4096, num_shards))
        self.loader = DataLoader(data, batch_size=64, shuffle=True)

    def train_epoch(self, epoch):
        for images, labels in self.loader:
            loss = functional.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return {"loss": loss.item()}

    def get_weights(self):
        return self.model.state_dict()

    def set_weights(self, weights):
        self.model.load_state_dict(weights)


DataParallelTrainer(num_workers=2, worker=Worker).train(epochs=3)
# -- end
