"""Actions due after a step are the same on all ranks, either computed or broadcast."""

from __future__ import annotations

from typing import Any

import pytest

import miniray
from miniray.train.lockstep.schedule import Action, Agreement, StepSchedule

pytest.importorskip("torch")


def test_schedule_returns_each_action_at_its_multiples() -> None:
    schedule = StepSchedule(log_every=4, snapshot_every=3)
    due = {step: schedule.get_actions(step) for step in range(1, 13)}
    assert [s for s in due if Action.LOG in due[s]] == [1, 4, 8, 12]
    assert [s for s in due if Action.SNAPSHOT in due[s]] == [3, 6, 9, 12]
    assert due[7] is Action.NONE


def test_schedule_without_options_only_logs() -> None:
    actions = {StepSchedule().get_actions(step) for step in range(1, 100)}
    assert actions == {Action.LOG, Action.NONE}


@miniray.remote
class Member:
    """A rank that counts through steps and notes what is agreed at which."""

    def run(self, spec: Any, rank: int, steps: int) -> tuple[list[tuple[int, int, int]], int]:
        import time

        import torch.distributed as dist

        from miniray.train.lockstep import process_group

        process_group.join(spec, rank)
        step = 0
        asked = 0

        def request() -> tuple[Action, int]:
            nonlocal asked
            asked += 1
            return (Action.STOP, step) if asked == 3 else (Action.NONE, 0)

        agreement = Agreement(rank == 0, 0, request, interval=0.02)
        broadcasts = 0
        plain = agreement._broadcast

        def count(*args: Any, **kwargs: Any) -> None:
            nonlocal broadcasts
            broadcasts += 1
            plain(*args, **kwargs)

        agreement._broadcast = count
        agreed = []
        for step in range(1, steps + 1):
            dist.barrier()
            time.sleep(0.001)
            action = agreement.decide(step)
            if action:
                agreed.append((step, int(action), agreement.argument))
        process_group.leave()
        assert (asked > 0) == (rank == 0)
        return agreed, broadcasts


def test_ranks_agree_at_the_same_step_with_few_messages() -> None:
    from miniray.train.lockstep.process_group import GroupHost

    with miniray.init(num_workers=3):
        host = GroupHost(3, timeout=30)
        ranks = [Member.remote() for _ in range(3)]
        results = miniray.get([r.run.remote(host.spec, i, 200) for i, r in enumerate(ranks)])
        host.close()
    agreed, broadcasts = results[0]
    assert [result for result, _ in results] == [agreed] * 3
    ((step, action, argument),) = agreed
    assert (action, argument) == (Action.STOP, step)
    assert {count for _, count in results} == {broadcasts}
    assert broadcasts < 100
