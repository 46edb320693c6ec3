"""Trainers on a Ray cluster that loses nodes: a worker node, its head, or the default route."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.conformance.helpers import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STORE = 100 * 1024 * 1024
#: Arguments: the cluster's address, the run's directory, a directory for files.
TRAIN = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import miniray
from miniray.train import DDPTrainer

address, run_dir, folder = sys.argv[1:4]

class Worker:
    def __init__(self):
        node = miniray.get_runtime_context().node_id
        Path(folder, f"{node}-{os.getpid()}").touch()
        while Path(folder, f"block-{node}").exists():
            time.sleep(0.1)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.train_loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)

    def training_step(self, batch, batch_idx):
        while not Path(folder, "go").exists():
            time.sleep(0.05)
        return self.model(batch[0]).pow(2).mean()

    def where(self):
        return miniray.get_runtime_context().node_id

if __name__ == "__main__":
    miniray.init(address=address)
    with DDPTrainer(
        2, worker=Worker, run_dir=run_dir, progress=False, timeout=60,
        max_failures=int(sys.argv[4]), resources_per_worker={"num_cpus": 1},
    ) as trainer:
        result = trainer.train(epochs=1)
        nodes = trainer.call_workers("where")
        print("result", result["epoch"], trainer.failures, len(set(nodes)))
"""


@pytest.fixture(scope="module", autouse=True)
def _import_ray():
    """Import Ray here, because test processes that collect this file may not run it."""
    return pytest.importorskip("ray")


@pytest.fixture
def cluster():
    """A head without CPUs and two nodes with one each; notices a lost node within seconds."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": STORE,
            "_system_config": {"health_check_period_ms": 500},
        },
    )
    try:
        cluster.nodes = [cluster.add_node(num_cpus=1, object_store_memory=STORE) for _ in "12"]
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def train(tmp_path):
    """Starts ``TRAIN``; what it says is in ``tmp_path / "output"``."""
    started = []

    def start(address, max_failures=0, prefix=(), script=TRAIN, **environment):
        path = tmp_path / "train.py"
        path.write_text(script)
        arguments = [address, tmp_path / "run", tmp_path, max_failures]
        with open(tmp_path / "output", "w") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, *map(str, [path, *arguments])],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


#: Arguments: the cluster's address, the run's directory, a directory for files.
ELASTIC = """
import json, os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import miniray
from miniray.train import Callback, DDPTrainer
from miniray.train.workers import budget

address, run_dir, folder = sys.argv[1:4]
budget.PLACEMENT_TIMEOUT_S = 3

class Worker:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        rows = TensorDataset(torch.arange(16.0)[:, None])
        self.train_loader = DataLoader(rows, batch_size=2, shuffle=True)

    def training_step(self, batch, batch_idx):
        epoch = self.train_loader.batch_sampler.epoch
        with open(f"{folder}/rows", "a") as file:
            print(json.dumps([epoch, self.world_size, batch[0].flatten().tolist()]), file=file)
        while (self.world_size, epoch, batch_idx) == (2, 1, 1):  # until a node is lost
            Path(folder, "inside").touch()
            time.sleep(0.05)
        return self.model(batch[0]).pow(2).mean()

    def weight(self):
        return self.model.weight.item()

class WaitForNode(Callback):
    def on_epoch_end(self, trainer, epoch, result, **kwargs):
        if epoch == 1:
            Path(folder, "shrunk").touch()
            while miniray.available_resources().get("CPU", 0) < 1:
                time.sleep(0.1)

if __name__ == "__main__":
    miniray.init(address=address)
    with DDPTrainer(
        2, min_workers=1, worker=Worker, run_dir=run_dir, progress=False, timeout=60,
        resources_per_worker={"num_cpus": 1}, callbacks=[WaitForNode()],
    ) as trainer:
        result = trainer.train(epochs=3)
        weights = trainer.call_workers("weight")
        found = {"samples": [record["num_samples"] for record in result.history]}
        found |= {"step": trainer.state.step, "failures": trainer.failures, "weights": weights}
        print("found", json.dumps(found))
"""


def test_a_lost_node_shrinks_the_group_until_a_node_is_added(cluster, train, tmp_path):
    """The epoch is repeated on one rank: without shared memory, its start is the newest state."""
    process = train(cluster.address, script=ELASTIC)
    output = tmp_path / "output"
    eventually((tmp_path / "inside").exists, timeout=90)
    cluster.remove_node(cluster.nodes[0], allow_graceful=False)
    eventually((tmp_path / "shrunk").exists, timeout=90)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    assert process.wait(90) == 0, output.read_text()
    (line,) = [line for line in output.read_text().splitlines() if line.startswith("found")]
    found = json.loads(line.removeprefix("found"))
    assert (found["samples"], found["step"], found["failures"]) == ([16] * 3, 16, 1)
    assert len(found["weights"]) == 2
    assert found["weights"][0] == found["weights"][1]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    names = ("from", "to", "step", "global_batch_size")
    changes = [[e[name] for name in names] for e in events if e["event"] == "world_size_changed"]
    assert changes == [[2, 1, 4, 2], [1, 2, 12, 4]]
    steps = [json.loads(line) for line in (tmp_path / "rows").open()]
    for epoch, ranks in enumerate((2, 1, 2)):
        rows = [row for step in steps if step[:2] == [epoch, ranks] for row in step[2]]
        assert sorted(rows) == list(range(16))


def pids_on(folder, node):
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"{node.node_id}-*")}


def test_a_node_that_is_lost_while_ranks_restart_costs_one_failure(cluster, train, tmp_path):
    """The rank dies, its replacement is placed on the same node, and then the node is gone."""
    process = train(cluster.address, max_failures=1)
    output = tmp_path / "output"
    victim = cluster.nodes[0]
    (first,) = eventually(lambda: pids_on(tmp_path, victim), timeout=60)
    (tmp_path / f"block-{victim.node_id}").touch()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: pids_on(tmp_path, victim) - {first}, timeout=60)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.remove_node(victim, allow_graceful=False)
    (tmp_path / "go").touch()
    assert process.wait(120) == 0, output.read_text()
    assert "result 0 1 2" in output.read_text()


def test_a_lost_head_ends_the_run(cluster, train, tmp_path):
    """Ray ends the process of the driver without a chance to write anything."""
    process = train(cluster.address, RAY_gcs_rpc_server_reconnect_timeout_s="20")
    eventually(lambda: all(pids_on(tmp_path, node) for node in cluster.nodes), timeout=60)
    head = cluster.head_node.all_processes["gcs_server"][0].process
    head.kill()
    assert process.wait(120) == 1
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["state"] == "failed"
    assert run["error"]["type"] == "SessionEndedError"


def test_a_running_cluster_is_joined(cluster, tmp_path):
    """Ray's own file names the cluster, as after ``ray start``."""
    code = """
    import miniray
    with miniray.init():
        print(int(miniray.cluster_resources()["CPU"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "MINIRAY_BACKEND": "ray"},
        timeout=100,
    )
    assert done.stdout == "2\n"
    assert cluster.address in done.stderr


#: A shell's arguments: name of the host, directory of Ray. Ready when it prints a line.
HOST = """
hostname "$1"
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$1" > "$2.$1"
mount --bind "$2.$1" /etc/hosts
mount -t tmpfs tmpfs "$2"
ip link set lo up
echo ready
exec sleep infinity
"""


@pytest.fixture
def hosts(tmp_path):
    """Two hosts that share a network without a default route; prefixes for commands on them.

    As on Debian, the name of each leads to 127.0.1.1.
    """
    for tool in ("unshare", "nsenter", "ip"):
        if os.getuid() != 0 or shutil.which(tool) is None:
            pytest.skip(f"needs root and {tool} to create network namespaces")
    with tempfile.TemporaryDirectory(prefix="mr-") as folder, contextlib.ExitStack() as stack:
        pids = []
        for i in (1, 2):
            arguments = ["unshare", "--net", "--uts", "--mount", "sh", "-ec", HOST, "sh"]
            process = subprocess.Popen([*arguments, f"host-{i}", folder], stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout.readline() == b"ready\n"
            pids.append(str(process.pid))
        first, second = pids
        run("ip", "link", "add", "eth0", "netns", first, "type", "veth",
            "peer", "name", "eth0", "netns", second)  # fmt: skip
        prefixes = [["nsenter", "-t", pid, "--net", "--uts", "--mount"] for pid in pids]
        for i, prefix in enumerate(prefixes, 1):
            run(*prefix, "ip", "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            run(*prefix, "ip", "link", "set", "eth0", "up")
        yield folder, prefixes


def run(*command):
    subprocess.run(command, check=True)


def test_ranks_meet_on_hosts_without_a_default_route(hosts, train, tmp_path):
    folder, (first, second) = hosts
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1"]
    ray += [f"--object-store-memory={STORE}"]
    address = "10.77.0.1:6379"
    # No other hosts are in this network, and the hosts don't share token files.
    environment = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
    (tmp_path / "go").touch()
    with contextlib.ExitStack() as stack:
        for prefix, arguments in (
            (first, ["--head", "--node-ip-address=10.77.0.1", "--include-dashboard=false"]),
            (second, [f"--address={address}", "--node-ip-address=10.77.0.2"]),
        ):
            log = tmp_path / f"ray{len(arguments)}"
            with open(log, "w") as output:
                process = subprocess.Popen(
                    [*prefix, *ray, *arguments],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                )
            stack.enter_context(process)
            stack.callback(process.terminate)
            eventually(lambda log=log: "Ray runtime started" in log.read_text(), timeout=60)
        process = train(address, prefix=first, **environment)
        assert process.wait(150) == 0, (tmp_path / "output").read_text()
    assert "result 0 0 2" in (tmp_path / "output").read_text()
