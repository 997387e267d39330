"""Four real ranks: each guard of the collectives, fired on one rank or on all, stops every rank with the same sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import RankPool, Reply

pytestmark = pytest.mark.ranks4

GUARDS = {
    "forgotten": "layers.3.mlp.down is an unreduced partial product and reached add; call row_reduce first",
    "untagged": "a projection got a bare Tensor of shape [8, 4] without a role; wrap it in Weight",
    "wrong phase": "lm_head: role vocab_gather does not belong to phase denoise; it belongs to prefill, decode",
    "reordered": "is not the denoise order",
    "reduced twice": "row_reduce got a Tensor, not a partial product",
    "one less": "toy in phase denoise made a wrong number of collectives: seq_gather 0 instead of 1",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(Path(__file__).with_name("collective_program.py"), 4)
    yield pool
    pool.close()


def one_sentence(replies: list[Reply], error_type: str) -> str:
    assert [reply.error_type for reply in replies] == [error_type] * 4, [reply.error for reply in replies]
    assert len({reply.error for reply in replies}) == 1
    return replies[0].error


def succeed(replies: list[Reply]) -> list:
    assert [reply.error for reply in replies] == [""] * 4
    return [reply.result for reply in replies]


def test_without_a_mistake_all_ranks_agree(ranks: RankPool) -> None:
    # Two shards of ones: 1 + 2 * (8 * 4); the vocabulary in logical order.
    assert succeed(ranks.run("layer")) == [[65.0] * 16] * 4
    assert (
        succeed(ranks.run("layer", phase="decode"))
        == [[1.0] * 4 + [2.0] * 4 + [3.0] * 4 + [4.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4 + [4.0] * 4] * 4
    )


@pytest.mark.parametrize("mistake", GUARDS)
@pytest.mark.parametrize("odd", [0, 3])
def test_mistake_on_one_rank_stops_every_rank(ranks: RankPool, mistake: str, odd: int) -> None:
    replies = ranks.run("layer", mistake=mistake, odd=[odd])
    sentence = one_sentence(replies, "RankFault")
    assert sentence.startswith(f"rank {odd} failed in denoise (step 2 of 2): ") and GUARDS[mistake] in sentence
    assert max(reply.seconds for reply in replies) < 3.0
    succeed(ranks.run("layer"))


@pytest.mark.parametrize("mistake", [*GUARDS, "one more"])
def test_mistake_of_the_program_stops_every_rank(ranks: RankPool, mistake: str) -> None:
    sentence = one_sentence(ranks.run("layer", mistake=mistake), "RankFault")
    expected = GUARDS.get(mistake, "toy in phase denoise made a wrong number of collectives: row_reduce 2 instead of 1")
    assert " failed in denoise (step 2 of 2): " in sentence and expected in sentence
    succeed(ranks.run("layer"))


def test_physical_order_of_the_vocabulary(ranks: RankPool) -> None:
    sentence = one_sentence(ranks.run("layer", phase="decode", mistake="physical order", odd=[2]), "RankFault")
    assert sentence.endswith("lm_head: gather order (0, 1, 2, 3) is not the decode order (0, 2, 1, 3); take it from the topology")
    succeed(ranks.run("layer", phase="decode"))


def test_one_collective_more_on_one_rank(ranks: RankPool) -> None:
    """The peer has gone on; nobody waits longer than the timeout."""
    replies = ranks.run("layer", mistake="one more", odd=[1], timeout_s=60.0)
    assert len({reply.error for reply in replies}) == 1 and "" not in {reply.error for reply in replies}
    assert max(reply.seconds for reply in replies) < 12.0
    succeed(ranks.run("layer"))


def test_input_that_differs_by_one_token(ranks: RankPool) -> None:
    sentence = one_sentence(ranks.run("layer", mistake="one token", odd=[2]), "SectionMismatch")
    assert sentence == "rank 2 has other inputs than rank 0 in denoise"
    succeed(ranks.run("layer"))


def test_phase_switch_makes_no_group(ranks: RankPool) -> None:
    for result in succeed(ranks.run("phases")):
        assert result["made"] == 0
        assert result["at start"] >= 5, "two pairs each of shards and replicas, and all ranks"
        assert all(views == result["views"][0] for views in result["views"])
