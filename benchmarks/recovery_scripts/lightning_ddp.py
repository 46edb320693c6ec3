"""Lightning: the run ends, and continues from its newest checkpoint when it is started again."""

# -- user code
import glob

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch.utils.data import DataLoader
from workload import EVERY, STEPS, make_data, make_model


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
saving = [ModelCheckpoint("checkpoints", every_n_train_steps=EVERY)] if EVERY else []
trainer = lightning.Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    callbacks=saving,
    enable_checkpointing=bool(saving),
)
newest = glob.glob("checkpoints/*.ckpt")  # it keeps one
trainer.fit(Module(), loader, ckpt_path=newest[0] if newest else None)
# -- end
