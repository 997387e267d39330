"""Four real rank processes: whatever happens in a section happens on all ranks alike, and the next section
works.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool, Reply

from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.faults import SectionCancelled
from phase_parallel.parallel.section import SectionKey, digest_of, open_section

pytestmark = pytest.mark.ranks4
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(HERE / "section_program.py", 4)
    yield pool
    pool.close()


def all_fail_alike(replies: list[Reply], error_type: str) -> str:
    """The one sentence that every rank raised."""
    assert [reply.error_type for reply in replies] == [error_type] * len(replies)
    assert len({reply.error for reply in replies}) == 1
    return replies[0].error


def all_succeed(replies: list[Reply]) -> list:
    assert [reply.error for reply in replies] == [""] * len(replies)
    return [reply.result for reply in replies]


def test_two_sections_in_a_row(ranks: RankPool) -> None:
    first = all_succeed(ranks.run("steps"))
    second = all_succeed(ranks.run("steps"))
    assert all(result["total"] == [3.0, 3.0] for result in first + second)
    assert len({result["generation"] for result in first + second}) == 1, "no new groups without a reason"


def test_exception_on_one_rank_reaches_all_within_seconds(ranks: RankPool) -> None:
    replies = ranks.run("steps", fail={"rank": 2, "step": 1})
    sentence = all_fail_alike(replies, "RankFault")
    assert sentence == "rank 2 failed in denoise (step 2 of 3): the toy network broke"
    assert max(reply.seconds for reply in replies) < 3.0
    before, after = all_succeed(ranks.run("steps")), all_succeed(ranks.run("steps"))
    assert before[0]["total"] == [3.0, 3.0]
    assert before[0]["generation"] == after[0]["generation"]


def test_exception_on_rank_0_reaches_all(ranks: RankPool) -> None:
    sentence = all_fail_alike(ranks.run("steps", fail={"rank": 0, "step": 0}), "RankFault")
    assert sentence == "rank 0 failed in denoise (step 1 of 3): the toy network broke"
    all_succeed(ranks.run("steps"))


def test_a_rank_that_fails_between_sections_costs_one_of_them(ranks: RankPool) -> None:
    """Rank 0 learns of it, and the ranks that nobody told must not go on in groups that the others have left."""
    all_succeed(ranks.run("steps"))
    assert [result["total"] for result in all_succeed(ranks.run("between", rank=1))] == [[3.0, 3.0]] * 4


def test_ctrl_c_stays_what_it_is_on_its_rank(ranks: RankPool) -> None:
    replies = ranks.run("steps", interrupts=1)
    assert replies[1].error_type == "KeyboardInterrupt"
    sentence = all_fail_alike([replies[0], *replies[2:]], "RankFault")
    assert sentence == "rank 1 failed in denoise (step 1 of 3): KeyboardInterrupt"
    all_succeed(ranks.run("steps"))


def test_the_exception_that_python_treats_as_an_end_is_a_fault_too(ranks: RankPool) -> None:
    sentence = all_fail_alike(ranks.run("steps", stops=1), "RankFault")
    assert sentence == "rank 1 failed in denoise (step 1 of 3): StopIteration"
    all_succeed(ranks.run("steps"))


def test_cancel_stops_all_ranks_at_the_same_step(ranks: RankPool) -> None:
    generation = all_succeed(ranks.run("steps"))[0]["generation"]
    sentence = all_fail_alike(ranks.run("steps", count=5, cancel_at=3), "SectionCancelled")
    assert sentence == "cancelled after 3 of 5"
    assert all_succeed(ranks.run("steps"))[0]["generation"] == generation, "a cancel keeps the groups"


def test_one_token_differs_on_one_rank(ranks: RankPool) -> None:
    sentence = all_fail_alike(ranks.run("steps", odd_token=3), "SectionMismatch")
    assert sentence == "rank 3 has other inputs than rank 0 in denoise"
    all_succeed(ranks.run("steps"))


def test_one_rank_is_at_another_call(ranks: RankPool) -> None:
    sentence = all_fail_alike(ranks.run("steps", odd_call=1), "SectionMismatch")
    assert sentence.startswith("rank 1 is at node 7, call 1") and ", not at node 7, call " in sentence
    all_succeed(ranks.run("steps"))


def test_one_rank_makes_another_collective(ranks: RankPool) -> None:
    sentence = all_fail_alike(ranks.run("steps", odd_site=1), "CollectiveDivergence")
    assert "rank 1 made `section broadcast step1.elsewhere" in sentence
    assert sentence.endswith("in denoise (step 3 of 3)")
    all_succeed(ranks.run("steps"))


def test_one_rank_has_another_result(ranks: RankPool) -> None:
    sentence = all_fail_alike(ranks.run("steps", odd_result=2), "SectionMismatch")
    assert sentence == "rank 2 has another result than rank 0 in denoise (step 3 of 3)"
    all_succeed(ranks.run("steps"))


def test_a_rank_that_comes_too_late_is_named_and_fails_too(ranks: RankPool) -> None:
    sentence = all_fail_alike(ranks.run("late", seconds=5.5, rank=3), "SectionTimeout")
    assert sentence.startswith("rank 3 did not answer within 4 s in denoise (entering node 7, call ")
    all_succeed(ranks.run("steps"))


def test_a_rank_that_works_for_ever_is_named(ranks: RankPool) -> None:
    sentence = all_fail_alike(ranks.run("steps", sleeps=2), "SectionTimeout")
    # Rank 0 may get through the broadcast of the first step without rank 2.
    assert re.match(r"rank 2 did not answer within 4 s in denoise \(step [12] of 3\);", sentence)
    all_succeed(ranks.run("steps"))


def test_another_plan_at_the_next_section(ranks: RankPool) -> None:
    sp = all_succeed(ranks.run("steps", plan="hybrid", denoise="sp"))[0]["generation"]
    tp = all_succeed(ranks.run("steps", plan="tp", denoise="tp"))
    cfg = all_succeed(ranks.run("steps", plan="hybrid", denoise="cfg"))
    assert [tp[0]["generation"], cfg[0]["generation"]] == [sp + 1, sp + 2]
    assert tp[0]["total"] == cfg[0]["total"] == [3.0, 3.0]


def test_a_rank_that_fails_before_the_groups_are_made_keeps_nobody_waiting(ranks: RankPool) -> None:
    all_succeed(ranks.run("steps"))
    replies = ranks.run("apart", rank=2, limit_s=60.0)
    sentence = all_fail_alike(replies, "RankFault")
    assert sentence == "rank 2 failed in denoise: the former groups do not close"
    assert max(reply.seconds for reply in replies) < 2.0
    all_succeed(ranks.run("steps"))


def test_a_rank_that_does_not_come_to_make_the_groups_is_named(ranks: RankPool) -> None:
    all_succeed(ranks.run("steps"))
    sentence = all_fail_alike(ranks.run("apart", rank=1, seconds=3.0, limit_s=1.0), "SectionTimeout")
    assert sentence == "rank 1 did not answer within 1 s in denoise (making the process groups); see the log of that rank"
    all_succeed(ranks.run("steps"))


def test_groups_that_were_half_made_do_not_disturb_the_next_ones(ranks: RankPool) -> None:
    all_succeed(ranks.run("steps"))
    assert all_fail_alike(ranks.run("inside", rank=2), "RankFault") == "rank 2 failed in denoise: no socket is left"
    all_succeed(ranks.run("steps"))


def test_ranks_with_different_plans(ranks: RankPool) -> None:
    sentence = all_fail_alike(ranks.run("steps", odd_plan=1), "SectionMismatch")
    assert sentence == "rank 1 uses plan tp, rank 0 plan hybrid in denoise"
    all_succeed(ranks.run("steps"))


def test_records_show_every_rank(ranks: RankPool) -> None:
    ranks.run("steps", fail={"rank": 1, "step": 0})
    failed = ranks.run("records")[0].result
    assert {record["error"] for record in failed} == {
        "rank 1 failed in denoise (step 1 of 3): the toy network broke"
    }
    ranks.run("steps")
    records = ranks.run("records")[3].result
    assert [record["rank"] for record in records] == [0, 1, 2, 3]
    assert [record["place"]["logical_tp_rank"] for record in records] == [0, 2, 1, 3]
    assert len({record["digest"] for record in records}) == 1 and len(records[0]["digest"]) == 32
    for record, process in zip(records, ranks.processes, strict=True):
        assert record["pid"] == process.pid and record["phase"] == "idle"
        assert record["error"] == failed[0]["error"] and record["error_at"] > 0, "the last error stays"
        assert record["phase_seconds"]["denoise"] > 0 and record["s_per_step"] > 0
        assert record["memory"]["resident_set"] > 10**7


def test_a_stopped_rank_is_named(ranks: RankPool) -> None:
    """SIGSTOP: the process is there, but nothing in it runs."""
    all_succeed(ranks.run("steps"))
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    others = [0, 2, 3]
    try:
        ranks.start("steps")
        replies = ranks.collect(others, 20.0)
    finally:
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
    sentence = all_fail_alike([replies[rank] for rank in others], "SectionTimeout")
    assert sentence.startswith("rank 1 did not answer within 4 s in denoise (entering ")
    assert ranks.collect([1], 20.0)[1].error == sentence
    all_succeed(ranks.run("steps"))


def test_a_rank_that_hangs_says_where(ranks: RankPool) -> None:
    all_succeed(ranks.run("steps"))
    before = len(ranks.stacks(1))
    sentence = all_fail_alike([reply for reply in ranks.run("steps", sleeps=1) if reply.error_type], "SectionTimeout")
    assert sentence.startswith("rank 1 did not answer within 4 s in denoise (step ")
    stacks = ranks.stacks(1)[before:]
    assert stacks.count('section_program.py", line') and " in steps" in stacks
    assert stacks.count("rank 1 did not answer; it is here:") == 1 and "Current thread" not in stacks, "its heart beats, so it is not asked by a signal"
    all_succeed(ranks.run("steps"))


def test_a_pool_that_waits_in_vain_shows_the_stacks(ranks: RankPool) -> None:
    started = ranks.start("late", seconds=2.0, rank=3)
    with pytest.raises(AssertionError, match=r"(?s)did not reply within 1.0 s.*rank 3:.* in late"):
        ranks.collect(started, 1.0)
    ranks.collect(started, 20.0)


def test_a_killed_rank_is_named(ranks: RankPool) -> None:
    """Last: the pool has three ranks afterwards."""
    all_succeed(ranks.run("steps"))
    others = [0, 1, 3]
    ranks.start("steps", killed=2)
    replies = ranks.collect(others, 20.0)
    sentence = all_fail_alike([replies[rank] for rank in others], "RankFault")
    assert re.match(r"rank 2 failed in denoise \(step [12] of 3\): the process has ended$", sentence)
    # It is also missed where no connection can break.
    replies = ranks.collect(ranks.start("steps", ranks=others), 20.0)
    sentence = all_fail_alike([replies[rank] for rank in others], "RankFault")
    assert sentence == "rank 2 failed in denoise: the process has ended"
    assert max(reply.seconds for reply in replies.values()) < 3.0


def test_world_of_one_needs_no_groups_and_keeps_the_exception() -> None:
    cluster = Cluster.alone(torch.device("cpu"))
    key = SectionKey("prompt", "1", 1, digest_of({"a": 1}, {}))
    with open_section(cluster, key, cluster.plan, phase="denoise") as section:
        section.check(1, 2)
        section.agree("anything", digest_of({}, {"t": torch.ones(2, dtype=torch.bfloat16)}))
    assert not torch.distributed.is_initialized()
    with pytest.raises(KeyError), open_section(cluster, key, cluster.plan, phase="denoise"):
        raise KeyError("own")
    with (
        pytest.raises(SectionCancelled),
        open_section(cluster, key, cluster.plan, phase="denoise", cancelled=lambda: True) as section,
    ):
        section.check(0, 1)


def test_digest_sees_dtype_shape_name_and_bits() -> None:
    base = {"x": torch.zeros(2, 3)}
    different = [
        digest_of({}, base),
        digest_of({"seed": 0}, base),
        digest_of({}, {"y": torch.zeros(2, 3)}),
        digest_of({}, {"x": torch.zeros(3, 2)}),
        digest_of({}, {"x": torch.zeros(2, 3, dtype=torch.int32)}),
        digest_of({}, {"x": -torch.zeros(2, 3)}),
        digest_of({}, {"x": torch.zeros(0)}),
        digest_of({}, {"x": torch.tensor(True)}),
    ]
    assert len(set(different)) == len(different)
    assert digest_of({}, {"x": torch.zeros(3, 2).T}) == digest_of({}, base)
