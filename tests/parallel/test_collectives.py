"""Guards of the collectives in one process; test_collective_ranks.py shows them on four real ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from thread_world import run_ranks

from phase_parallel.parallel.collectives import PHASE_ROLES, Communicator, Partial, PhaseView
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.ledger import ROLES
from phase_parallel.parallel.picture_view import PICTURE_ROLES
from phase_parallel.parallel.plan import PHASES, ParallelPlan, make_plan
from phase_parallel.parallel.waiting import CollectiveError

HYBRID = dict(name="hybrid", world_size=4)
CFG = dict(name="hybrid", world_size=4, denoise="cfg")
EIGHT = dict(name="hybrid", world_size=8, storage_tp=2, denoise="cfg_sp")


def alone() -> Communicator:
    plan = make_plan("single", world_size=1)
    return Communicator(plan, ProcessGroups(plan, {}, None, "gloo"))


def member(**plan: object) -> Communicator:
    """One rank's communicator without peers: enough for guards that fire before anything is sent."""
    made = make_plan(**(plan or HYBRID))
    return Communicator(made, ProcessGroups(made, {}, None, "gloo"))


def refused(message: str) -> AbstractContextManager:
    return pytest.raises(CollectiveError, match=message)


def partial() -> Partial:
    return Partial(torch.ones(2, 3), "layers.3.attn.o_proj")


class TestPartial:
    @pytest.mark.parametrize(
        "use",
        [
            lambda p: torch.nn.functional.linear(p, torch.ones(3, 3)),
            lambda p: torch.add(torch.ones(2, 3), p),
            lambda p: torch.ones(2, 3) + p,
            lambda p: torch.ones(2, 3) * p,
            lambda p: torch.ones(2, 3).add_(p),
            lambda p: torch.cat([torch.ones(2, 3), p]),
            lambda p: torch.stack([p, p]),
            lambda p: torch.nn.functional.rms_norm(p, (3,)),
            lambda p: torch.isfinite(p),
            lambda p: torch.nn.functional.silu(p),
        ],
    )
    def test_torch_does_not_take_it(self, use: Callable) -> None:
        with refused(r"^layers.3.attn.o_proj is an unreduced partial product and reached .*; call row_reduce first$"):
            use(partial())

    @pytest.mark.parametrize(
        "use", [lambda p: p + torch.ones(2, 3), lambda p: p + 1.0, lambda p: p.shape, lambda p: p.float(), lambda p: p.to(torch.bfloat16)]
    )
    def test_it_is_no_tensor(self, use: Callable) -> None:
        with refused(r"^layers.3.attn.o_proj is .*call row_reduce first$"):
            use(partial())

    @pytest.mark.parametrize(
        "use", [lambda p: 0 + p, lambda p: p * 2, lambda p: sum([p, p]), lambda p: p[0], lambda p: float(p), lambda p: len(p), list]
    )
    def test_python_does_not_take_it_either(self, use: Callable) -> None:
        with pytest.raises(TypeError):
            use(partial())

    def test_two_summands_of_one_reduction_add(self) -> None:
        total = Partial(torch.ones(2), "shared") + Partial(torch.full((2,), 2.0), "routed")
        assert isinstance(total, Partial) and total.site == "shared"
        assert torch.equal(alone().phase("decode").row_reduce(total), torch.full((2,), 3.0))

    def test_it_needs_a_site(self) -> None:
        with refused("a partial product without a site cannot be traced"):
            Partial(torch.ones(1), "")


def every_call(view: PhaseView) -> dict[str, Callable[[], object]]:
    x, topology = torch.ones(4, 4, 2), view.topology
    return {
        "row_reduce": lambda: view.row_reduce(Partial(x, "site")),
        "vocab_gather": lambda: view.vocab_gather(x, "site", order=topology.tp_ranks),
        "seq_to_heads": lambda: view.seq_to_heads(x, "site"),
        "heads_to_seq": lambda: view.heads_to_seq(x, "site"),
        "kv_gather": lambda: view.kv_gather(x, "site", order=topology.sp_ranks),
        "seq_gather": lambda: view.seq_gather(x, "site", order=topology.sp_ranks),
        "cfg_gather": lambda: view.cfg_gather(x, "site", order=topology.cfg_ranks),
    }


class TestRoles:
    @pytest.mark.parametrize("phase", PHASES)
    def test_phase_owns_its_roles_and_no_others(self, phase: str) -> None:
        comm = alone()
        for role, call in every_call(comm.phase(phase)).items():
            if role in PHASE_ROLES[phase]:
                before = comm.ledger.counts[role]
                call()
                assert comm.ledger.counts[role] == before + 1
            else:
                with refused(rf"^site: role {role} does not belong to phase {phase}; it belongs to "):
                    call()

    def test_wrong_phase_is_refused_before_anything_is_sent(self) -> None:
        comm = member()
        for phase, role in (("denoise", "vocab_gather"), ("decode", "kv_gather"), ("prefill", "seq_to_heads")):
            with refused(f"role {role} does not belong to phase {phase}"):
                every_call(comm.phase(phase))[role]()
        assert comm.ledger.counts == {}

    def test_every_role_has_an_owner(self) -> None:
        phases = frozenset().union(*PHASE_ROLES.values())
        assert set(ROLES) == phases | PICTURE_ROLES
        assert set(every_call(alone().phase("denoise"))) == phases - {"broadcast"}

    def test_prefill_and_decode_gather_the_kv_of_no_sequence(self) -> None:
        with refused("role kv_gather does not belong to phase prefill; it belongs to denoise"):
            member().phase("prefill").replica_kv_gather(torch.ones(2, 2), "site")


class TestOrder:
    @pytest.mark.parametrize(
        ("call", "expected", "plan"),
        [
            (lambda v, order: v.comm.phase("decode").vocab_gather(torch.ones(1, 2), "lm_head", order=order), (0, 2, 1, 3), HYBRID),
            (lambda v, order: v.kv_gather(torch.ones(1, 2), "kv", order=order), (0, 2), HYBRID),
            (lambda v, order: v.seq_gather(torch.ones(1, 2), "final", order=order), (0, 2), HYBRID),
            (lambda v, order: v.cfg_gather(torch.ones(1, 2), "cfg", order=order), (0, 2), CFG),
        ],
    )
    def test_another_order_is_refused(self, call: Callable, expected: tuple[int, ...], plan: dict) -> None:
        comm = member(**plan)
        for wrong in (expected[::-1], tuple(sorted(expected))[1:], expected + expected, ()):
            with refused(r"gather order \(.*\) is not the (decode|denoise) order \(0, 2.*\); take it from the topology"):
                call(comm.phase("denoise"), wrong)
        assert comm.ledger.counts == {}

    def test_physical_order_is_not_the_logical_order(self) -> None:
        with refused(r"lm_head: gather order \(0, 1, 2, 3\) is not the decode order \(0, 2, 1, 3\)"):
            member().phase("decode").vocab_gather(torch.ones(1, 2), "lm_head", order=(0, 1, 2, 3))


class TestCounts:
    @pytest.mark.parametrize(
        ("made", "expected", "message"),
        [
            (1, {"row_reduce": 2}, "row_reduce 1 instead of 2"),
            (3, {"row_reduce": 2}, "row_reduce 3 instead of 2"),
            (0, {"row_reduce": 2}, "row_reduce 0 instead of 2"),
            (1, {}, "row_reduce 1 instead of 0"),
            (1, {"row_reduce": 1, "kv_gather": 4}, "kv_gather 0 instead of 4"),
        ],
    )
    def test_another_number_is_refused(self, made: int, expected: dict, message: str) -> None:
        view = alone().phase("denoise")
        with refused(f"^trunk in phase denoise made a wrong number of collectives: {message}$"), view.forward(expected, "trunk"):
            for _ in range(made):
                view.row_reduce(partial())

    def test_right_number_passes_and_forwards_do_not_add_up(self) -> None:
        view = alone().phase("denoise")
        for _ in range(3):
            with view.forward({"row_reduce": 1, "kv_gather": 0}, "trunk"):
                view.row_reduce(partial())

    def test_error_inside_is_not_replaced(self) -> None:
        view = alone().phase("denoise")
        with pytest.raises(ZeroDivisionError), view.forward({"row_reduce": 1}, "trunk"):
            _ = 1 / 0


class TestReduce:
    @pytest.mark.parametrize("value", [torch.ones(2), 3.0, None])
    def test_only_a_partial_is_reduced(self, value: object) -> None:
        with refused(r"^row_reduce got a \w+, not a partial product; a column-parallel or reduced tensor must not be summed again$"):
            alone().phase("decode").row_reduce(value)

    @pytest.mark.parametrize("phase", PHASES)
    def test_sum_over_the_group_in_logical_order(self, phase: str) -> None:
        def body(plan: ParallelPlan, comm: Communicator) -> torch.Tensor:
            # Values whose sum depends on the order: every rank must add in the same one.
            value = torch.tensor([1e8, 1.0, -1e8, 1.0][plan.rank]) * torch.ones(3)
            return comm.phase(phase).row_reduce(Partial(value, "site"))

        got = run_ranks(body, **HYBRID)
        if phase == "denoise":
            assert [t[0].item() for t in got] == [1e8, 1e8, -1e8, -1e8]
        else:
            assert all(torch.equal(t, got[0]) for t in got)
            assert got[0][0].item() == float(torch.tensor(1e8) + torch.tensor(-1e8) + 1.0 + 1.0)

    def test_summands_are_not_changed(self) -> None:
        def body(plan: ParallelPlan, comm: Communicator) -> torch.Tensor:
            value = torch.ones(3)
            comm.phase("decode").row_reduce(Partial(value, "site"))
            return value

        assert all(torch.equal(value, torch.ones(3)) for value in run_ranks(body, **HYBRID))


@pytest.mark.parametrize("plan", [HYBRID, CFG, EIGHT, dict(name="tp", world_size=4), dict(name="hybrid", world_size=8, storage_tp=4)])
class TestExchanges:
    """Every rank of several plans at once: what each rank must receive is written down from the design's table."""

    def test_vocabulary_rows_come_in_order(self, plan: dict) -> None:
        def body(own: ParallelPlan, comm: Communicator) -> torch.Tensor:
            view = comm.phase("decode")
            mine = torch.arange(6 * own.world_size).reshape(own.world_size, 2, 3)[own.logical_tp_rank]
            return view.vocab_gather(mine, "lm_head", order=view.topology.tp_ranks)

        got = run_ranks(body, **plan)
        world = len(got)
        wanted = torch.arange(6 * world).reshape(world, 2, 3).permute(1, 0, 2).reshape(2, -1)
        assert all(torch.equal(t, wanted) for t in got)

    def test_all_to_all_and_back(self, plan: dict) -> None:
        def body(own: ParallelPlan, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
            view = comm.phase("denoise")
            sp, place = view.topology.sp_size, view.topology.sp_rank
            # Element (row, head): 100 * row + head.
            whole = (100 * torch.arange(2 * sp).unsqueeze(1) + torch.arange(4 * sp)).unsqueeze(-1)
            rows = whole[2 * place : 2 * place + 2]
            heads = view.seq_to_heads(rows, "qkv")
            return heads, view.heads_to_seq(heads, "out"), whole, place

        for heads, back, whole, place in run_ranks(body, **plan):
            sp = whole.shape[0] // 2
            assert torch.equal(heads, whole[:, 4 * place : 4 * place + 4])
            assert torch.equal(back, whole[2 * place : 2 * place + 2])
            assert sp == whole.shape[1] // 4

    def test_sequence_comes_in_order(self, plan: dict) -> None:
        def body(own: ParallelPlan, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
            view = comm.phase("denoise")
            mine = torch.full((1, 2), float(view.topology.sp_rank))
            order = view.topology.sp_ranks
            return view.seq_gather(mine, "final", order=order), view.kv_gather(mine, "kv", order=order), len(order)

        for hidden, kv, sp in run_ranks(body, **plan):
            assert torch.equal(hidden, torch.arange(float(sp)).unsqueeze(1).expand(sp, 2))
            assert torch.equal(kv, hidden)

    def test_conditional_branch_comes_first(self, plan: dict) -> None:
        def body(own: ParallelPlan, comm: Communicator) -> list[float]:
            view = comm.phase("denoise")
            return view.cfg_gather(torch.tensor([float(view.topology.cfg_rank)]), "cfg", order=view.topology.cfg_ranks).tolist()

        size = 2 if "cfg" in plan.get("denoise", "") else 1
        assert run_ranks(body, **plan) == [[0.0, 1.0][:size]] * plan["world_size"]

    def test_replica_partners_give_their_micro_shards(self, plan: dict) -> None:
        def body(own: ParallelPlan, comm: Communicator) -> tuple[list[tuple[float, ...]], int, int]:
            parts = comm.phase("denoise").replica_kv_gather(torch.tensor([float(own.shard), float(own.micro)]), "prefix")
            return [tuple(part.tolist()) for part in parts], own.shard, own.micro_count

        for parts, shard, micros in run_ranks(body, **plan):
            assert parts == [(shard, m) for m in range(micros)]

    def test_ranks_of_other_groups_keep_equal_ledgers(self, plan: dict) -> None:
        def body(own: ParallelPlan, comm: Communicator) -> tuple[int, int]:
            for phase in PHASES:
                view = comm.phase(phase)
                for role, call in every_call(view).items():
                    if role in PHASE_ROLES[phase]:
                        call()
            return comm.ledger.digest()

        assert len(set(run_ranks(body, **plan))) == 1


def test_phase_gives_the_same_object_each_time() -> None:
    comm = member()
    views = {phase: comm.phase(phase) for phase in PHASES}
    assert all(comm.phase(phase) is views[phase] for phase in PHASES)
    assert len({id(view) for view in views.values()}) == 3
    with pytest.raises(KeyError):
        comm.phase("train")


def test_world_of_one_needs_no_groups() -> None:
    comm = alone()
    assert comm.control_gather([1, 2]) == [[1, 2]]
    assert torch.equal(comm.broadcast(torch.ones(2), "site"), torch.ones(2))
    assert not torch.distributed.is_initialized()
