"""One rule per checkpoint key: how HunyuanImage-3.0 is split over ranks (spec section 8), in either expert layout.

Shapes come from :mod:`.keys`; this module adds where each key goes. The trunk is split, the router and every module around the trunk is
replicated. Resident names of split tensors are made up here; replicated module tensors keep their checkpoint key.

Legend: S storage_tp, M micro_count, N = S * M, E experts, I expert width in the checkpoint, H hidden.
"""

from __future__ import annotations

import re

from ...kernels.moe import MoeLayout
from ...parallel.plan import ParallelPlan
from ...parallel.slicing import Piece, ShardingTable
from .config import HunyuanImage3Config
from .keys import Shape, checkpoint_shapes

# Target kinds; the engine gives each its dtype.
TRUNK, ROUTER, AROUND, VAE = "trunk", "router", "around", "vae"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_and_up_proj|down_proj)")
_AROUND = (
    "timestep_emb.",
    "time_embed.",
    "time_embed_2.",
    "guidance_emb.",
    "timestep_r_emb.",
    "patch_embed.",
    "final_layer.",
    "vision_model.",
    "vision_aligner.",
)
UNUSED_PREFIX = "vision_model.head."


def sizes_that_split(config: HunyuanImage3Config) -> dict[str, int]:
    """Every size that must divide by the number of ranks, with the name a message uses."""
    sizes = {"num_key_value_heads": config.num_key_value_heads, "vocab_size": config.vocab_size}
    for layer in range(config.num_hidden_layers):
        sizes[f"moe_intermediate_size of layer {layer}"] = config.moe_intermediate_size[layer]
        sizes[f"shared expert width of layer {layer}"] = config.shared_intermediate_size[layer]
    return sizes


def sharding_table(config: HunyuanImage3Config, plan: ParallelPlan, layout: MoeLayout) -> ShardingTable:
    """The table of ``plan.rank``.

    Raises:
        PlanError: a size does not divide; names it and the world sizes that would fit.
        ShardingError: a key of :func:`.keys.checkpoint_shapes` has no rule here.
    """
    plan.check_divides(sizes_that_split(config))
    table = ShardingTable(plan)
    for layer in range(config.num_hidden_layers):
        _declare_experts(table, config, layer, layout)
    for key, shape in checkpoint_shapes(config).items():
        _rule(table, key, shape, layout)
    return table


def _rule(table: ShardingTable, key: str, shape: Shape, layout: MoeLayout) -> None:
    match = _LAYER.fullmatch(key)
    if match:
        _layer_rule(table, key, shape, int(match[1]), match[2], layout)
    elif key == "model.wte.weight":
        table.column_parallel(key, shape, TRUNK, target="wte", role="vocab_parallel")
    elif key == "lm_head.weight":
        table.column_parallel(key, shape, TRUNK, target="lm_head", role="vocab_parallel")
    elif key == "model.ln_f.weight":
        table.replicated(key, shape, TRUNK, target="ln_f")
    elif key.startswith(UNUSED_PREFIX):
        table.unused(key, shape)
    elif key.startswith("vae."):
        table.replicated(key, shape, VAE)
    elif key.startswith(_AROUND):
        table.replicated(key, shape, AROUND)
    else:
        raise AssertionError(f"{key} has no sharding rule")


def _layer_rule(table: ShardingTable, key: str, shape: Shape, layer: int, name: str, layout: MoeLayout) -> None:
    at = f"layers.{layer}"
    expert = _EXPERT.fullmatch(name)
    if expert:
        _expert_rule(table, key, shape, layer, int(expert[1]), expert[2], layout)
    elif name == "self_attn.qkv_proj":
        # Rows are grouped per KV head, so a contiguous range of rows is a range of whole KV groups (spec 3.2).
        table.column_parallel(key, shape, TRUNK, target=f"{at}.qkv_proj")
    elif name == "self_attn.o_proj":
        table.row_parallel(key, shape, TRUNK, target=f"{at}.o_proj")
    elif name == "mlp.shared_mlp.gate_and_up_proj":
        table.gated_column_parallel(key, shape, TRUNK, target=f"{at}.shared_gate_and_up")
    elif name == "mlp.shared_mlp.down_proj":
        table.row_parallel(key, shape, TRUNK, target=f"{at}.shared_down")
    elif name == "mlp.gate.wg":
        table.replicated(key, shape, ROUTER, target=f"{at}.router")
    else:
        norms = {
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_attention_layernorm",
            "self_attn.query_layernorm": "query_layernorm",
            "self_attn.key_layernorm": "key_layernorm",
        }
        table.replicated(key, shape, TRUNK, target=f"{at}.{norms[name]}")


def _declare_experts(table: ShardingTable, config: HunyuanImage3Config, layer: int, layout: MoeLayout) -> None:
    """``micro_major``: w1 [M, E, 2I/N, H], w2 [M, E, H, I/N]. ``expert_major``: w1 [E, M·2I/N, H], w2 [E, H, M·I/N]."""
    micros, experts = table.plan.micro_count, config.num_experts[layer]
    width, hidden = config.moe_intermediate_size[layer] // table.plan.ar_tp, config.hidden_size
    if layout == "micro_major":
        shapes = (micros, experts, 2 * width, hidden), (micros, experts, hidden, width)
    else:
        shapes = (experts, micros * 2 * width, hidden), (experts, hidden, micros * width)
    table.target(f"layers.{layer}.experts_w1", shapes[0], TRUNK, "column_parallel")
    table.target(f"layers.{layer}.experts_w2", shapes[1], TRUNK, "row_parallel")


def _expert_rule(
    table: ShardingTable, key: str, shape: Shape, layer: int, expert: int, name: str, layout: MoeLayout
) -> None:
    plan = table.plan
    rows, columns = shape
    micro_major = layout == "micro_major"
    if name == "gate_and_up_proj":
        width = rows // 2 // plan.ar_tp
        every = slice(0, columns)
        places = []
        for micro in range(plan.micro_count):
            if micro_major:
                head, base = (micro, expert), 0
            else:
                head, base = (expert,), 2 * micro * width
            up, gate = slice(base, base + width), slice(base + width, base + 2 * width)
            places.append(((*head, up, every), (*head, gate, every)))
        table.gated_pieces(key, shape, f"layers.{layer}.experts_w1", places)
        return
    width = columns // plan.ar_tp
    every = slice(0, rows)
    pieces = []
    for micro in range(plan.micro_count):
        start = (plan.shard * plan.micro_count + micro) * width
        if micro_major:
            index = (micro, expert, every, slice(0, width))
        else:
            index = (expert, every, slice(micro * width, (micro + 1) * width))
        pieces.append(Piece((every, slice(start, start + width)), f"layers.{layer}.experts_w2", index))
    table.entry(key, shape, pieces)
