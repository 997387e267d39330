"""The decoder trunk: 32 layers of grouped-query attention and mixture of experts (spec section 3), on one rank of any plan.

The phase arrives as a :class:`~...parallel.collectives.PhaseView` and as the weights of that phase; no module knows a rank.

Letters: T tokens of one slot's block on all ranks of its sequence-parallel group (padded), n slots (rows computed together), H hidden,
G KV heads of this rank in this phase, g query heads per KV head, d head dim, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...kernels.attention import AttentionRun, attend_eager, clip_runs
from ...kernels.moe import ExpertBlock, MoePath, gated_unit_eager, moe_eager
from ...kernels.rms_norm import rms_norm_eager
from ...kernels.rope_norm import rope_norm_eager
from ...kernels.router import route_eager, router_logits_eager
from ...parallel.collectives import Partial, PhaseView
from ...parallel.ledger import Role
from ...parallel.plan import AttentionKind
from ...parallel.resident import Weight, project
from .kv_cache import KVCache


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights as one phase uses them: the whole shard or a micro view of it."""

    site: str
    input_layernorm: torch.Tensor
    qkv_proj: Weight
    query_layernorm: torch.Tensor
    key_layernorm: torch.Tensor
    o_proj: Weight
    post_attention_layernorm: torch.Tensor
    router: torch.Tensor
    topk: int
    shared_gate_and_up: Weight
    shared_down: Weight
    shared_micros: int
    experts: tuple[ExpertBlock, ...]
    moe_path: MoePath


@dataclass(frozen=True)
class TrunkWeights:
    """All layers plus embedding and head as one phase uses them. ``vocab_start``: first vocabulary row of this rank."""

    wte: Weight
    lm_head: Weight
    vocab_start: int
    ln_f: torch.Tensor
    layers: tuple[LayerWeights, ...]
    head_dim: int
    query_group: int
    """Query heads per KV head (g)."""
    eps: float


@dataclass(frozen=True)
class Slot:
    """One row's block in a forward pass: ``length`` tokens at absolute positions ``start …`` whose K/V go to ``cache``.

    ``cos, sin [length, d]`` fp32; ``runs`` count query rows from the block's first token.
    """

    cache: KVCache
    start: int
    length: int
    runs: tuple[AttentionRun, ...]
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """Slots computed together. All have ``padded`` tokens once padding is counted, a multiple of the sequence-parallel size."""

    slots: tuple[Slot, ...]
    padded: int


def padded_length(length: int, sp_size: int) -> int:
    return -(-length // sp_size) * sp_size


def local_rows(view: PhaseView, padded: int) -> tuple[int, int]:
    """First and last (exclusive) block row of this rank."""
    share = padded // view.topology.sp_size
    return view.topology.sp_rank * share, (view.topology.sp_rank + 1) * share


def expected_collectives(layers: int, view: PhaseView, attention: AttentionKind) -> dict[Role, int]:
    """Collectives that :func:`forward_layers` makes, by role."""
    counts: dict[Role, int] = {"row_reduce": 2 * layers}
    if view.topology.sp_size > 1:
        if attention == "ulysses":
            counts |= {"seq_to_heads": layers, "heads_to_seq": layers}
        else:
            counts |= {"kv_gather": layers}
    return counts


def embed(ids: torch.Tensor, weights: TrunkWeights, view: PhaseView) -> torch.Tensor:
    """``ids [T]`` int64 -> ``[T, H]``: each rank looks up its vocabulary rows, the rest is zero, the sum is complete."""
    table = weights.wte.tensor
    local = ids - weights.vocab_start
    mine = (local >= 0) & (local < table.shape[0])
    found = table[local.clamp(0, table.shape[0] - 1)] * mine.unsqueeze(-1)
    return view.row_reduce(Partial(found, weights.wte.site))


def logits(hidden: torch.Tensor, weights: TrunkWeights, view: PhaseView) -> torch.Tensor:
    """``hidden [T, H]`` -> fp32 ``[T, vocab]``. ``ln_f`` belongs to the text path alone (spec 3.7)."""
    local = project(rms_norm_eager(hidden, weights.ln_f, weights.eps), weights.lm_head)
    return view.vocab_gather(local, weights.lm_head.site, order=view.topology.tp_ranks).float()


def forward_layers(
    hidden: torch.Tensor,
    weights: TrunkWeights,
    batch: ForwardBatch,
    view: PhaseView,
    attention: AttentionKind,
    probe: Mapping[str, list] | None = None,
) -> torch.Tensor:
    """``hidden [n·T/sp, H]`` (slot by slot) through all layers; K/V of every slot are written to its cache.

    ``probe`` collects per-layer ``hidden``, ``router_logits``, ``router_ids`` and ``router_weights`` for comparisons.
    """
    with view.forward(expected_collectives(len(weights.layers), view, attention), "trunk"):
        for index, layer in enumerate(weights.layers):
            normed = rms_norm_eager(hidden, layer.input_layernorm, weights.eps)
            attended = _attention(normed, layer, index, weights, batch, view, attention)
            hidden = hidden + view.row_reduce(project(attended, layer.o_proj))
            normed = rms_norm_eager(hidden, layer.post_attention_layernorm, weights.eps)
            hidden = hidden + view.row_reduce(_moe(normed, layer, probe))
            if probe is not None:
                probe["hidden"].append(hidden)
    return hidden


def _attention(
    x: torch.Tensor,
    layer: LayerWeights,
    index: int,
    weights: TrunkWeights,
    batch: ForwardBatch,
    view: PhaseView,
    attention: AttentionKind,
) -> torch.Tensor:
    """``[n·T/sp, H]`` -> ``[n·T/sp, G·g·d]``."""
    d, g = weights.head_dim, weights.query_group
    slots = len(batch.slots)
    qkv = project(x, layer.qkv_proj).unflatten(0, (slots, -1)).unflatten(-1, (-1, g + 2, d))  # [n, T/sp, G, g+2, d]
    if view.topology.sp_size > 1 and attention == "ulysses":
        whole = view.seq_to_heads(qkv.permute(1, 2, 0, 3, 4), f"{layer.site}.attn.qkv")  # [T, G/sp, n, g+2, d]
        out = whole.new_zeros(whole.shape[0], whole.shape[1], slots, g, d)
        for number, slot in enumerate(batch.slots):
            rows = whole[: slot.length, :, number]
            q, k, v = _rotate(rows, layer, slot.cos, slot.sin, g, weights.eps)
            slot.cache.write(index, slot.start, k, v)
            out[: slot.length, :, number] = _attend(q, slot, index, slot.runs).unflatten(1, (-1, g))
        return view.heads_to_seq(out, f"{layer.site}.attn.out").permute(2, 0, 1, 3, 4).flatten(0, 1).flatten(1)
    if view.topology.sp_size > 1:
        return _attention_kv_gather(qkv, layer, index, weights, batch, view)
    out = []
    for number, slot in enumerate(batch.slots):
        q, k, v = _rotate(qkv[number], layer, slot.cos, slot.sin, g, weights.eps)
        slot.cache.write(index, slot.start, k, v)
        out.append(_attend(q, slot, index, slot.runs).flatten(1))
    return torch.cat(out)


def _attention_kv_gather(
    qkv: torch.Tensor, layer: LayerWeights, index: int, weights: TrunkWeights, batch: ForwardBatch, view: PhaseView
) -> torch.Tensor:
    """Queries stay with their rank; keys and values of the block are gathered over the sequence-parallel group."""
    d, g = weights.head_dim, weights.query_group
    first, last = local_rows(view, batch.padded)
    queries = []
    pairs = qkv.new_zeros(last - first, len(batch.slots), 2, qkv.shape[2], d)  # [T/sp, n, 2, G, d]
    for number, slot in enumerate(batch.slots):
        count = max(0, min(last, slot.length) - first)  # rows of this rank that are not padding
        cos, sin = slot.cos[first : first + count], slot.sin[first : first + count]
        q, k, v = _rotate(qkv[number, :count], layer, cos, sin, g, weights.eps)
        pairs[:count, number, 0], pairs[:count, number, 1] = k, v
        queries.append(q)
    gathered = view.kv_gather(pairs, f"{layer.site}.attn.kv", order=view.topology.sp_ranks)
    out = []
    for number, (slot, q) in enumerate(zip(batch.slots, queries, strict=True)):
        slot.cache.write(index, slot.start, gathered[: slot.length, number, 0], gathered[: slot.length, number, 1])
        rows = q.new_zeros(last - first, q.shape[1] * d)
        rows[: q.shape[0]] = _attend(q, slot, index, clip_runs(slot.runs, first, last)).flatten(1)
        out.append(rows)
    return torch.cat(out)


def _rotate(
    qkv: torch.Tensor, layer: LayerWeights, cos: torch.Tensor, sin: torch.Tensor, g: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[T, G, g+2, d]`` (g queries, key, value per KV group, spec 3.2) -> ``q [T, G·g, d]``, ``k, v [T, G, d]``."""
    q = rope_norm_eager(qkv[:, :, :g].flatten(1, 2), cos, sin, layer.query_layernorm, eps)
    k = rope_norm_eager(qkv[:, :, g], cos, sin, layer.key_layernorm, eps)
    return q, k, qkv[:, :, g + 1]


def _attend(q: torch.Tensor, slot: Slot, layer: int, runs: tuple[AttentionRun, ...]) -> torch.Tensor:
    return attend_eager(q, slot.cache.k[layer], slot.cache.v[layer], runs)


def _moe(x: torch.Tensor, layer: LayerWeights, probe: Mapping[str, list] | None) -> Partial:
    """Shared and routed experts; both are summands of one later reduction, so the shared expert is split as well."""
    router_logits = router_logits_eager(x, layer.router)
    topk_weights, ids = route_eager(router_logits, layer.topk)
    if probe is not None:
        probe["router_logits"].append(router_logits)
        probe["router_ids"].append(ids)
        probe["router_weights"].append(topk_weights)
    hidden = gated_unit_eager(project(x, layer.shared_gate_and_up), layer.shared_micros)
    routed = moe_eager(x, layer.experts, topk_weights, ids, path=layer.moe_path)
    return project(hidden, layer.shared_down) + Partial(routed, f"{layer.site}.mlp.experts")
