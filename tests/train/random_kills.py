"""Kill whole runs at random moments and resume them: ``python -m`` this FOLDER SEED...

For each seed, a driver trains on the local engine with two workers and saves every epoch. At a
random moment after a random checkpoint (or before the first), a random process is killed.
In each case, the driver must exit by itself and leave nothing behind, every checkpoint that was
complete must exist and be loadable, and a new driver that resumes must match, bit for bit, a
run that was not interrupted.

Drivers are forks of this process, which has one thread and the imports but no torch.
"""

import contextlib
import json
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import psutil

import miniray
from miniray.train import Checkpoint, CheckpointStore, DataParallelTrainer

EPOCHS = 8
LIMIT = 40.0  # seconds for what takes less than one: only a hang exceeds it
KINDS = ("driver", "zygote", "worker", "everything")


@miniray.remote
class Walker:
    """Weights that depend on everything that happened before, and take a moment to write."""

    def __init__(self, worker_id):
        self.random = random.Random(worker_id)
        self.velocity, self.w = 0.0, np.zeros(20_000)

    def train_epoch(self, epoch):
        self.velocity = 0.9 * self.velocity + self.random.random()
        self.w = self.w + self.velocity
        return {"loss": float(self.w[-1])}

    def get_weights(self):
        return [self.w]

    def set_weights(self, weights):
        self.w = np.array(weights[0])

    def get_state(self):
        return {"random": self.random.getstate(), "velocity": self.velocity}

    def set_state(self, state):
        self.random.setstate(state["random"])
        self.velocity = state["velocity"]


def drive(run_dir, outcome):
    """Train what is left of the run, and write down what came out."""
    saved = complete(run_dir)
    if run_dir.exists() and not saved:  # killed before its first checkpoint: from the start
        run_dir = run_dir.with_name(f"{run_dir.name}-again")
    trainer = DataParallelTrainer(
        2, 2, "momentum", momentum=0.9, worker=Walker, backend="local", progress=False,
        run_dir=run_dir, callbacks=[Checkpoint(keep_last=None)],
    )  # fmt: skip
    with trainer:
        done = trainer.load_checkpoint(run_dir / "checkpoints") + 1 if saved else 0
        result = trainer.train(epochs=EPOCHS - done)
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
        losses = [record["loss"].hex() for record in result.history]
        outcome.write_bytes(pickle.dumps(([w[0].tobytes() for w in weights], losses)))


def start(run_dir, outcome):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            with open(f"{run_dir}.log", "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            drive(run_dir, outcome)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def wait(pid, what):
    deadline = time.monotonic() + LIMIT
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{what}: the driver hangs")
        time.sleep(0.005)


def tree(driver):
    """The processes of a driver by kind."""
    try:
        zygotes = psutil.Process(driver).children()
        workers = [w for z in zygotes for w in z.children()]
    except psutil.Error:
        return {"driver": [], "zygote": [], "worker": []}
    return {"driver": [psutil.Process(driver)], "zygote": zygotes, "worker": workers}


def send(process, number):
    with contextlib.suppress(psutil.NoSuchProcess):  # the run may be over
        process.send_signal(number)


def complete(run_dir):
    return sorted(p.name for p in (run_dir / "checkpoints").glob("epoch-*"))


def one(folder, seed, usual, expected):
    rng = random.Random(seed)
    run_dir, outcome = folder / f"run-{seed}", folder / f"outcome-{seed}"
    saved, moment, kind, pick = rng.randrange(EPOCHS), rng.random(), rng.choice(KINDS), rng.random()
    driver = start(run_dir, outcome)
    deadline = time.monotonic() + LIMIT
    while len(complete(run_dir)) < saved:
        assert time.monotonic() < deadline, f"seed {seed}: no checkpoint {saved}"
        time.sleep(0.001)
    # Within the start, which is most of the time, or about an epoch.
    time.sleep(moment * (usual / 10 if saved else usual))
    processes = tree(driver)
    everybody = [p for found in processes.values() for p in found]
    victims = processes.get(kind) or processes["driver"]
    before = complete(run_dir)
    if kind == "everything":
        for process in everybody:
            send(process, signal.SIGSTOP)  # so that no process sees another one exit
        for process in everybody:
            send(process, signal.SIGKILL)
    elif victims:
        send(victims[int(pick * len(victims))], signal.SIGKILL)
    status = wait(driver, f"seed {seed}")
    _, alive = psutil.wait_procs(everybody, timeout=LIMIT)
    assert not alive, f"seed {seed}: {alive} are left"
    after = complete(run_dir)
    assert set(before) <= set(after), f"seed {seed}: {before} became {after}"
    store = CheckpointStore(run_dir / "checkpoints")
    for name in after:
        assert store.load(run_dir / "checkpoints" / name)[0] == int(name.removeprefix("epoch-"))
    if status != 0:
        resumed = wait(start(run_dir, outcome), f"seed {seed}, resumed")
        log = Path(f"{run_dir}.log").read_text()
        assert resumed == 0, f"seed {seed}: the resumed run failed:\n{log}"
    assert pickle.loads(outcome.read_bytes()) == expected, f"seed {seed}: other bits"
    return {"seed": seed, "victim": kind, "status": status, "before": len(before)}


def main(folder, seeds):
    warnings.simplefilter("error")  # a damaged checkpoint would be a warning
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    assert wait(start(folder / "straight", folder / "outcome"), "the run that is let alone") == 0
    usual = time.monotonic() - began
    expected = pickle.loads((folder / "outcome").read_bytes())
    for seed in seeds:
        print(json.dumps(one(folder, seed, usual, expected)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(seed) for seed in sys.argv[2:]])
