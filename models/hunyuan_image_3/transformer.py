"""The decoder trunk: 32 layers of grouped-query attention and mixture of experts (spec section 3), on one rank of any plan.

The phase arrives as a :class:`~...parallel.collectives.PhaseView` and as the weights of that phase; no module knows a rank.

Letters: T tokens of one slot's block on all ranks of its sequence-parallel group (padded), n slots (rows computed together), H hidden,
G KV heads of this rank in this phase, g query heads per KV head, d head dim, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...kernels.attention_runs import AttentionRun, clip_runs
from ...kernels.kernel_set import EAGER, KernelSet
from ...kernels.moe import ExpertBlock, MoePath
from ...kernels.rms_norm import rms_norm_eager
from ...parallel.collectives import Partial, PhaseView
from ...parallel.ledger import Role
from ...parallel.plan import AttentionKind
from ...parallel.resident import Weight, project
from ..row_reduction import RowReduction
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
    kernels: KernelSet = EAGER


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
    reduce: RowReduction,
    probe: Mapping[str, list] | None = None,
) -> torch.Tensor:
    """``hidden [n·T/sp, H]`` (slot by slot) through all layers; K/V of every slot are written to its cache. ``reduce`` makes the sums of a layer.

    ``probe`` collects per-layer ``hidden``, ``router_logits``, ``router_ids`` and ``router_weights`` for comparisons.
    """
    with view.forward(expected_collectives(len(weights.layers), view, attention), "trunk"):
        kernels = weights.kernels
        normed = kernels.norm(hidden, weights.layers[0].input_layernorm, weights.eps)
        for index, layer in enumerate(weights.layers):
            attended = _attention(normed, layer, index, weights, batch, view, attention)
            hidden, normed = reduce(view, project(attended, layer.o_proj), hidden, layer.post_attention_layernorm, weights.eps)
            # After the last layer comes another norm, or none: whoever goes on knows.
            following = weights.layers[index + 1].input_layernorm if index + 1 < len(weights.layers) else weights.ln_f
            hidden, normed = reduce(view, _moe(normed, layer, kernels, probe), hidden, following, weights.eps)
            if probe is not None:
                probe["hidden"].append(hidden.clone())
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
        out = whole.new_empty(whole.shape[0], whole.shape[1], slots, g, d)
        for number, slot in enumerate(batch.slots):
            out[slot.length :, :, number] = 0.0
            q = _rotate(whole[: slot.length, :, number], layer, slot, index, weights)
            out[: slot.length, :, number] = _attend(q, slot, index, slot.runs, weights.kernels).unflatten(1, (-1, g))
        return view.heads_to_seq(out, f"{layer.site}.attn.out").permute(2, 0, 1, 3, 4).flatten(0, 1).flatten(1)
    if view.topology.sp_size > 1:
        return _attention_kv_gather(qkv, layer, index, weights, batch, view)
    if slots == 1:
        return _attend(_rotate(qkv[0], layer, batch.slots[0], index, weights), batch.slots[0], index, batch.slots[0].runs, weights.kernels).flatten(1)
    out = qkv.new_empty(slots, qkv.shape[1], qkv.shape[2] * g, d)
    for number, slot in enumerate(batch.slots):
        q = _rotate(qkv[number], layer, slot, index, weights)
        _attend(q, slot, index, slot.runs, weights.kernels, out[number])
    return out.flatten(0, 1).flatten(1)


def _attention_kv_gather(
    qkv: torch.Tensor, layer: LayerWeights, index: int, weights: TrunkWeights, batch: ForwardBatch, view: PhaseView
) -> torch.Tensor:
    """Queries stay with their rank; keys and values of the block are gathered over the sequence-parallel group."""
    d = weights.head_dim
    first, last = local_rows(view, batch.padded)
    queries = []
    pairs = qkv.new_empty(last - first, len(batch.slots), 2, qkv.shape[2], d)  # [T/sp, n, 2, G, d]
    for number, slot in enumerate(batch.slots):
        count = max(0, min(last, slot.length) - first)  # rows of this rank that are not padding
        cos, sin = slot.cos[first : first + count], slot.sin[first : first + count]
        pairs[count:, number] = 0.0
        k, v = pairs[:count, number].unbind(1)
        queries.append(
            weights.kernels.rotate_into(qkv[number, :count], cos, sin, layer.query_layernorm, layer.key_layernorm, weights.eps, k, v)
        )
    gathered = view.kv_gather(pairs, f"{layer.site}.attn.kv", order=view.topology.sp_ranks)
    out = qkv.new_empty(len(batch.slots), last - first, queries[0].shape[1], d)
    for number, (slot, q) in enumerate(zip(batch.slots, queries, strict=True)):
        slot.cache.write(index, slot.start, gathered[: slot.length, number, 0], gathered[: slot.length, number, 1])
        out[number, q.shape[0] :] = 0.0
        _attend(q, slot, index, clip_runs(slot.runs, first, last), weights.kernels, out[number, : q.shape[0]])
    return out.flatten(0, 1).flatten(1)


def _rotate(qkv: torch.Tensor, layer: LayerWeights, slot: Slot, index: int, weights: TrunkWeights) -> torch.Tensor:
    """``[T, G, g+2, d]`` -> ``q [T, G·g, d]``; keys and values go to their places in the slot's cache."""
    k, v = slot.cache.places(index, slot.start, qkv.shape[0])
    return weights.kernels.rotate_into(qkv, slot.cos, slot.sin, layer.query_layernorm, layer.key_layernorm, weights.eps, k, v)


def _attend(
    q: torch.Tensor, slot: Slot, layer: int, runs: tuple[AttentionRun, ...], kernels: KernelSet, out: torch.Tensor | None = None
) -> torch.Tensor:
    return kernels.attend(q, slot.cache.k[layer], slot.cache.v[layer], runs, out)


def _moe(x: torch.Tensor, layer: LayerWeights, kernels: KernelSet, probe: Mapping[str, list] | None) -> Partial:
    """Shared and routed experts; both are summands of one later reduction, so the shared expert is split as well."""
    routing = kernels.route(x, layer.router, layer.topk, probe is not None)
    if probe is not None:
        probe["router_logits"].append(routing.logits)
        probe["router_ids"].append(routing.ids.long())
        probe["router_weights"].append(routing.weights)
    hidden = kernels.gated_unit(project(x, layer.shared_gate_and_up), layer.shared_micros)
    shared = project(hidden, layer.shared_down)
    return shared.extend(lambda summand: kernels.experts(x, layer.experts, routing, summand, layer.moe_path))
