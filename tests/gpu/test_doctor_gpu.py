"""``miniray run`` with CUDA: figures of the GPU in the boxes, and a rank that hangs is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miniray.doctor.reader import read_run
from tests.gpu.gpu_for_tests import DEVICE, ON_GPU, OWN_BACKEND

pytest.importorskip("torch")

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

device, backend, hang = sys.argv[1], sys.argv[2], sys.argv[3] == "hang"
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)
if device == "cuda":
    torch.cuda.set_device(0)
net = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
began, step = time.monotonic(), 0
while step < 20 or (not hang and time.monotonic() < began + 4):
    if hang and rank == 1 and step == 3:
        time.sleep(1000)  # the line that hangs
    loss = net(torch.randn(512, 64, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if backend == "nccl" or device == "cpu":  # as many steps on all ranks
        time.sleep(0.01)
dist.destroy_process_group()
"""


def launch(folder, nproc, backend, how):
    (folder / "train.py").write_text(SCRIPT)
    options = ["--nproc", str(nproc), "--run-dir", "run", "--hang-timeout", "6"]
    return subprocess.run(
        [sys.executable, "-m", "miniray", "run", *options, "train.py", DEVICE, backend, how],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_a_run_over_nccl_is_healthy_and_has_the_gpus_figures(tmp_path):
    done = launch(tmp_path, 1, OWN_BACKEND, "go")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_run(tmp_path / "run")
    assert record.step >= 19
    assert record.backend == OWN_BACKEND
    if ON_GPU:
        assert record.gpu.memory_total > 0
        assert record.gpu.process_memory > 0
        if "nvml" not in record.notes:  # which says why there are no figures of NVML
            assert record.gpu.memory_used >= record.gpu.process_memory
            assert 0 <= record.gpu.utilisation <= 100
            assert 0 < record.gpu.power <= 2 * record.gpu.power_limit
    told = subprocess.run(
        [sys.executable, "-m", "miniray", "doctor", "run", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    (rank,) = json.loads(told.stdout)["ranks"]
    assert (rank["gpu"] is not None) == ON_GPU


def test_a_rank_that_hangs_beside_another_on_the_gpu_is_named(tmp_path):
    done = launch(tmp_path, 2, "gloo", "hang")
    assert done.returncode != 0
    verdict = Path(tmp_path / "run" / "doctor.txt").read_text()
    assert verdict.startswith("STUCK: rank 1"), verdict
    assert "train.py" in verdict
