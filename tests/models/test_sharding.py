"""The sharding table against the key list, on paper for the release's sizes and numerically for small ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from specs import ALL_PLANS, EIGHT_WAYS, RELEASE

from phase_parallel.kernels.moe import MOE_LAYOUTS, MoeLayout
from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.keys import checkpoint_shapes
from phase_parallel.models.hunyuan_image_3.sharding import AROUND, ROUTER, TRUNK, UNUSED_PREFIX, VAE, sharding_table
from phase_parallel.models.hunyuan_image_3.synthetic import write_settings
from phase_parallel.parallel.plan import ParallelPlan, PlanError, make_plan
from phase_parallel.parallel.slicing import ShardingError, ShardingTable

# What is resident depends on the number of ranks and shards alone.
STORAGE = ["single", "tp2", "tp4", "tp8", "hybrid4-ulysses", "hybrid8-s2-ulysses", "hybrid8-s4-ulysses"]
ITEM = {TRUNK: 2, AROUND: 2, ROUTER: 4, VAE: 4}


def ranks_of(plan: dict) -> list[ParallelPlan]:
    first = make_plan(**plan)
    return [first.on_rank(rank) for rank in range(first.world_size)]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> HunyuanImage3Config:
    return write_settings(tmp_path_factory.mktemp("release") / "folder", RELEASE)[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> HunyuanImage3Config:
    return write_settings(tmp_path_factory.mktemp("small") / "folder", EIGHT_WAYS)[0]


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize("plan", ["single", "tp4", "hybrid4-ulysses", "hybrid8-s2-cfg_sp", "hybrid8-s4-cfg"])
@pytest.mark.parametrize(("kind", "tensors"), [("base", 5161), ("distil", 5169)])
def test_release_has_one_rule_per_key(tmp_path: Path, plan: str, layout: MoeLayout, kind: str, tensors: int) -> None:
    config, _ = write_settings(tmp_path / "release", replace(RELEASE, kind=kind))
    shapes = checkpoint_shapes(config)
    table = sharding_table(config, ranks_of(ALL_PLANS[plan])[-1], layout)
    assert len(table.entries) == tensors
    assert {key: entry.shape for key, entry in table.entries.items()} == shapes
    assert all(bool(e.pieces) != key.startswith(UNUSED_PREFIX) for key, e in table.entries.items())
    table.check_keys(shapes)


# Spec 2.6. The pooling head of the vision tower is never read.
SPLIT = 77_309_411_328 + 1_207_959_552 + 805_306_368 + 536_870_912 + 2 * 545_259_520
POOLING_HEAD = 1152 + (3456 * 1152 + 3456) + (1152 * 1152 + 1152) + 2 * 1152 + 2 * 4304 * 1152 + 4304 + 1152
REPLICATED = 274_432 + 226_819_072 + 60_081_184 + 3 * 17_833_984 + 427_888_064 - POOLING_HEAD + 21_504_000
FP32 = 8_388_608 + 389_342_464 + 871_332_483


@pytest.mark.parametrize(("plan", "shards"), [("single", 1), ("tp4", 4), ("hybrid4-ulysses", 2), ("hybrid8-s4-ulysses", 4)])
def test_release_bytes_per_rank(release: HunyuanImage3Config, plan: str, shards: int) -> None:
    """What the plans cost in bf16: all ranks alike, and both layouts alike. 87.6 GB in two shards, 47.1 GB in four."""
    sizes = {
        sharding_table(release, own, layout).bytes_resident(ITEM)
        for own, layout in zip((make_plan(**ALL_PLANS[plan]), ranks_of(ALL_PLANS[plan])[-1]), MOE_LAYOUTS, strict=True)
    }
    assert sizes == {2 * SPLIT // shards + 2 * REPLICATED + 4 * FP32}


def numbered(config: HunyuanImage3Config) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint whose every element has a number of its own. Without the VAE, most of a small checkpoint and replicated."""
    start = 1
    for key, shape in checkpoint_shapes(config).items():
        if not key.startswith("vae."):
            yield key, torch.arange(start, start + prod(shape), dtype=torch.int32).reshape(shape)
            start += prod(shape)


def fill(table: ShardingTable, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the loader does, in five lines; every element is written exactly once."""
    resident = {name: torch.zeros(t.shape, dtype=torch.int32) for name, t in table.targets.items() if t.kind != VAE}
    for key in checkpoint:
        for piece in table.entries[key].pieces:
            place = resident[piece.target][piece.index]
            assert not place.any(), f"{key} overwrites a part of {piece.target}"
            place.copy_(checkpoint[key][piece.source])
    return resident


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize("plan", STORAGE)
def test_ranks_together_hold_every_element_once_per_replica(small: HunyuanImage3Config, plan: str, layout: MoeLayout) -> None:
    checkpoint = dict(numbered(small))
    seen: dict[int, list[torch.Tensor]] = {}
    for own in ranks_of(ALL_PLANS[plan]):
        table = sharding_table(small, own, layout)
        resident = fill(table, checkpoint)
        for name, tensor in resident.items():
            assert bool((tensor > 0).all()), f"{name} has holes"
            # A replicated tensor counts on the first shard of each replica; that the others hold the same bits is compared at load.
            if table.targets[name].role != "replicated" or own.shard == 0:
                seen.setdefault(own.replica, []).append(tensor.reshape(-1))
    used = [tensor for key, tensor in checkpoint.items() if not key.startswith(UNUSED_PREFIX)]
    wanted = torch.bincount(torch.cat([tensor.reshape(-1) for tensor in used]))
    for parts in seen.values():
        assert torch.equal(torch.bincount(torch.cat(parts)), wanted)


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize("plan", STORAGE[1:])
def test_what_each_rank_holds(small: HunyuanImage3Config, plan: str, layout: MoeLayout) -> None:
    """Written from the specification's section 8, not from the table: which rows and columns make one unit of 1/N."""
    checkpoint = dict(numbered(small))
    at = "model.layers.1."
    for own in ranks_of(ALL_PLANS[plan]):
        resident = fill(sharding_table(small, own, layout), checkpoint)
        world = own.world_size
        units = [own.shard * own.micro_count + m for m in range(own.micro_count)]

        def rows(key: str, unit: int, world: int = world) -> torch.Tensor:
            return checkpoint[key].chunk(world, dim=0)[unit]

        def columns(key: str, unit: int, world: int = world) -> torch.Tensor:
            return checkpoint[key].chunk(world, dim=1)[unit]

        def gated(key: str, unit: int, world: int = world) -> torch.Tensor:
            return torch.cat([half.chunk(world, dim=0)[unit] for half in checkpoint[key].chunk(2, dim=0)])

        for key, target in (("model.wte", "wte"), ("lm_head", "lm_head"), (f"{at}self_attn.qkv_proj", "layers.1.qkv_proj")):
            assert torch.equal(resident[target], torch.cat([rows(f"{key}.weight", unit) for unit in units]))
        for key, target in (("self_attn.o_proj", "o_proj"), ("mlp.shared_mlp.down_proj", "shared_down")):
            wanted = torch.cat([columns(f"{at}{key}.weight", unit) for unit in units], dim=1)
            assert torch.equal(resident[f"layers.1.{target}"], wanted)
        shared = [gated(f"{at}mlp.shared_mlp.gate_and_up_proj.weight", unit) for unit in units]
        assert torch.equal(resident["layers.1.shared_gate_and_up"], torch.cat(shared))
        w1 = resident["layers.1.experts_w1"]
        w2 = resident["layers.1.experts_w2"]
        for expert in range(small.num_experts[1]):
            first = [gated(f"{at}mlp.experts.{expert}.gate_and_up_proj.weight", unit) for unit in units]
            second = [columns(f"{at}mlp.experts.{expert}.down_proj.weight", unit) for unit in units]
            if layout == "micro_major":
                assert torch.equal(w1[:, expert], torch.stack(first))
                assert torch.equal(w2[:, expert], torch.stack(second))
            else:
                assert torch.equal(w1[expert], torch.cat(first))
                assert torch.equal(w2[expert], torch.cat(second, dim=1))


def test_unit_of_qkv_is_whole_kv_groups(small: HunyuanImage3Config) -> None:
    """The first query row and the last value row of a KV head lie on the same rank (spec 3.2)."""
    key = "model.layers.0.self_attn.qkv_proj.weight"
    group = (small.num_attention_heads // small.num_key_value_heads + 2) * small.head_dim
    for own in ranks_of(ALL_PLANS["tp8"]):
        (piece,) = sharding_table(small, own, "micro_major").entries[key].pieces
        assert (piece.source[0].start, piece.source[0].stop) == (own.rank * group, (own.rank + 1) * group)


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ({"kv_heads": 4, "heads": 8}, 8, "num_key_value_heads 4 cannot be split over tensor_parallel 8 .*; choose 1, 2 or 4 ranks"),
        ({"vocab": 193}, 2, "vocab_size 193 cannot be split over tensor_parallel 2 .*; choose 1 rank$"),
        ({"expert_width": 50}, 4, "moe_intermediate_size of layer 0 50 cannot be split over tensor_parallel 4 .*; choose 1 or 2 ranks"),
        ({"expert_width": 46, "shared_experts": 1}, 4, "moe_intermediate_size of layer 0 46 "),
    ],
)
def test_sizes_that_do_not_divide(tmp_path: Path, change: dict, ranks: int, message: str) -> None:
    config, _ = write_settings(tmp_path / "odd", replace(EIGHT_WAYS, **change))
    with pytest.raises(PlanError, match=message):
        sharding_table(config, make_plan("tp", world_size=ranks), "micro_major")


def test_unknown_and_missing_keys_are_named(small: HunyuanImage3Config) -> None:
    table = sharding_table(small, make_plan("tp", world_size=2), "micro_major")
    keys = set(checkpoint_shapes(small))
    with pytest.raises(ShardingError, match=r"has 2 keys that this model does not know, first lora_A.weight, lora_B.weight; "):
        table.check_keys(keys | {"lora_B.weight", "lora_A.weight"})
    with pytest.raises(ShardingError, match=r"lacks 1 keys that this model needs, first model.ln_f.weight; download the missing"):
        table.check_keys(keys - {"model.ln_f.weight"})
    with pytest.raises(ShardingError, match=r"lm_head.weight has shape \[96, 64\] but config.json asks for \[192, 64\]"):
        table.check_shape("lm_head.weight", (96, 64))


def test_key_list_is_what_the_golden_files_hold(golden_dir: Path) -> None:
    for folder in sorted((golden_dir / "checkpoints").iterdir()):
        config = HunyuanImage3Config.from_folder(folder)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        for plan in ("single", "tp4", "hybrid4-cfg"):
            sharding_table(config, make_plan(**ALL_PLANS[plan]), "expert_major").check_keys(index["weight_map"])
