"""torch's compiler is not loaded before something is compiled, and is whole when it is."""

import subprocess
import sys
import textwrap

import pytest

import miniray
from miniray.train import DataParallelTrainer, TorchWorker

torch = pytest.importorskip("torch")

SCRIPT = """
import sys
import torch
import miniray.train.dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def loaded():
    return "torch._dynamo.eval_frame" in sys.modules

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 3.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

def step(model):
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model.weight.item() if hasattr(model, "weight") else model.module.weight.item()

assert step(model) == 2.5
optimizer.load_state_dict(optimizer.state_dict())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert step(DistributedDataParallel(model)) == 2.0
dist.destroy_process_group()
assert not loaded()

# Whoever holds on to the stand-in has the real thing afterwards.
held = torch._dynamo
compiled = torch.compile(model, backend="eager")
assert compiled(torch.ones(1, 1)).item() == 2.0
assert loaded()
assert torch._dynamo is sys.modules["torch._dynamo"] is not held
assert held.graph_break is torch._dynamo.graph_break
assert held.utils is torch._dynamo.utils
# A function that was called before the compiler was there is left out of what it compiles.
inside = torch.optim.Optimizer.zero_grad.__wrapped__
assert inside.__dynamo_disable is not inside
assert step(compiled) == 1.5
print("all is well")
"""


def test_optimizers_and_ddp_work_without_the_compiler_and_it_comes_when_it_is_needed():
    script = textwrap.dedent(SCRIPT)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "all is well\n", done.stderr


class Plain(TorchWorker):
    def setup(self):
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        data = torch.utils.data.TensorDataset(torch.ones(4, 1))
        self.train_loader = torch.utils.data.DataLoader(data)

    def training_step(self, batch):
        return self.model(batch[0]).sum()

    def loaded(self):
        return "torch._dynamo.eval_frame" in sys.modules


def test_a_trainers_workers_do_without_it():
    with DataParallelTrainer(2, worker=Plain, progress=False, backend="local") as trainer:
        trainer.train(epochs=1)
        assert miniray.get([worker.loaded.remote() for worker in trainer.workers]) == [False] * 2
