"""Options of a wrong type that would silently mean something else raise ``ValueError``."""

import numpy as np
import pytest

import miniray
from miniray import doctor
from miniray.data import DataLoader, IndexedDataset, RLHFDataset, shard_indices
from miniray.data.rlhf.config import read_config
from miniray.rl import GRPOConfig, GRPOTrainer, PPOConfig
from miniray.train import CheckpointStore, DataParallelTrainer, DDPTrainer
from miniray.train.callbacks import Checkpoint, EarlyStopping

CALLS = {
    "allow_pickle": lambda v: CheckpointStore("c", allow_pickle=v),
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
    "verify": lambda v: CheckpointStore("c").list(verify=v),
    "progress": lambda v: DataParallelTrainer(2, progress=v),
    "find_unused_parameters": lambda v: DDPTrainer(2, find_unused_parameters=v),
    "broadcast_buffers": lambda v: DDPTrainer(2, broadcast_buffers=v),
    "gradient_as_bucket_view": lambda v: DDPTrainer(2, gradient_as_bucket_view=v),
    "static_graph": lambda v: DDPTrainer(2, static_graph=v),
    "norm_std": lambda v: GRPOConfig(norm_std=v),
    "whiten": lambda v: PPOConfig(whiten=v),
    "log_to_driver": lambda v: miniray.init(backend="inline", log_to_driver=v),
    "ignore_reinit_error": lambda v: miniray.init(backend="inline", ignore_reinit_error=v),
}


@pytest.mark.parametrize("name", CALLS)
def test_option_of_a_wrong_type_raises(name):
    for wrong in ("no", 0, 1) if name != "directory" else ("", 3, None):
        with pytest.raises(ValueError, match=name):
            CALLS[name](wrong)


def test_drop_last_of_check_dataset():
    with pytest.raises(ValueError, match="drop_last"):
        doctor.check_dataset(np.arange(4), world_size=2, batch_size=1, drop_last="no")


def test_size_of_buckets():
    for wrong in ("25", 0, True):
        with pytest.raises(ValueError, match="bucket_cap_mb"):
            DDPTrainer(2, bucket_cap_mb=wrong)


@pytest.fixture
def engine():
    with miniray.init(backend="inline"):
        yield


def test_flags_of_functions(engine):
    """``cancel(ref, force="no")`` ended the process that runs the call."""

    @miniray.remote
    class Actor:
        def ping(self):
            return 1

    actor, ref = Actor.remote(), miniray.put(1)
    calls = {
        "no_restart": lambda v: miniray.kill(actor, no_restart=v),
        "force": lambda v: miniray.cancel(ref, force=v),
        "recursive": lambda v: miniray.cancel(ref, recursive=v),
        "fetch_local": lambda v: miniray.wait([ref], fetch_local=v),
    }
    for name, call in calls.items():
        for wrong in ("no", 0, None):
            with pytest.raises(ValueError, match=name):
                call(wrong)
    assert miniray.get(actor.ping.remote()) == 1


def make_rl_trainer(**options):
    return GRPOTrainer(print, print, [{"prompt": "1+1="}], **options)


@pytest.mark.parametrize(
    ("name", "call", "invalid"),
    [
        ("resume", lambda v: DataParallelTrainer(2, resume=v), (2, 0, "", [])),
        ("resume", lambda v: DataParallelTrainer(2, worker=list).train(1, resume=v), (2, "", [])),
        ("min_delta", lambda v: EarlyStopping(min_delta=v), ("3", True, -1, None)),
        ("group_timeout", lambda v: make_rl_trainer(group_timeout=v), ("3", True, 0, None)),
        ("seed", lambda v: read_config({"seed": v}), ("3", True, 2.5)),
        ("max_samples", lambda v: RLHFDataset("x.parquet", print, max_samples=v), ("3", True, 2.5)),
    ],
)
def test_option_with_several_valid_types(name, call, invalid):
    for wrong in invalid:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            call(wrong)
