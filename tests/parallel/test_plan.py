"""The plan's arithmetic for every rank of 1, 2, 4 and 8, without a process."""

from __future__ import annotations

from collections import Counter

import pytest

from phase_parallel.parallel.plan import PHASES, ParallelPlan, PlanError, make_plan
from phase_parallel.parallel.plan_choice import choose_plan, plan_on_machines, usual_plan

# name, ranks, storage_tp, denoise, attention
PLANS = [
    ("single", 1, None, "tp", "ulysses"),
    ("tp", 2, None, "tp", "ulysses"),
    ("tp", 4, None, "tp", "ulysses"),
    ("tp", 8, None, "tp", "ulysses"),
    ("hybrid", 4, 2, "sp", "ulysses"),
    ("hybrid", 4, 2, "sp", "kv_gather"),
    ("hybrid", 4, 2, "cfg", "ulysses"),
    ("hybrid", 8, 2, "sp", "ulysses"),
    ("hybrid", 8, 2, "sp", "kv_gather"),
    ("hybrid", 8, 2, "cfg_sp", "ulysses"),
    ("hybrid", 8, 2, "cfg_sp", "kv_gather"),
    ("hybrid", 8, 4, "sp", "ulysses"),
    ("hybrid", 8, 4, "sp", "kv_gather"),
    ("hybrid", 8, 4, "cfg", "ulysses"),
    ("hybrid", 4, 2, "tp", "ulysses"),
    ("hybrid", 8, 2, "tp", "ulysses"),
]
REPLICATED = [
    ("replicated", 2, 1, "sp", "ulysses"),
    ("replicated", 4, 2, "sp", "ulysses"),
    ("replicated", 4, 2, "sp", "kv_gather"),
    ("replicated", 4, 2, "cfg", "ulysses"),
    ("replicated", 8, 2, "cfg_sp", "ulysses"),
    ("replicated", 8, 4, "sp", "ulysses"),
]


def ranks_of(name: str, ranks: int, storage: int | None, denoise: str, attention: str) -> list[ParallelPlan]:
    first = make_plan(name, world_size=ranks, storage_tp=storage, denoise=denoise, attention=attention)
    return [first.on_rank(rank) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("name", "ranks", "storage", "shards", "replicas", "order"),
    [
        ("single", 1, None, [0], [0], (0,)),
        ("tp", 4, None, [0, 1, 2, 3], [0, 0, 0, 0], (0, 1, 2, 3)),
        ("hybrid", 4, 2, [0, 1, 0, 1], [0, 0, 1, 1], (0, 2, 1, 3)),
        ("hybrid", 8, 2, [0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3], (0, 2, 4, 6, 1, 3, 5, 7)),
        ("hybrid", 8, 4, [0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1], (0, 4, 1, 5, 2, 6, 3, 7)),
    ],
)
def test_shards_replicas_and_order(name, ranks, storage, shards, replicas, order) -> None:
    plans = ranks_of(name, ranks, storage, "sp" if name == "hybrid" else "tp", "ulysses")
    assert [plan.shard for plan in plans] == shards
    assert [plan.replica for plan in plans] == replicas
    assert [plan.micro for plan in plans] == replicas
    assert {plan.ar_order for plan in plans} == {order}
    assert [order[plan.logical_tp_rank] for plan in plans] == list(range(ranks))


def test_physical_to_logical_rank_of_four() -> None:
    assert [make_plan("hybrid", world_size=4, rank=rank).logical_tp_rank for rank in range(4)] == [0, 2, 1, 3]


@pytest.mark.parametrize("arguments", PLANS)
def test_every_part_has_exactly_one_owner_in_each_phase(arguments) -> None:
    """KV heads, vocabulary rows and expert columns alike: a unit is 1/N of a size, numbered as in the checkpoint."""
    plans = ranks_of(*arguments)
    world = len(plans)
    assert sorted(plan.logical_tp_rank for plan in plans) == list(range(world)), "prefill and decode: one owner per unit"
    resident = {plan.rank: {plan.shard * plan.micro_count + m for m in range(plan.micro_count)} for plan in plans}
    for plan in plans:
        assert plan.logical_tp_rank in resident[plan.rank], "a rank uses a part of what it holds"
    for replica in range(plans[0].replicas):
        owned = Counter(unit for plan in plans if plan.replica == replica for unit in resident[plan.rank])
        assert owned == dict.fromkeys(range(world), 1), "a replica holds every unit once"
    for plan in plans:
        # Attention of one row: the sequence-parallel group together with the tensor-parallel groups covers every head once.
        topology = plan.topology("denoise")
        members = {r for sp in topology.sp_ranks for r in plans[sp].topology("denoise").tp_ranks}
        heads = Counter(p.shard * p.micro_count + m for p in (plans[r] for r in members) for m in p.denoise_parts())
        copies = 1 if plan.attention == "ulysses" or plan.sp_size == 1 else plan.sp_size
        assert heads == dict.fromkeys(range(world), copies)


@pytest.mark.parametrize("arguments", REPLICATED)
def test_replicas_write_text_by_themselves_and_share_the_picture(arguments) -> None:
    plans = ranks_of(*arguments)
    world, storage, parts = len(plans), arguments[2], plans[0].head_parts
    everything = dict.fromkeys(range(storage * parts), 1)
    for plan in plans:
        ar, denoise = plan.topology("decode"), plan.topology("denoise")
        assert ar.tp_ranks == plan.shard_ranks == denoise.tp_ranks and ar.micro is None, "one replica, with whole shards"
        assert Counter(plans[r].shard * parts + p for r in ar.tp_ranks for p in plans[r].ar_parts()) == everything
        assert set(plan.denoise_parts()) <= set(plan.ar_parts()), "denoise fetches no heads from other replicas"
        assert denoise.tp_size * denoise.sp_size * denoise.cfg_size == world
        members = [plans[r] for sp in denoise.sp_ranks for r in plans[sp].topology("denoise").tp_ranks]
        copies = 1 if plan.attention == "ulysses" or plan.sp_size == 1 else plan.sp_size
        assert Counter(p.shard * parts + h for p in members for h in p.denoise_parts()) == dict.fromkeys(everything, copies)


@pytest.mark.parametrize("arguments", PLANS + REPLICATED)
def test_topologies_agree_between_ranks(arguments) -> None:
    plans = ranks_of(*arguments)
    for phase in PHASES:
        for plan in plans:
            mine = plan.topology(phase)
            assert mine.tp_ranks[mine.tp_rank] == mine.sp_ranks[mine.sp_rank] == mine.cfg_ranks[mine.cfg_rank] == plan.rank
            for name in ("tp_ranks", "sp_ranks", "cfg_ranks"):
                for other in getattr(mine, name):
                    assert getattr(plans[other].topology(phase), name) == getattr(mine, name)
            for ranks in (mine.tp_ranks, mine.sp_ranks, mine.cfg_ranks):
                assert len(ranks) == 1 or tuple(sorted(ranks)) in plan.groups()
        sizes = plans[0].topology(phase)
        expected = plans[0].ar_tp * (len(plans) // plans[0].ar_tp) if phase != "denoise" else sizes.tp_size * sizes.sp_size * sizes.cfg_size
        assert expected == len(plans), "no rank idles"
    assert len({plan.groups() for plan in plans}) == 1, "groups are created in the same order everywhere"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_autoregressive_topology(phase) -> None:
    plan = make_plan("hybrid", world_size=4, rank=1)
    topology = plan.topology(phase)
    assert (topology.tp_ranks, topology.tp_rank, topology.micro) == ((0, 2, 1, 3), 2, 0)
    assert (topology.sp_size, topology.cfg_size) == (1, 1)
    assert make_plan("tp", world_size=4, rank=1).topology(phase).micro is None


@pytest.mark.parametrize(
    ("arguments", "rank", "tp", "sp", "cfg", "micros"),
    [
        (("hybrid", 4, 2, "sp", "ulysses"), 3, (2, 3), (1, 3), (3,), (1,)),
        (("hybrid", 4, 2, "sp", "kv_gather"), 3, (2, 3), (1, 3), (3,), (0, 1)),
        (("hybrid", 4, 2, "cfg", "ulysses"), 2, (2, 3), (2,), (0, 2), (0, 1)),
        (("hybrid", 8, 2, "sp", "ulysses"), 5, (4, 5), (1, 3, 5, 7), (5,), (2,)),
        (("hybrid", 8, 2, "cfg_sp", "ulysses"), 5, (4, 5), (5, 7), (1, 5), (0, 1)),
        (("hybrid", 8, 2, "cfg_sp", "ulysses"), 2, (2, 3), (0, 2), (2, 6), (2, 3)),
        (("hybrid", 8, 4, "sp", "ulysses"), 6, (4, 5, 6, 7), (2, 6), (6,), (1,)),
        (("hybrid", 8, 4, "cfg", "ulysses"), 6, (4, 5, 6, 7), (6,), (2, 6), (0, 1)),
        (("tp", 4, None, "tp", "ulysses"), 2, (0, 1, 2, 3), (2,), (2,), (0,)),
        (("hybrid", 4, 2, "tp", "ulysses"), 1, (0, 2, 1, 3), (1,), (1,), (0,)),
    ],
)
def test_denoise_topology(arguments, rank, tp, sp, cfg, micros) -> None:
    plan = ranks_of(*arguments)[rank]
    topology = plan.topology("denoise")
    assert (topology.tp_ranks, topology.sp_ranks, topology.cfg_ranks) == (tp, sp, cfg)
    assert topology.micro == (micros[0] if plan.denoises_as_text else None)
    assert plan.denoise_parts() == micros


@pytest.mark.parametrize(
    ("name", "ranks", "storage", "kinds"),
    [
        ("single", 1, None, ("tp",)),
        ("tp", 4, None, ("tp",)),
        ("hybrid", 4, 2, ("tp", "sp", "cfg")),
        ("hybrid", 8, 2, ("tp", "sp", "cfg_sp")),
        ("replicated", 4, 2, ("sp", "cfg")),
        ("replicated", 3, 1, ("sp",)),
    ],
)
def test_another_topology_needs_no_other_weights_and_no_other_groups(name, ranks, storage, kinds) -> None:
    plan = make_plan(name, world_size=ranks, storage_tp=storage, rank=ranks - 1)
    assert plan.denoise_kinds == kinds
    for kind in kinds:
        other = plan.denoising(kind, "kv_gather")
        assert other == make_plan(name, world_size=ranks, storage_tp=storage, rank=ranks - 1, denoise=kind, attention="kv_gather")
        assert plan.has_weights_of(other) and other.groups() == plan.groups()
        assert (other.shard, other.micro, other.topology("decode")) == (plan.shard, plan.micro, plan.topology("decode"))
    assert not plan.has_weights_of(plan.on_rank(0)) or ranks == 1


def test_a_topology_that_the_plan_has_not_is_refused() -> None:
    with pytest.raises(PlanError, match="denoise tp uses one replica but plan replicated has 2"):
        make_plan("replicated", world_size=4).denoising("tp", "ulysses")


def test_groups_of_four_ranks() -> None:
    pairs = ((0, 1), (0, 1, 2, 3), (0, 2), (1, 3), (2, 3))
    assert make_plan("hybrid", world_size=4, denoise="sp").groups() == pairs
    assert make_plan("hybrid", world_size=4, denoise="cfg").groups() == pairs
    assert make_plan("tp", world_size=4).groups() == ((0, 1, 2, 3),)
    assert make_plan("single", world_size=1).groups() == ()
    assert make_plan("replicated", world_size=4).groups() == pairs, "all ranks share a picture in the VAE, though they share no text"


def test_defaults() -> None:
    assert make_plan("hybrid", world_size=4).storage_tp == 2
    assert make_plan("hybrid", world_size=8).storage_tp == 4
    assert make_plan("hybrid", world_size=4).denoise == "sp"
    assert make_plan("tp", world_size=4).denoise == "tp"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(name="single", world_size=4), "plan single uses 1 rank but 4 are running; choose plan tp or hybrid, or start one rank"),
        (dict(name="tp", world_size=1), "needs 2 or more ranks but 1 is running; start more with `phase-parallel up --ranks 4`"),
        (dict(name="hybrid", world_size=3), "needs an even number of ranks but 3 are running; choose 4 or 8 ranks, or plan tp"),
        (dict(name="hybrid", world_size=2), "needs 4 or more ranks but 2 are running; choose plan tp, or start 4 ranks"),
        (
            dict(name="hybrid", world_size=8, storage_tp=3),
            "AR tensor_parallel 8 / storage tensor_parallel 3 must equal the number of replicas, but 8 ranks do not split "
            "into whole replicas of 3 shards; storage_tp 2 or 4 would fit",
        ),
        (dict(name="hybrid", world_size=4, storage_tp=4), "leaves one replica, which is plan tp; choose plan tp or a smaller storage_tp"),
        (dict(name="hybrid", world_size=4, storage_tp=0), "storage_tp 2 would fit"),
        (dict(name="tp", world_size=4, storage_tp=2), "keeps the weights in 4 shards, not 2; use plan hybrid for replicas"),
        (
            dict(name="tp", world_size=4, denoise="sp"),
            "denoise sp needs 2 or more replicas but plan tp has 1; choose plan hybrid, or denoise tp",
        ),
        (dict(name="replicated", world_size=4, denoise="tp"), "denoise tp uses one replica but plan replicated has 2; choose denoise sp or cfg"),
        (dict(name="hybrid", world_size=8, storage_tp=2, denoise="cfg"), "over 2 replicas but there are 4; choose cfg_sp or sp"),
        (dict(name="hybrid", world_size=4, denoise="cfg_sp"), "needs 4, 6 … replicas but there are 2; choose cfg or sp"),
        (dict(name="fsdp", world_size=4), "unknown plan 'fsdp'; choose one of single, tp, hybrid, replicated"),
        (dict(name="hybrid", world_size=4, attention="ring"), "unknown attention 'ring'; choose one of ulysses, kv_gather"),
        (dict(name="hybrid", world_size=4, denoise="pp"), "unknown denoise 'pp'; choose one of tp, sp, cfg, cfg_sp"),
        (dict(name="tp", world_size=4, rank=4), "rank 4 of world size 4 is not a place in a launch"),
        (dict(name="tp", world_size=0), "rank 0 of world size 0 is not a place in a launch"),
    ],
)
def test_plan_that_cannot_exist_says_what_would_fit(arguments, message) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(**arguments)
    assert message in str(caught.value)


def test_sizes_that_do_not_divide_name_what_would() -> None:
    sizes = {"num_key_value_heads": 4, "vocab_size": 96}
    make_plan("tp", world_size=4).check_divides(sizes)
    make_plan("hybrid", world_size=4).check_divides(sizes)
    with pytest.raises(
        PlanError, match=r"^num_key_value_heads 4 cannot be split over tensor_parallel 8 \(plan hybrid\); choose 1, 2 or 4 ranks$"
    ):
        make_plan("hybrid", world_size=8, storage_tp=2).check_divides(sizes)
    with pytest.raises(PlanError, match=r"choose 1 rank$"):
        make_plan("tp", world_size=3).check_divides({"vocab_size": 25})


def test_sizes_of_replicas_divide_where_each_phase_needs_it() -> None:
    sizes = {"num_key_value_heads": 4, "vocab_size": 98}
    make_plan("replicated", world_size=4).check_divides(sizes)
    with pytest.raises(PlanError, match="num_key_value_heads 4 cannot be split over the heads of 8"):
        make_plan("replicated", world_size=8, storage_tp=2).check_divides(sizes)
    make_plan("replicated", world_size=8, storage_tp=2, attention="kv_gather").check_divides(sizes)


@pytest.mark.parametrize("name", ["tp", "hybrid"])
def test_tensor_parallelism_stays_inside_a_machine(name) -> None:
    with pytest.raises(
        PlanError,
        match=f"plan {name} adds up the layers of prefill over ranks 0, 1, 2, 3, which are on 2 machines; "
        "tensor parallelism stays inside a machine, choose plan replicated",
    ):
        plan_on_machines(name, world_size=4, machine_ranks=2)
    assert plan_on_machines(name, world_size=4, machine_ranks=4).name == name


def test_a_replica_is_a_machine() -> None:
    assert plan_on_machines("replicated", world_size=8, machine_ranks=2, denoise="cfg_sp").storage_tp == 2
    assert plan_on_machines("replicated", world_size=8, machine_ranks=8).storage_tp == 4
    assert plan_on_machines("replicated", world_size=3, machine_ranks=1).replicas == 3
    assert [usual_plan(n, m) for n, m in ((1, 1), (2, 2), (4, 4), (4, 2), (8, 8))] == ["single", "tp", "hybrid", "replicated", "hybrid"]


def test_unknown_phase_and_rank() -> None:
    plan = make_plan("tp", world_size=2)
    with pytest.raises(PlanError, match="unknown phase 'decode2'; phases are prefill, decode, denoise"):
        plan.topology("decode2")
    with pytest.raises(PlanError, match="rank 2 is not one of the 2 ranks of plan tp"):
        plan.on_rank(2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (PLANS[0], "single: one rank"),
        (PLANS[2], "tp: AR TP4 · denoise TP4"),
        (PLANS[4], "hybrid: AR TP4 · denoise TP2×SP2 (ulysses)"),
        (PLANS[6], "hybrid: AR TP4 · denoise TP2×CFG2"),
        (REPLICATED[0], "replicated: AR TP1 on each of 2 replicas · denoise TP1×SP2 (ulysses)"),
        (REPLICATED[3], "replicated: AR TP2 on each of 2 replicas · denoise TP2×CFG2"),
        (("hybrid", 4, 2, "tp", "ulysses"), "hybrid: AR TP4 · denoise TP4"),
        (PLANS[10], "hybrid: AR TP8 · denoise TP2×SP2 (kv_gather)×CFG2"),
    ],
)
def test_description(arguments, text) -> None:
    assert ranks_of(*arguments)[0].describe() == text


class TestChoosePlan:
    """The 80B model: 162 GB of split and 4.5 GB of replicated weights."""

    def choose(self, world_size: int, free_gb: float) -> tuple[str, str]:
        return choose_plan(
            world_size, free_bytes_per_rank=int(free_gb * 1e9), sharded_bytes=162_000_000_000, replicated_bytes=4_500_000_000
        )

    def test_one_rank(self) -> None:
        assert self.choose(1, 180) == ("single", "single: one rank is running")
        with pytest.raises(
            PlanError,
            match=r"plan single needs 166.5 GB of weights per rank but the fullest device has 139.0 GB free; free memory, or start",
        ):
            self.choose(1, 139)

    def test_two_replicas_when_they_fit(self) -> None:
        assert self.choose(4, 139) == ("hybrid", "hybrid: 85.5 GB of weights per rank fit in 139.0 GB free")
        assert self.choose(8, 80)[1] == "hybrid: 45.0 GB of weights per rank fit in 80.0 GB free"

    def test_one_replica_when_two_do_not_fit(self) -> None:
        assert self.choose(4, 79) == ("tp", "tp: two replicas need 85.5 GB per rank but 79.0 GB are free; 4 shards need 45.0 GB")

    def test_several_machines(self) -> None:
        sizes = {"sharded_bytes": 162_000_000_000, "replicated_bytes": 4_500_000_000, "machine_ranks": 2}
        assert choose_plan(4, free_bytes_per_rank=139 * 10**9, **sizes) == (
            "replicated", "replicated: tensor parallelism stays inside each of 2 machines"
        )
        with pytest.raises(PlanError, match=r"plan replicated needs 85\.5 GB of weights per rank but the fullest device has 80\.0 GB free"):
            choose_plan(4, free_bytes_per_rank=80 * 10**9, **sizes)

    def test_few_or_odd_ranks(self) -> None:
        assert self.choose(2, 139)[0] == "tp"
        assert self.choose(3, 139) == ("tp", "tp: 3 ranks are too few, or too odd, for two replicas")

    @pytest.mark.parametrize(("world_size", "free_gb"), [(4, 40), (2, 80), (8, 20)])
    def test_nothing_fits(self, world_size, free_gb) -> None:
        with pytest.raises(PlanError, match=r"plan tp needs \d+\.\d GB of weights per rank but the fullest device has \d+\.\d GB free"):
            self.choose(world_size, free_gb)
