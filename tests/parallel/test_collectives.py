"""The guards of the collectives, each of which must fire on every rank, and what the collectives compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from thread_world import run_ranks

from phase_parallel.parallel.collectives import CollectiveError, Communicator, Partial, PhaseView
from phase_parallel.parallel.plan import ParallelPlan
from phase_parallel.parallel.resident import Weight, project

HYBRID = dict(name="hybrid", world_size=4)


def on_every_rank(mistake: Callable[[ParallelPlan, Communicator], object], message: str) -> None:
    """``mistake`` raises a CollectiveError with ``message`` on all four ranks."""

    def body(plan: ParallelPlan, comm: Communicator) -> str:
        with pytest.raises(CollectiveError) as caught:
            mistake(plan, comm)
        return str(caught.value)

    for rank, text in enumerate(run_ranks(body, **HYBRID)):
        assert message in text, f"rank {rank}: {text}"


def partial(value: float = 1.0) -> Partial:
    return Partial(torch.full((2, 3), value), "layers.3.attn.o_proj")


@pytest.mark.parametrize(
    "use",
    [
        lambda p: torch.nn.functional.silu(p),
        lambda p: torch.zeros(2, 3) + p,
        lambda p: p + torch.zeros(2, 3),
        lambda p: p.float(),
        lambda p: torch.cat([p, p]),
        lambda p: project(p, Weight(torch.zeros(4, 3), "column_parallel", "next")),
    ],
    ids=["activation", "added to a tensor", "tensor added", "method", "torch.cat", "next projection"],
)
def test_a_forgotten_reduction_is_an_error_and_not_a_picture(use: Callable[[Partial], object]) -> None:
    on_every_rank(lambda plan, comm: use(partial()), "layers.3.attn.o_proj")


def test_a_reduced_or_column_parallel_tensor_is_not_reduced_again() -> None:
    on_every_rank(lambda plan, comm: comm.phase("denoise").row_reduce(torch.zeros(2, 3)), "not a partial product")


def test_a_role_of_another_phase() -> None:
    on_every_rank(lambda plan, comm: comm.phase("decode").seq_to_heads(torch.zeros(2, 4), "site"), "does not belong to phase decode")
    on_every_rank(
        lambda plan, comm: comm.phase("denoise").vocab_gather(torch.zeros(1, 4), "lm_head", order=plan.topology("denoise").tp_ranks),
        "role vocab_gather does not belong to phase denoise",
    )


def test_an_untagged_projection() -> None:
    on_every_rank(lambda plan, comm: project(torch.zeros(2, 3), torch.zeros(4, 3)), "without a role")


def test_a_partial_needs_a_site() -> None:
    on_every_rank(lambda plan, comm: Partial(torch.zeros(1), ""), "without a site")


def test_a_reordered_gather() -> None:
    """Physical order is the mistake that would exchange the middle quarters of the vocabulary."""
    on_every_rank(
        lambda plan, comm: comm.phase("decode").vocab_gather(torch.zeros(1, 4), "lm_head", order=(0, 1, 2, 3)),
        "gather order (0, 1, 2, 3) is not the decode order (0, 2, 1, 3)",
    )


@pytest.mark.parametrize(("made", "message"), [(1, "row_reduce 1 instead of 2"), (3, "row_reduce 3 instead of 2"), (0, "row_reduce 0 instead of 2")])
def test_another_number_of_collectives(made: int, message: str) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        view = comm.phase("denoise")
        with view.forward({"row_reduce": 2}, "trunk"):
            for _ in range(made):
                view.row_reduce(partial())

    on_every_rank(body, message)


def test_a_collective_of_an_unexpected_role() -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        view = comm.phase("denoise")
        with view.forward({}, "trunk"):
            view.seq_gather(torch.zeros(2, 3), "site", order=view.topology.sp_ranks)

    on_every_rank(body, "seq_gather 1 instead of 0")


def test_an_error_inside_a_forward_is_not_hidden_by_the_count() -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        with pytest.raises(ZeroDivisionError), comm.phase("denoise").forward({"row_reduce": 2}, "trunk"):
            raise ZeroDivisionError

    run_ranks(body, **HYBRID)


def test_row_reduce_adds_the_tensor_parallel_group_of_the_phase() -> None:
    """AR: all four ranks. Denoise: the pair of one replica. Equal bits on all members."""

    def body(plan: ParallelPlan, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        value = 0.1 * (plan.rank + 1)
        return comm.phase("decode").row_reduce(partial(value)), comm.phase("denoise").row_reduce(partial(value))

    results = run_ranks(body, **HYBRID)
    for rank, (ar, denoise) in enumerate(results):
        assert torch.equal(ar, results[0][0])
        assert torch.allclose(ar, torch.full((2, 3), 1.0))
        assert torch.equal(denoise, results[rank // 2 * 2][1])
        assert torch.allclose(denoise, torch.full((2, 3), 0.3 if rank < 2 else 0.7))


def test_partials_of_one_reduction_add_up() -> None:
    both = run_ranks(lambda plan, comm: comm.phase("denoise").row_reduce(partial(1.0) + partial(2.0)), **HYBRID)
    assert torch.equal(both[0], torch.full((2, 3), 6.0))


def test_vocabulary_comes_in_logical_order() -> None:
    """Each rank contributes its logical rank; physical 0,1,2,3 are logical 0,2,1,3."""

    def body(plan: ParallelPlan, comm: Communicator) -> list[float]:
        mine = torch.full((1, 2), float(plan.logical_tp_rank))
        return comm.phase("decode").vocab_gather(mine, "lm_head", order=plan.ar_order)[0].tolist()

    assert run_ranks(body, **HYBRID) == [[0, 0, 1, 1, 2, 2, 3, 3]] * 4


@pytest.mark.parametrize("plan", [HYBRID, dict(name="hybrid", world_size=8, storage_tp=2), dict(name="hybrid", world_size=8, storage_tp=4)])
def test_ulysses_there_and_back(plan: dict) -> None:
    """seq_to_heads gives every rank all tokens of its heads, in order; heads_to_seq is its inverse."""

    def body(own: ParallelPlan, comm: Communicator) -> None:
        view: PhaseView = comm.phase("denoise")
        sp, rank = view.topology.sp_size, view.topology.sp_rank
        whole = torch.arange(4 * sp * 2 * sp * 3.0).view(4 * sp, 2 * sp, 3)  # [tokens, heads, d]
        mine = whole[rank * 4 : (rank + 1) * 4]
        heads = view.seq_to_heads(mine, "qkv")
        assert torch.equal(heads, whole[:, rank * 2 : (rank + 1) * 2])
        assert torch.equal(view.heads_to_seq(heads, "out"), mine)
        assert torch.equal(view.seq_gather(mine, "final", order=view.topology.sp_ranks), whole)

    run_ranks(body, **plan)


def test_all_ranks_have_one_ledger() -> None:
    """Ranks of other groups make the same entries, so digests are equal although the physical ranks are not."""

    def body(plan: ParallelPlan, comm: Communicator) -> tuple[int, int]:
        view = comm.phase("denoise")
        view.row_reduce(partial())
        view.seq_gather(torch.zeros(2, 3), "final", order=view.topology.sp_ranks)
        view.replica_kv_gather(torch.zeros(1, 2), "prefix.0.k")
        comm.phase("decode").vocab_gather(torch.zeros(1, 4), "lm_head", order=plan.ar_order)
        return comm.ledger.digest()

    assert len(set(run_ranks(body, **HYBRID))) == 1


def test_phase_views_are_made_once() -> None:
    run_ranks(lambda plan, comm: [comm.phase(p) is comm.phase(p) or pytest.fail(p) for p in ("prefill", "decode", "denoise")], **HYBRID)


def test_a_phase_that_does_not_exist() -> None:
    with pytest.raises(KeyError):
        run_ranks(lambda plan, comm: comm.phase("train"), "single", world_size=1)
