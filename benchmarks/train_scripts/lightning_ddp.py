"""Lightning: DistributedDataParallel averages the gradients in each step."""

# -- user code
import lightning
import torch
from shared import make_data, make_model
from torch.nn import functional
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


loader = DataLoader(make_data(), batch_size=64, shuffle=True)
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=2, strategy="ddp")
trainer.fit(Module(), loader)
# -- end
