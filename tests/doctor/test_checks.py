"""Checks of data, losses, models, worlds, speed and bars, on records made by hand."""

import dataclasses
import itertools

import pytest

from miniray.doctor.checks import memory, speed
from miniray.doctor.diagnose import examine
from miniray.doctor.facts import gather
from miniray.doctor.heartbeat import History
from miniray.doctor.model import BAR, BARRIER, Gpu, NonFinite
from tests.doctor.records import (
    FINISHED,
    GONE,
    NOW,
    at,
    call,
    calling,
    ended,
    groups,
    loader,
    model,
    rank,
    run,
    samples,
    steps,
    wording,
)


def found(*given, code, **fields):
    diagnosis = examine(run(*given, **fields))
    every = [*diagnosis.findings, *diagnosis.notes]
    matching = [finding for finding in every if finding.code == code]
    assert matching, diagnosis.text()
    return matching[0]


def nothing(*given, **fields):
    diagnosis = examine(run(*given, **fields))
    assert diagnosis.findings == (), diagnosis.text()
    assert diagnosis.notes == (), diagnosis.text()


# -- data ----------------------------------------------------------------------------------------


def reading(number, *passes, **fields):
    return rank(number, passes=passes, loaders=(loader(**fields),), models=(model(),))


PLAIN = {"sampler": "SequentialSampler", "replicas": None, "shuffle": False}


def test_the_same_samples_on_two_ranks(golden):
    given = {**PLAIN, "first_batch": ("abcd",)}
    finding = found(
        reading(0, samples(range(32)), **given),
        reading(1, samples(range(32)), **given),
        code="same-data",
    )
    golden("checks/the_same_samples_on_two_ranks.txt", wording(finding))
    assert finding.severity.word == "WRONG"
    assert "SequentialSampler" in finding.cause


def test_numbers_alone_are_no_proof():
    """Each rank may have files of its own and number them alike: said, but not held against it."""
    finding = found(
        reading(0, samples(range(32)), **PLAIN),
        reading(1, samples(range(31, -1, -1)), **PLAIN),
        code="same-data",
    )
    assert finding.severity.word == "NOTE"


def grouped(ids, *groups):
    """Ranks that read these ids each, and average gradients in these groups, if in any."""
    for number, (mine, group) in enumerate(zip(ids, groups, strict=True)):
        one = reading(number, samples(mine), **PLAIN, first_batch=(f"{mine[0]}",))
        yield dataclasses.replace(
            one,
            world_size=len(groups),
            group_size=len(groups),
            events=(call(0, "DDP.__init__", group=group),) if group else (),
            models=(model(),) if group else (),
        )


def test_parts_of_one_model_read_the_same(golden):
    """Tensor parallel: nothing is averaged between them, so nothing counts twice."""
    finding = found(*grouped([range(32)] * 2, "", ""), code="same-data")
    assert finding.severity.word == "NOTE"
    golden("checks/parts_of_one_model_read_the_same.txt", wording(finding))


@pytest.mark.parametrize(("functional", "severity"), [(True, "NOTE"), (False, "WRONG")])
def test_what_is_scattered_by_an_operator_are_no_gradients(functional, severity):
    """FSDP averages by reduce_scatter; layers in parallel, by DTensor, scatter activations."""
    scattered = call(3, "reduce_scatter_tensor", functional=functional)
    ranks = [
        dataclasses.replace(one, events=(scattered,)) for one in grouped([range(32)] * 2, "", "")
    ]
    assert found(*ranks, code="same-data").severity.word == severity


def test_samples_count_twice_only_for_ranks_that_average_together():
    """Models in two parts each, (0, 1) and (2, 3): which ranks average is told by DDP's groups."""
    pairs = ("ranks 0,2 (#1)", "ranks 1,3 (#2)")
    notes = [groups(pairs[n % 2], n % 2, n % 2 + 2) for n in range(4)]

    def noted(records):
        return [dataclasses.replace(one, notes=notes[one.rank]) for one in records]

    right = [range(32), range(32), range(32, 64), range(32, 64)]
    assert found(*noted(grouped(right, *pairs * 2)), code="same-data").severity.word == "NOTE"
    wrong = [range(32), range(32), range(32), range(32, 64)]
    finding = found(*noted(grouped(wrong, *pairs * 2)), code="same-data")
    assert (finding.severity.word, finding.ranks) == ("WRONG", (0, 2))


def test_equal_numbers_with_other_contents_are_other_samples():
    nothing(
        reading(0, samples(range(32)), **PLAIN, first_batch=("aaaa",)),
        reading(1, samples(range(32)), **PLAIN, first_batch=("bbbb",)),
    )


def test_the_padding_of_a_distributed_sampler_is_no_overlap():
    """10 samples, 4 ranks: [0,4,8] [1,5,9] [2,6,0] [3,7,1], as torch deals them."""
    shares = ([0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1])
    nothing(
        *(rank(n, 4, passes=(samples(ids),), loaders=(loader(),)) for n, ids in enumerate(shares))
    )


def test_validation_data_may_be_the_same_everywhere():
    nothing(*(reading(n, samples(range(32)), **PLAIN, trained=False) for n in range(2)))


def test_other_epochs_are_not_compared():
    nothing(reading(0, samples(range(32), epoch=1)), reading(1, samples(range(32), epoch=0)))


def test_a_forgotten_set_epoch(golden):
    ids = list(range(0, 40, 2))
    finding = found(
        rank(
            0,
            1,
            passes=(samples(ids, 0), samples(ids, 1)),
            loaders=(loader(set_epoch_calls=0, passes=2),),
        ),
        code="set-epoch-forgotten",
    )
    golden("checks/a_forgotten_set_epoch.txt", wording(finding))


@pytest.mark.parametrize(
    "changed", [{"shuffle": False}, {"replicas": None, "sampler": "RandomSampler"}]
)
def test_the_same_order_may_be_meant(changed):
    ids = list(range(0, 40, 2))
    nothing(rank(0, 1, passes=(samples(ids, 0), samples(ids, 1)), loaders=(loader(**changed),)))


def test_empty_batches(golden):
    finding = found(rank(0), rank(1, loaders=(loader(empty_batches=3),)), code="empty-batches")
    golden("checks/empty_batches.txt", wording(finding))


# -- losses --------------------------------------------------------------------------------------


def nan(step, value=float("nan"), ids=(5, 7)):
    return NonFinite(step, 0, value, ids, at(33), NOW - 5)


def test_the_first_non_finite_loss_is_by_step_and_not_by_rank(golden):
    finding = found(
        rank(0, nonfinite=2, first_nonfinite=nan(8)),
        rank(1, nonfinite=3, first_nonfinite=nan(7)),
        code="non-finite-loss",
    )
    golden("checks/the_first_non_finite_loss_is_by_step_and_not_by_rank.txt", wording(finding))
    assert (finding.ranks, finding.step) == ((1,), 7)


def test_infinity_is_called_so(golden):
    given = rank(0, 1, nonfinite=1, first_nonfinite=nan(2, float("-inf"), ()))
    golden("checks/infinity.txt", found(given, code="non-finite-loss").title + "\n")


# -- models --------------------------------------------------------------------------------------


def test_models_that_differ_explain_what_ddp_raised(golden):
    error = ended(type="RuntimeError", message="DDP expects same model across all ranks")
    other = model(
        parameters=4,
        digest="bb",
        names=(*model().names, "1.weight (1, 4) float32", "1.bias (1,) float32"),
    )
    diagnosis = examine(
        run(
            rank(0, models=(model(),), exit=error, process=GONE),
            rank(1, models=(other,), exit=error, process=GONE),
        )
    )
    (finding,) = diagnosis.findings
    assert finding.code == "models-differ"
    assert "2" in finding.title
    assert "4 parameters" in finding.title
    golden("checks/models_that_differ_explain_what_ddp_raised.txt", wording(finding))


def test_parameters_unused_on_one_rank():
    complaint = ended(
        type="RuntimeError", message="Expected to have finished reduction in the prior iteration"
    )
    diagnosis = examine(
        run(
            rank(0, models=(model(),)),
            rank(
                1,
                models=(model(unused=("b.weight",), unused_step=1),),
                exit=complaint,
                process=GONE,
            ),
        )
    )
    assert [f.title for f in diagnosis.findings] == ["unused on rank 1: b.weight"]


@pytest.mark.parametrize(
    ("unused", "parameters", "fields"),
    [
        (("b.weight",), 2, {"step": 3, "exit": ended("finished", code=0), "process": GONE}),
        (("b.weight",), 2, {"step": 4}),  # a step was made since
        (("a.weight", "b.weight"), 2, {"step": 3}),  # the model took no part in that backward
    ],
)
def test_parameters_without_a_gradient_hold_nobody_up_who_goes_on(unused, parameters, fields):
    """The generator of a GAN, whose forward runs while the discriminator learns."""
    generator = model(unused=unused, unused_step=3, parameters=parameters)
    nothing(*(rank(n, models=(generator,), **fields) for n in range(2)))


def test_unused_parameters_do_not_hide_an_error():
    generator = model(unused=("b.weight",), unused_step=3)
    diagnosis = examine(
        run(
            rank(0, models=(generator,)),
            rank(1, models=(generator,), exit=ended(message="label 17"), process=GONE),
        )
    )
    assert [f.code for f in diagnosis.findings] == ["exception"]


def test_unused_parameters_may_be_expected():
    nothing(*(rank(n, models=(model(unused=("b.weight",), find_unused=True),)) for n in range(2)))


def test_checksums_that_differ_from_a_step_on(golden):
    finding = found(
        rank(0, notes={"checksums": {"3": "aa", "4": "bb"}}),
        rank(1, notes={"checksums": {"3": "aa", "4": "cc"}}),
        rank(2, notes={"checksums": {"3": "aa", "4": "bb"}}),
        code="parameters-drifted",
    )
    golden("checks/checksums_that_differ_from_a_step_on.txt", wording(finding))


# -- worlds --------------------------------------------------------------------------------------


def test_each_process_a_world_of_its_own(golden):
    alone = [rank(0, 1, pid=100 + n, group_size=1) for n in range(4)]
    finding = found(alone[0], duplicates=alone[1:], code="separate-worlds")
    golden("checks/each_process_a_world_of_its_own.txt", wording(finding))


def test_launched_together_but_initialised_alone(golden):
    finding = found(*(rank(n, group_size=1) for n in range(2)), code="separate-worlds")
    golden("checks/launched_together_but_initialised_alone.txt", wording(finding))


def test_one_process_is_one_process():
    nothing(rank(0, 1, initialised=False, group_size=-1))


def test_two_processes_claim_a_rank(golden):
    finding = found(
        rank(0, 2, initialised=False, group_size=-1, step=0),
        duplicates=[rank(0, 2, pid=7, initialised=False, group_size=-1, step=0)],
        code="duplicate-rank",
    )
    golden("checks/two_processes_claim_a_rank.txt", wording(finding))


def test_a_group_that_was_destroyed_at_the_end_was_one():
    nothing(
        *(rank(n, initialised=False, exit=FINISHED, process=GONE, group_size=2) for n in range(2))
    )


def test_training_outside_of_the_group():
    finding = found(
        rank(0, 3),
        rank(1, 3),
        rank(2, 3, initialised=False, group_size=-1),
        code="not-initialised",
    )
    assert finding.ranks == (2,)


def sharing(number, *events, **fields):
    return rank(number, step=40, loaders=(loader(),), events=events, **fields)


def test_ranks_that_share_the_data_and_average_nothing(golden):
    start = call(0, "broadcast", step=0)
    finding = found(sharing(0, start), sharing(1, start, call(1, "barrier")), code="trained-apart")
    golden("checks/ranks_that_share_the_data_and_average_nothing.txt", wording(finding))


def test_a_ddp_model_that_is_called_past_its_wrapper(golden):
    made = call(0, "DDP.__init__", step=0)
    finding = found(*(sharing(n, made, models=(model(),)) for n in range(2)), code="trained-apart")
    golden("checks/a_ddp_model_that_is_called_past_its_wrapper.txt", wording(finding))
    assert "not model.module" in finding.fix


@pytest.mark.parametrize(
    "changed",
    [
        {"models": (model(),), "events": (call(30, "DDP.backward"),)},
        {"models": (model(),), "notes": {"compiled": True}},  # averages unseen
        {"models": (model(),), "events": (call(30, "barrier"),), "event_count": 600},  # long ago
        {"events": (call(0), call(30))},  # averaged by hand
        {"loaders": (loader(replicas=None, sampler="RandomSampler"),)},  # parts of one model
        {"step": 3},
    ],
)
def test_ranks_that_need_not_average(changed):
    nothing(*(dataclasses.replace(sharing(n), **changed) for n in range(2)))


# -- speed ---------------------------------------------------------------------------------------


def paced(*times, data=False):
    return [
        rank(n, len(times), history=steps(t, data=data and n == len(times) - 1))
        for n, t in enumerate(times)
    ]


def test_a_straggler_with_factor_and_beginning(golden):
    quick = [0.1] * 60
    slow = [0.1] * 39 + [0.309] * 21
    finding = found(*paced(quick, quick, slow, data=True), code="straggler")
    # (0.309 + 0.001) / (0.1 + 0.001) = 3.07: the backward of 1 ms counts on both sides.
    golden("checks/a_straggler_with_factor_and_beginning.txt", wording(finding))


def test_slow_in_its_own_code_is_compute():
    straggler = speed.find_straggler(gather(run(*paced([0.1] * 20, [0.1] * 20, [0.2] * 20))))
    assert (straggler.rank, straggler.where) == (2, "compute")


def test_noise_does_not_move_the_beginning():
    slow = [0.1] * 20 + [0.3, 0.3, 0.1, 0.3, 0.3, 0.3, 0.1, 0.3, 0.3, 0.3, 0.3, 0.3] * 2
    straggler = speed.find_straggler(gather(run(*paced([0.1] * 44, [0.1] * 44, slow))))
    assert straggler.since == 21


@pytest.mark.parametrize(
    "slow",
    [
        [0.1] * 30 + [5.0] + [0.1] * 29,  # one long step: a checkpoint
        [0.13] * 60,  # a little slower
        [0.1] * 52 + [0.3] * 8,  # for too short a time
    ],
)
def test_no_straggler(slow):
    nothing(*paced([0.1] * 60, [0.1] * 60, slow))


def test_jitter_of_tiny_steps_is_no_straggler():
    nothing(*paced([0.0005] * 60, [0.0005] * 60, [0.0012] * 60))


@pytest.mark.parametrize("step", [0, 30])
def test_a_rank_the_others_do_not_wait_for(step, golden):
    ranks = [rank(n, 4, step=100 if n != 2 else step) for n in range(4)]
    finding = found(*ranks, code="behind")
    golden(f"checks/behind_at_step_{step}.txt", wording(finding))
    assert finding.ranks == (2,)


def test_a_few_steps_apart_is_not_behind():
    nothing(rank(0, step=19), rank(1, step=3))
    nothing(rank(0, step=100), rank(1, step=60))


def card(index, **fields):
    made = Gpu(index, "H200", f"GPU-{index}", 10**9, 10**11, 10**9, 80, 400.0, 700.0)
    return dataclasses.replace(made, **fields)


def test_ranks_that_share_a_gpu_while_others_are_free(golden):
    finding = found(
        *(rank(n, gpu=card(0), notes={"gpu_count": 2}) for n in range(2)), code="gpu-shared"
    )
    golden("checks/ranks_that_share_a_gpu_while_others_are_free.txt", wording(finding))


def test_ranks_that_share_the_only_gpu():
    nothing(*(rank(n, gpu=card(0), notes={"gpu_count": 1}) for n in range(2)))


def test_a_rank_that_trains_beside_its_gpu():
    finding = found(
        rank(0, gpu=card(0)),
        rank(1, gpu=card(1, utilisation=0, process_memory=0)),
        code="gpu-idle",
    )
    assert finding.ranks == (1,)


# -- memory and bars -----------------------------------------------------------------------------


def test_near_the_memory_total(monkeypatch, golden):
    monkeypatch.setattr(memory, "memory_total", lambda: 10_000_000_000)
    finding = found(rank(0, rss=5 * 10**9), rank(1, rss=45 * 10**8), code="memory-near-limit")
    golden("checks/near_the_memory_limit.txt", wording(finding))
    nothing(rank(0, rss=4 * 10**9), rank(1, rss=4 * 10**9))


def test_one_rank_that_keeps_everything():
    finding = found(rank(0, rss=9 * 10**9), rank(1, rss=10**9), code="memory-uneven")
    assert finding.severity.word == "NOTE"


def growing(rate, noise=0, start=10**9):
    """48 points over 470 s, ``rate`` bytes a second, the sign of ``noise`` changing."""
    return [[10.0 * n, n, start + rate * 10 * n + noise * (-1) ** n] for n in range(48)]


def test_memory_that_grows_without_end(monkeypatch, golden):
    monkeypatch.setattr(memory, "memory_total", lambda: 10_000_000_000)
    leaking = rank(1, rss=3 * 10**9, notes={"memory": growing(4_000_000)})
    finding = found(rank(0, rss=10**9), leaking, code="memory-grows")
    # 6 GB are left, at 4 MB a second; 40 MB in each step of 10 s, seen over the second half.
    golden("checks/memory_that_grows_without_end.txt", wording(finding))
    assert finding.ranks == (1,)


@pytest.mark.parametrize(
    "points",
    [
        growing(0, noise=10**7),  # up and down
        growing(100_000),  # hardly
        growing(4_000_000)[:8],  # too young to tell
        [[10.0 * n, n, 10**9 + 10**8 * min(n, 20)] for n in range(48)],  # a cache that is full
    ],
)
def test_memory_that_does_not_grow_without_end(points):
    nothing(rank(0, 1, notes={"memory": points}))


def test_a_history_of_any_length_fits():
    history = History()
    for second in range(100_000):
        history.add(float(second), second, second)
    assert 24 <= len(history.points) <= 48
    times = [point[0] for point in history.points]
    assert times[0] == 0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) < 2.5 * min(gaps)


def bar_events(step_after=3):
    return (
        call(0, "start", kind=BARRIER, group="", step=3),
        call(1, "tqdm", 30, kind=BAR, group="", step=3),
        call(2, "go", kind=BARRIER, group="", step=step_after),
    )


def test_a_bar_between_two_barriers(golden):
    finding = found(calling(0, *bar_events()), rank(1), code="bar-between-barriers")
    golden("checks/a_bar_between_two_barriers.txt", wording(finding))
    assert finding.severity.word == "NOTE"


def test_a_bar_of_an_epoch_between_two_barriers_is_as_it_should_be():
    nothing(calling(0, *bar_events(step_after=99)), rank(1))
