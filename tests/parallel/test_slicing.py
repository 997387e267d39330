"""The rules of the sharding table, one at a time, on matrices small enough to read."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.parallel.plan import ParallelPlan, PlanError, make_plan
from phase_parallel.parallel.slicing import Piece, ShardingError, ShardingTable, piece_elements

PLANS = {
    "single": dict(name="single", world_size=1),
    "tp": dict(name="tp", world_size=4),
    "hybrid": dict(name="hybrid", world_size=4),
    "hybrid8": dict(name="hybrid", world_size=8, storage_tp=2),
}


def all_ranks(name: str) -> list[ParallelPlan]:
    first = make_plan(**PLANS[name])
    return [first.on_rank(rank) for rank in range(first.world_size)]


def load(table: ShardingTable, key: str, source: torch.Tensor) -> torch.Tensor:
    (name,) = table.targets
    resident = torch.full(table.targets[name].shape, -1, dtype=source.dtype)
    for piece in table.entries[key].pieces:
        assert piece.target == name
        assert resident[piece.index].numel() == piece_elements(piece)
        resident[piece.index] = source[piece.source]
    return resident


@pytest.mark.parametrize("name", PLANS)
def test_column_parallel_takes_consecutive_rows(name: str) -> None:
    source = torch.arange(16 * 3).reshape(16, 3)
    for plan in all_ranks(name):
        table = ShardingTable(plan)
        table.column_parallel("w", (16, 3), "trunk", target="t")
        local = load(table, "w", source)
        assert torch.equal(local, source.chunk(plan.storage_tp)[plan.shard])
        # The micro view is the part that the rank owns when all ranks are one group.
        assert torch.equal(local.chunk(plan.micro_count)[plan.micro], source.chunk(plan.world_size)[plan.logical_tp_rank])


@pytest.mark.parametrize("name", PLANS)
def test_row_parallel_takes_consecutive_columns(name: str) -> None:
    source = torch.arange(3 * 16).reshape(3, 16)
    for plan in all_ranks(name):
        table = ShardingTable(plan)
        table.row_parallel("w", (3, 16), "trunk", target="t")
        local = load(table, "w", source)
        assert torch.equal(local, source.chunk(plan.storage_tp, dim=1)[plan.shard])
        mine = local.chunk(plan.micro_count, dim=1)[plan.micro]
        assert torch.equal(mine, source.chunk(plan.world_size, dim=1)[plan.logical_tp_rank])


@pytest.mark.parametrize("name", PLANS)
def test_gated_rows_lie_as_up_and_gate_of_each_micro_shard(name: str) -> None:
    up, gate = torch.arange(0, 8), torch.arange(100, 108)
    source = torch.cat([up, gate]).unsqueeze(1)
    for plan in all_ranks(name):
        table = ShardingTable(plan)
        table.gated_column_parallel("w", (16, 1), "trunk", target="t")
        blocks = load(table, "w", source).squeeze(1).chunk(plan.micro_count)
        for micro, block in enumerate(blocks):
            unit = plan.shard * plan.micro_count + micro
            wanted = torch.cat([up.chunk(plan.world_size)[unit], gate.chunk(plan.world_size)[unit]])
            assert torch.equal(block, wanted)


def test_replicated_and_unused_keys() -> None:
    for plan in all_ranks("hybrid"):
        table = ShardingTable(plan)
        table.replicated("norm", (4,), "trunk")
        table.unused("head", (7, 7))
        source = torch.arange(4)
        assert torch.equal(load(table, "norm", source), source)
        assert table.targets["norm"].role == "replicated"
        assert table.entries["head"].pieces == ()
        table.check_keys(["norm", "head"])


def test_every_key_and_every_target_is_declared_once() -> None:
    table = ShardingTable(make_plan("single", world_size=1))
    table.replicated("a", (4,), "trunk")
    with pytest.raises(ShardingError, match="checkpoint key a has two rules in the sharding table; each key needs exactly one"):
        table.replicated("a", (4,), "trunk", target="other")
    with pytest.raises(ShardingError, match="resident tensor a is declared twice in the sharding table"):
        table.replicated("b", (4,), "trunk", target="a")


def test_size_that_does_not_divide_names_the_key() -> None:
    table = ShardingTable(make_plan("tp", world_size=4))
    with pytest.raises(PlanError, match=r"^w: 6 rows do not divide by 4; choose a plan with fewer ranks$"):
        table.column_parallel("w", (6, 4), "trunk", target="t1")
    with pytest.raises(PlanError, match=r"^w: 6 columns do not divide by 4"):
        table.row_parallel("w", (4, 6), "trunk", target="t2")
    with pytest.raises(PlanError, match=r"^w: 2 rows of one half do not divide by 4"):
        table.gated_column_parallel("w", (4, 6), "trunk", target="t3")


def test_keys_of_the_checkpoint_and_of_the_table_must_be_the_same() -> None:
    table = ShardingTable(make_plan("single", world_size=1))
    for key in ("a", "b", "c", "d", "e"):
        table.replicated(key, (4,), "trunk")
    table.check_keys("abcde")
    with pytest.raises(ShardingError, match=r"lacks 4 keys that this model needs, first b, c, d; download"):
        table.check_keys("a")
    with pytest.raises(ShardingError, match=r"has 1 keys that this model does not know, first x; is it another model or release\?"):
        table.check_keys("abcdex")


@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 2, 1), ()])
def test_wrong_shape_names_both(shape: tuple[int, ...]) -> None:
    table = ShardingTable(make_plan("single", world_size=1))
    table.replicated("a", (3, 2), "trunk")
    table.check_shape("a", [3, 2])
    with pytest.raises(
        ShardingError, match=r"^a has shape \[.*\] but config.json asks for \[3, 2\]; config and weights do not belong together$"
    ):
        table.check_shape("a", shape)


def test_bytes_count_each_kind_with_its_own_size() -> None:
    table = ShardingTable(make_plan("tp", world_size=2))
    table.column_parallel("w", (8, 4), "trunk", target="t")
    table.replicated("r", (3, 4), "router")
    assert table.bytes_resident({"trunk": 2, "router": 4}) == 8 * 4 // 2 * 2 + 3 * 4 * 4


def test_elements_of_a_piece() -> None:
    assert piece_elements(Piece((slice(2, 5), slice(0, 4)), "t", (0, slice(0, 3)))) == 12
