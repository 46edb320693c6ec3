"""Options of a wrong type that would silently mean something else raise ``ValueError``."""

import numpy as np
import pytest

from miniray import doctor
from miniray.data import DataLoader, IndexedDataset, shard_indices
from miniray.data.rlhf.config import read_config
from miniray.train import CheckpointStore, DataParallelTrainer
from miniray.train.callbacks import Checkpoint

CALLS = {
    "allow_pickle": lambda v: CheckpointStore("c", allow_pickle=v),
    "background": lambda v: CheckpointStore("c", background=v),
    "directory": lambda v: CheckpointStore(v),
    "keep_best": lambda v: Checkpoint(keep_best=v),
    "initial_sync": lambda v: DataParallelTrainer(2, initial_sync=v),
    "drop_last": lambda v: DataLoader(IndexedDataset([1, 2]), 1, drop_last=v),
    "decode_processes": lambda v: DataLoader(IndexedDataset([1, 2]), 1, decode_processes=v),
    "shuffle": lambda v: shard_indices(4, 0, 2, shuffle=v),
    "filter_overlong_prompts": lambda v: read_config({"filter_overlong_prompts": v}),
    "return_raw_chat": lambda v: read_config({"return_raw_chat": v}),
    "tokenize": lambda v: read_config({"tokenize": v}),
    "instrumented": lambda v: doctor.attach(instrumented=v),
}


@pytest.mark.parametrize("name", CALLS)
def test_option_of_a_wrong_type_raises(name):
    for wrong in ("no", 0, 1) if name != "directory" else ("", 3, None):
        with pytest.raises(ValueError, match=name):
            CALLS[name](wrong)


def test_drop_last_of_check_dataset():
    with pytest.raises(ValueError, match="drop_last"):
        doctor.check_dataset(np.arange(4), world_size=2, batch_size=1, drop_last="no")
