"""Accelerate: DistributedDataParallel averages the gradients in each step."""

# -- user code
import torch
from accelerate import Accelerator
from shared import make_data, make_model
from torch.nn import functional
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(make_data(), batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
accelerator.end_training()
# -- end
