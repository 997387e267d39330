"""The collectives that a decode step needs: into fixed buffers, by somebody else's kernel, a summand that a kernel adds to. Ranks are threads."""

from __future__ import annotations

import pytest
import torch
from thread_world import run_ranks

from phase_parallel.parallel.collectives import Communicator, Partial
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.plan import ParallelPlan, make_plan
from phase_parallel.parallel.waiting import CollectiveError

HYBRID = dict(name="hybrid", world_size=4)
EIGHT = dict(name="hybrid", world_size=8, storage_tp=4)


def member(**plan: object) -> Communicator:
    """One rank without peers: enough for what is refused before anything is sent."""
    made = make_plan(**plan)
    return Communicator(made, ProcessGroups(made, {}, None, "gloo"))


class TestSomebodyElsesReduction:
    def test_it_gets_the_summand_once_and_is_counted(self) -> None:
        comm, seen = member(name="single", world_size=1), []
        view, summand = comm.phase("decode"), torch.arange(3.0)
        with view.forward({"row_reduce": 1}, "one layer"):
            assert view.row_reduce_with(Partial(summand, "o_proj"), seen.append) is None
        assert len(seen) == 1 and seen[0] is summand
        assert comm.ledger.counts["row_reduce"] == 1

    @pytest.mark.parametrize("value", [torch.ones(3), None])
    def test_only_a_partial_is_opened(self, value: object) -> None:
        seen: list[object] = []
        with pytest.raises(CollectiveError, match=rf"^row_reduce got a {type(value).__name__}, not a partial product"):
            member(**HYBRID).phase("decode").row_reduce_with(value, seen.append)
        assert seen == []

    def test_ledgers_of_both_ways_agree(self) -> None:
        """A rank that falls back to the process group has made the same collectives."""
        first, second = (member(name="single", world_size=1) for _ in range(2))
        first.phase("decode").row_reduce(Partial(torch.ones(3), "o_proj"))
        second.phase("decode").row_reduce_with(Partial(torch.ones(3), "o_proj"), lambda summand: None)
        assert first.ledger.digest() == second.ledger.digest()

    def test_another_number_is_refused(self) -> None:
        view = member(name="single", world_size=1).phase("decode")
        with pytest.raises(CollectiveError, match="made a wrong number of collectives: row_reduce 1 instead of 2"), view.forward({"row_reduce": 2}, "trunk"):
            view.row_reduce_with(Partial(torch.ones(3), "o_proj"), lambda summand: None)


class TestVocabularyIntoABuffer:
    @pytest.mark.parametrize("plan", [dict(name="single", world_size=1), dict(name="tp", world_size=3), HYBRID, EIGHT])
    def test_rows_come_in_logical_order(self, plan: dict) -> None:
        def body(own: ParallelPlan, comm: Communicator) -> tuple[torch.Tensor, bool]:
            view = comm.phase("decode")
            out = torch.full((2 * view.topology.tp_size,), float("nan"))
            place = out.data_ptr()
            mine = torch.tensor([0.0, 0.5]) + view.topology.tp_rank
            view.vocab_gather_into(mine, out, "lm_head", order=view.topology.tp_ranks)
            return out, out.data_ptr() == place

        for out, in_place in run_ranks(body, **plan):
            assert in_place and torch.equal(out, torch.arange(len(out)) / 2)

    def test_another_order_is_refused(self) -> None:
        view = member(**HYBRID).phase("decode")
        wrong = tuple(reversed(view.topology.tp_ranks))
        with pytest.raises(CollectiveError, match=r"^lm_head: gather order .* is not the decode order"):
            view.vocab_gather_into(torch.ones(2), torch.ones(8), "lm_head", order=wrong)

    def test_denoise_has_no_logits(self) -> None:
        view = member(name="single", world_size=1).phase("denoise")
        with pytest.raises(CollectiveError, match=r"^lm_head: role vocab_gather does not belong to phase denoise; it belongs to prefill, decode$"):
            view.vocab_gather_into(torch.ones(2), torch.ones(2), "lm_head", order=view.topology.tp_ranks)


class TestExtendedPartial:
    def test_a_kernel_adds_to_the_summand(self) -> None:
        extended = Partial(torch.ones(2), "shared_down").extend(lambda summand: summand + 2.0)
        assert isinstance(extended, Partial) and extended.site == "shared_down"
        assert torch.equal(member(name="single", world_size=1).phase("decode").row_reduce(extended), torch.full((2,), 3.0))

    def test_the_result_is_still_guarded(self) -> None:
        extended = Partial(torch.ones(2), "shared_down").extend(lambda summand: summand)
        with pytest.raises(CollectiveError, match=r"^shared_down is an unreduced partial product and reached"):
            torch.ones(2) + extended


class TestSum:
    def test_one_rank_keeps_its_tensor(self) -> None:
        summand = torch.ones(3)
        assert member(name="single", world_size=1).sum(summand, (0,), "site") is summand

    @pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 2, 1, 3)])
    def test_order_is_that_of_the_ranks_on_all_of_them(self, ranks: tuple[int, ...]) -> None:
        """1e8 swallows a 1 that is added to it alone: the sum shows its order."""
        values = {0: 1e8, 1: 1.0, 2: -1e8, 3: 1.0}
        want = torch.tensor(0.0)
        for rank in ranks:
            want = want + values[rank]

        def body(plan: ParallelPlan, comm: Communicator) -> torch.Tensor:
            return comm.sum(torch.tensor([values[plan.rank]]), ranks, "site")

        sums = [float(total) for total in run_ranks(body, **HYBRID)]
        assert sums == [float(want)] * 4

    def test_rows_that_are_not_contiguous(self) -> None:
        def body(plan: ParallelPlan, comm: Communicator) -> torch.Tensor:
            return comm.sum(torch.arange(12.0).view(3, 4).T, tuple(range(4)), "site")

        for total in run_ranks(body, **HYBRID):
            assert torch.equal(total, 4 * torch.arange(12.0).view(3, 4).T)
