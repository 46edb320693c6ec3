"""Records of steps cover every step once, also after a restart."""

import os
import signal

import pytest

from miniray.train import DDPTrainer
from miniray.train.run.step_log import LogMerger, LogWindow
from tests.doctor.helpers import wait_until

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

KILL = 15


class Mortal:
    """Logs the number of each step. Rank 1 dies in step 15, once."""

    def __init__(self, worker_id):
        torch.manual_seed(7)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        data = TensorDataset(torch.randn(160, 4), torch.arange(160) % 3)
        self.train_loader = DataLoader(data, batch_size=4)

    def training_step(self, batch, batch_idx):
        if (self.rank, self.global_step) == (0, KILL):
            open("saved", "w").close()  # rank 0 has written its snapshot of this step
        if (self.rank, self.global_step) == (1, KILL) and not os.path.exists("killed"):
            wait_until(lambda: os.path.exists("saved"))
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = functional.cross_entropy(self.model(batch[0]), batch[1])
        return {"loss": loss, "number": self.global_step}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("every", [1, 7])
def test_steps_before_a_restart_are_in_the_records(every):
    """The steps take a few milliseconds, so the rank dies before it has sent its log windows."""
    options = {"max_failures": 1, "snapshot_every": every, "log_every": 1}
    with DDPTrainer(2, worker=Mortal, seed=5, progress=False, **options) as trainer:
        trainer.train(epochs=1)
        records, events = trainer.run.read_steps(), trainer.run.read_events()
    (restart,) = [event for event in events if event["event"] == "ranks_restarted"]
    assert restart["resumed_at_step"] == KILL - KILL % every
    assert records[-1]["step"] == 20
    start = 0
    for record in records:
        steps = range(start, record["step"])
        assert record["number"] == pytest.approx(sum(steps) / len(steps))
        start = record["step"]


def make_windows(step):
    sums = {"number": (float(step), 1.0), "num_samples": 1}
    return [LogWindow(step, 0, sums, {}, 0, 1, 0.1)] * 2


@pytest.mark.parametrize("restart_step", [0, 3])
def test_steps_of_a_record_that_is_removed_are_in_the_next_one(restart_step):
    """A record covers steps 2 to 6. The run continues after step 3 and takes steps 4 to 6 again."""
    logs = LogMerger(2)
    logs.restart_step = restart_step
    logs.add([window for step in range(1, 7) for window in make_windows(step)])
    assert [record["step"] for record in logs.take_records(at_once=True)] == [1, 6]
    logs.restart(3)
    logs.add([window for step in range(4, 7) for window in make_windows(step)])
    (record,) = logs.take_records(at_once=True)
    assert (record["step"], record["number"]) == (6, 4.0)
