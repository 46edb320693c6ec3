"""``attach`` finds its place by itself: in made-up environments, and under real launchers."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from miniray.doctor import leaving
from miniray.doctor.attaching import Place, find_place
from miniray.doctor.reader import read_run

ENVIRONMENTS = {
    "torchrun": (
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"},
        Place(3, 8, 1, 2, "torchrun", 2),
    ),
    "miniray run": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
         "TORCHELASTIC_RUN_ID": "ab", "MINIRAY_LAUNCHER": "miniray run"},
        Place(0, 2, 0, 2, "miniray run"),
    ),
    "accelerate": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none",
         "ACCELERATE_MIXED_PRECISION": "no"},
        Place(1, 2, 1, 2, "accelerate"),
    ),
    "lightning's second process": (
        {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4", "NUM_NODES": "2"},
        Place(3, 4, 1, 2, "lightning"),
    ),
    "ray train": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "RAY_JOB_ID": "01", "ACCELERATE_TORCH_DEVICE": "cpu"},
        Place(1, 2, 1, 2, "ray"),
    ),
    "slurm": (
        {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
         "SLURM_NTASKS_PER_NODE": "4"},
        Place(5, 8, 1, 4, "slurm"),
    ),
    "a shell inside of an allocation": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "bash"},
        Place(0, 1, 0, 1, "none"),
    ),
    "mpirun": (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
         "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        Place(1, 2, 1, 2, "mpirun"),
    ),
    "nothing": ({}, Place(0, 1, 0, 1, "none")),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_place_in_the_environment_of(name, monkeypatch):
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    variables, place = ENVIRONMENTS[name]
    assert find_place(variables) == place


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 of 2"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(variables, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        find_place(variables)


SCRIPT = """
import miniray.doctor as doctor
current = doctor.attach()
assert doctor.attach() is current
doctor.step(loss=0.5, batch_size=4)
"""


def clean_environment(**more):
    """This process's own, without what a launcher around the tests may have set."""
    taken = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MINIRAY_RUN_DIR")
    plain = {key: value for key, value in os.environ.items() if key not in taken}
    plain.pop("PYTEST_CURRENT_TEST", None)
    return {**plain, **more}


def run(command, tmp_path, limit=50, **more):
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=clean_environment(**more),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=limit)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
            raise
    assert process.returncode == 0, errors[-3000:]


def test_ranks_of_one_launch_agree_on_a_directory_and_other_launches_do_not(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    # Two launches of two ranks each. The launcher is a shell: what its children share is that.
    launcher = 'RANK=0 "$0" train.py & RANK=1 "$0" train.py & wait'
    more = {"WORLD_SIZE": "2", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    for _ in range(2):
        run(["sh", "-c", launcher, sys.executable], tmp_path, **more)
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert re.fullmatch(r"train-\d{8}-\d{6}-[0-9a-f]{6}", folder.name)
        record = read_run(folder)
        assert [(r.rank, r.world_size, r.step) for r in record] == [(0, 2, 1), (1, 2, 1)]
        assert record.run["state"] == "finished"
        assert record.run["world_size"] == 2


def test_a_plain_process_is_a_run_of_one_and_says_so(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    run([sys.executable, "train.py"], tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    (record,) = read_run(folder)
    assert (record.rank, record.world_size, record.launcher) == (0, 1, "none")
    assert record.distributed_available is None  # torch was never imported
    assert not record.initialised


@pytest.mark.parametrize(
    ("ends", "kind", "message"),
    [
        ('try: int("x")\nexcept ValueError: sys.exit(1)', "exception", "'x'"),
        ('sys.exit("no space left")', "exit", "no space left"),
        ("sys.exit(0)", "finished", ""),
        ("import threading; threading.Thread(target=sys.exit, args=(4,)).start()", "finished", ""),
        ("try: sys.exit(2)\nexcept SystemExit: doctor.step()", "finished", ""),
    ],
)
def test_why_a_process_ended_itself(tmp_path, ends, kind, message):
    """What a script calls ``sys.exit`` for is known, whoever has launched it."""
    script = f"import sys\nfrom miniray import doctor\ndoctor.attach('run')\n{ends}\n"
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=clean_environment(), timeout=50
    )
    (record,) = read_run(tmp_path / "run")
    assert record.exit.kind == kind
    assert ("ValueError" in record.exit.type) == (kind == "exception")
    assert message in record.exit.message


def test_the_error_of_a_thread_is_noted(tmp_path):
    script = """
import sys, threading
from miniray import doctor
doctor.attach("run")
for work in (lambda: int("x"), sys.exit):
    threading.Thread(target=work).start()
"""
    (tmp_path / "train.py").write_text(script)
    run([sys.executable, "train.py"], tmp_path)
    (record,) = read_run(tmp_path / "run")
    noted = leaving.thread_error(record)
    assert noted.op.startswith("ValueError: ")
    assert "'x'" in noted.op
    assert str(noted.site) == "train.py:5"


def test_a_rank_that_was_killed_did_not_end_well_because_rank_0_did(tmp_path):
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    script = "from miniray import doctor; doctor.attach('run')\n"
    for rank, end in (("0", ""), ("1", killed)):
        env = clean_environment(RANK=rank, WORLD_SIZE="2")
        command = [sys.executable, "-c", script + end]
        subprocess.run(command, cwd=tmp_path, env=env, timeout=50, check=False)
    record = read_run(tmp_path / "run")
    assert record.run["state"] == "finished"
    assert [r.exit.kind for r in record] == ["finished", "gone"]


CHILDREN = """
import multiprocessing, os, sys, subprocess
from miniray import doctor

current = doctor.attach()


def work():
    assert doctor.attach() is None
    doctor.step(loss=3.0)  # does nothing here


if __name__ == "__main__":
    assert current is not None
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    doctor.step(loss=1.0)
"""


def test_a_process_started_by_a_rank_is_part_of_it(tmp_path):
    """A spawned worker imports the script, with its ``attach()``, once more."""
    (tmp_path / "train.py").write_text(CHILDREN)
    run([sys.executable, "train.py"], tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    record = read_run(folder)
    assert [(r.rank, r.step, r.loss) for r in record] == [(0, 1, 1.0)]
    assert not record.duplicates


TORCH = """
import miniray.doctor as doctor
doctor.attach()
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(TORCH)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run([*launcher, "--standalone", "train.py"], tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    record = read_run(folder)
    assert [(r.rank, r.launcher, r.backend) for r in record] == [
        (0, "torchrun", "gloo"), (1, "torchrun", "gloo"),
    ]  # fmt: skip
    for one in record:
        assert [(e.name, e.shape) for e in one.collectives()] == [("all_reduce", (3,))]
        assert one.exit.kind == "finished"


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


LIGHTNING = """
import miniray.doctor as doctor
doctor.attach()
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=4))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs("lightning")
def test_lightning(tmp_path):
    (tmp_path / "train.py").write_text(LIGHTNING)
    run([sys.executable, "train.py"], tmp_path, limit=220)
    (folder,) = (tmp_path / "runs").iterdir()
    record = read_run(folder)
    assert [(r.rank, r.world_size, r.step) for r in record] == [(0, 2, 4), (1, 2, 4)]
    for one in record:
        assert one.exit.kind == "finished"
        assert (one.epoch, one.batch_size, one.samples) == (1, 4, 16)
        assert one.loaders[0].sampler == "DistributedSampler"
    assert set(record.ranks[0].passes[0].ids).isdisjoint(record.ranks[1].passes[0].ids)


ACCELERATE = """
import miniray.doctor as doctor
doctor.attach()
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(2, 1)
loader = DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=4, shuffle=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, loader, optimizer = accelerator.prepare(net, loader, optimizer)
for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        accelerator.backward(net(x).pow(2).mean())
        optimizer.step()
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs("accelerate")
def test_accelerate(tmp_path):
    (tmp_path / "train.py").write_text(ACCELERATE)
    # Its CPU launcher starts one process, whatever it is told; the one for GPUs starts torchrun.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    options = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", port]
    run([*launcher, *options, "train.py"], tmp_path, limit=220, ACCELERATE_USE_CPU="true")
    (folder,) = (tmp_path / "runs").iterdir()
    record = read_run(folder)
    assert [(r.rank, r.launcher, r.world_size, r.step) for r in record] == [
        (0, "accelerate", 2, 4), (1, "accelerate", 2, 4),
    ]  # fmt: skip
    assert all(one.exit.kind == "finished" for one in record)


RAY = """
import sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config):
    import miniray.doctor as doctor
    doctor.attach(config["run_dir"])
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model
    net = prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 2)).pow(2).mean().backward()
        optimizer.step()
    dist.barrier()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        loop, train_loop_config={"run_dir": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1] + "-ray"),
    ).fit()
    ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs("ray")
def test_ray_train(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RAY)
    source = str(Path(leaving.__file__).parents[2])
    path = f"{source}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, str(script), str(tmp_path / "run")]
    run(command, tmp_path, limit=220, PYTHONPATH=path)
    record = read_run(tmp_path / "run")
    assert [(r.rank, r.world_size, r.launcher, r.step) for r in record] == [
        (0, 2, "ray", 3), (1, 2, "ray", 3),
    ]  # fmt: skip
    for one in record:
        assert [e.name for e in one.collectives()][-1] == "barrier"
        assert (one.backend, one.group_size) == ("gloo", 2)
