"""Ray Train: DistributedDataParallel averages the gradients in each step."""

# -- user code
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from shared import make_data, make_model
from torch.nn import functional
from torch.utils.data import DataLoader


def train():
    model = prepare_model(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = prepare_data_loader(DataLoader(make_data(), batch_size=64, shuffle=True))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
# -- end
