"""One process, no framework: what the others are measured against."""

# -- user code
import torch
from shared import make_data, make_model
from torch.nn import functional
from torch.utils.data import DataLoader

model = make_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(make_data(), batch_size=64, shuffle=True)
for _ in range(3):
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
# -- end
