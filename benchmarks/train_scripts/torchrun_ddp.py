"""Plain torch: DistributedDataParallel averages the gradients in each step."""

# -- user code
import torch
import torch.distributed as dist
from shared import make_data, make_model
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(make_model())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = make_data()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
# -- end
