"""The scenarios of the fault catalogue: how to run each script, and what the doctor must find."""

import dataclasses
from unittest.mock import ANY


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The expected finding, and how to run the script that causes it.

    ``facts`` are the ranks, numbers, names and places that the title must contain besides those in
    the fields. ``ranks`` are (number, RANK, WORLD_SIZE) of each process.
    """

    code: str
    guilty: tuple
    step: int | None
    site: str
    facts: tuple
    ranks: int | list = 2
    script: str = ""
    still: float = 2.5
    computes: bool = False


FAULTS = {
    "fewer_batches": Scenario(
        "ran-out-of-data", (1,), 3, "fewer_batches.py:13", ("rank 0 has 4", "rank 1 3")
    ),
    "no_batch": Scenario(
        "no-batches", (3,), 0, "no_batch.py:13", ("0 batches", "3 samples", "4 ranks"), ranks=4
    ),
    "validation_on_rank_0": Scenario(
        "collectives-parted",
        (0,),
        3,
        "validation_on_rank_0.py:17",
        ("DDP forward", "ranks 1 and 2", "barrier (validation_on_rank_0.py:22)"),
        ranks=3,
    ),
    "barrier_in_branch": Scenario(
        "collectives-parted",
        (0,),
        3,
        "barrier_in_branch.py:11",
        (
            "barrier (barrier_in_branch.py:11)",
            "ranks 1 and 2",
            "all_reduce (barrier_in_branch.py:12)",
        ),
        ranks=3,
    ),
    "named_barrier_in_branch": Scenario(
        "collectives-parted",
        (0,),
        3,
        "named_barrier_in_branch.py:13",
        ("barrier 'save'", "ranks 1 and 2", "all_reduce (named_barrier_in_branch.py:14)"),
        ranks=3,
    ),
    "collective_on_rank_0": Scenario(
        "collectives-parted",
        (0,),
        0,
        "collective_on_rank_0.py:11",
        ("all_gather (collective_on_rank_0.py:11)", "1 of 3 ranks"),
        ranks=3,
    ),
    "full_tensor_in_branch": Scenario(
        "collectives-parted",
        (1,),
        0,
        "full_tensor_in_branch.py:12",
        (
            "all_reduce (full_tensor_in_branch.py:12)",
            "1 of 3 ranks",
            "ranks 0 and 2",
            "all_gather_into_tensor (full_tensor_in_branch.py:11)",
        ),
        ranks=3,
    ),
    "early_stop": Scenario("left-the-loop", (1,), 2, "early_stop.py:12", ("batch 2 of 8",)),
    "nan_skipped": Scenario("skipped-backward", (1,), 2, "nan_skipped.py:17", ("NaN",)),
    "nan_poisons": Scenario("non-finite-loss", (1,), 7, "common.py:47", ("NaN", "samples 25, 27")),
    "unused_parameters": Scenario(
        "unused-parameters", (1,), 1, "unused_parameters.py:17", ("b.weight", "b.bias")
    ),
    "exception": Scenario(
        "exception", (1,), 2, "exception.py:10", ("ValueError: label 17 out of range",)
    ),
    "exception_in_finally": Scenario(
        "exception",
        (1,),
        2,
        "exception_in_finally.py:12",
        ("KeyError: 17", "barrier exception_in_finally.py:15", "rank 0"),
    ),
    "long_preparation": Scenario(
        "slow-section",
        (0,),
        0,
        "long_preparation.py:13",
        ("prepare_data", "ranks 1 and 2", "barrier long_preparation.py:14"),
        ranks=3,
    ),
    "world_of_one": Scenario(
        "separate-worlds",
        (0, 0),
        None,
        "",
        ("2 processes", "world_size 1"),
        ranks=[(0, 0, 1), (1, 0, 1)],
    ),
    "missing_rank": Scenario(
        "missing-rank",
        (2,),
        None,
        "",
        ("ranks 0 and 1", "init_process_group"),
        ranks=[(0, 0, 3), (1, 1, 3)],
        script="only_start",
    ),
    "duplicate_rank": Scenario(
        "duplicate-rank",
        (0, 1),
        None,
        "",
        ("rank 0", "rank 1"),
        ranks=[(0, 0, 2), (1, 0, 2)],
        script="only_start",
    ),
    "same_data": Scenario("same-data", (0, 1), None, "same_data.py:9", ("100%",)),
    "set_epoch_forgotten": Scenario(
        "set-epoch-forgotten",
        (0, 1),
        None,
        "set_epoch_forgotten.py:10",
        ("epoch 2", "epoch 1", "set_epoch"),
    ),
    "models_differ": Scenario(
        "models-differ", (1,), None, "models_differ.py:9", ("rank 1 has 4", "rank 0 has 2")
    ),
    "slow_rank": Scenario("straggler", (2,), ANY, "", ("×", "step", "data loading"), ranks=3),
    # Causes beyond the required list.
    "swapped": Scenario(
        "collectives-swapped",
        (0, 1),
        0,
        "swapped.py:9",
        ("rank 0 all_reduce", "rank 1 all_reduce", "swapped.py:13"),
    ),
    "sizes_differ": Scenario(
        "mismatch",
        (0, 1),
        0,
        "sizes_differ.py:7",
        ("rank 0 all_reduce SUM (8,)", "rank 1 all_reduce SUM (5,)"),
    ),
    "no_sync_on_one_rank": Scenario("no-exchange", (1,), 3, "common.py:47", ("gradients",)),
    "world_size_fixed": Scenario(
        "world-size",
        (0, 1),
        0,
        "world_size_fixed.py:5",
        ("init_process_group", "4 ranks", "2 ranks"),
    ),
    "stopped": Scenario("stopped", (1,), ANY, "stopped.py:11", ("SIGSTOP", "debugger"), ranks=3),
    "holds_gil": Scenario("holds-gil", (1,), 0, "holds_gil.py:13", ("rank 0",), still=4.5),
    "killed": Scenario("killed", (1,), 3, "", ("SIGKILL", "MB resident")),
    "segfault": Scenario("killed", (1,), 3, "", ("SIGSEGV",)),
    "memory_limit": Scenario("out-of-memory", (1,), 2, "memory_limit.py:16", ("MB resident",)),
    "endless_loop": Scenario(
        "busy",
        (1,),
        0,
        ANY,
        ("endless_loop.py:", "search", "rank 0", "barrier"),
        computes=True,
        still=6.0,
    ),
    "lock": Scenario("blocked", (1,), 3, "lock.py:19", ("in log", "lock.acquire")),
    "wrong_group": Scenario(
        "collectives-parted",
        (0, 1),
        0,
        "wrong_group.py:9",
        ("all_reduce (wrong_group.py:9) of group ranks 0,1", "group default"),
        ranks=3,
    ),
    "barrier_timeout": Scenario(
        "blocked",
        (1,),
        0,
        "barrier_timeout.py:13",
        ("write_checkpoint", "rank 0", "barrier 'epoch end'"),
    ),
    "bar_between_barriers": Scenario(
        "bar-between-barriers",
        (0,),
        0,
        "bar_between_barriers.py:16",
        ("bar_between_barriers.py:17",),
    ),
    "drifted": Scenario("parameters-drifted", (1,), 4, "", ("rank 0",)),
}

#: The number of ranks that finished, and the steps that they finished at.
CONTROLS = {
    "healthy": (2, {20}),
    "slow_start": (2, {6}),
    "slow_but_moving": (2, {12}),
    "joined": (2, {10, 14}),
}
