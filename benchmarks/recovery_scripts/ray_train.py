"""Ray Train: it restarts all workers, which load the newest checkpoint that was uploaded."""

# -- user code
import itertools
import os
import tempfile

import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.nn import functional
from torch.utils.data import DataLoader
from workload import EVERY, STEPS, make_data, make_model


def train():
    model = prepare_model(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = prepare_data_loader(DataLoader(make_data(), batch_size=64, shuffle=True))
    step, newest = 0, ray.train.get_checkpoint()
    if newest:
        with newest.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < STEPS:
        epoch, done = divmod(step, len(loader))
        loader.sampler.set_epoch(epoch)
        for images, labels in itertools.islice(loader, done, done + STEPS - step):
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if EVERY and step % EVERY == 0:
                report(model, optimizer, step)


def report(model, optimizer, step):
    checkpoint = None
    if ray.train.get_context().get_world_rank() == 0:
        folder = tempfile.mkdtemp()  # is deleted after the upload
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step}, os.path.join(folder, "state.pt"))
        checkpoint = Checkpoint.from_directory(folder)
    ray.train.report(
        {"step": step}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.ASYNC
    )


TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        failure_config=FailureConfig(max_failures=3),
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    ),
).fit()
# -- end
