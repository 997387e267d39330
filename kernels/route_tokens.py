"""The router of many tokens in one launch: logits, softmax, top-k, and the counts that the sort by expert begins with.

The logits have fp32 quality on the matrix units. A bf16 token is exact in bf16, and an fp32 weight is the sum of three bf16 parts, so three bf16 products
with fp32 sums are the fp32 product. The weight is the left operand, split in registers; a tile of tokens is read once for all three.

Letters: T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .router import Counts, Routing
from .triton_support import jit, next_power_of_2, tl, triton


@dataclass(frozen=True)
class RouteTile:
    """Tokens of one program, depth of one step, warps, stages of the pipeline."""

    tokens: int
    depth: int
    warps: int
    stages: int


def choose_route_tile(tokens: int, itemsize: int) -> RouteTile:
    """Every program reads the whole weight, so many tokens want large tiles; few tokens want enough programs."""
    if itemsize > 2:
        return RouteTile(16, 32, 4, 2)  # for checks; fits every device
    return RouteTile(64 if tokens > 4096 else 32 if tokens > 1024 else 16, 64, 4, 4)


@jit
def _route_tokens(
    x, weight, weights, ids, counts, logits, tokens, experts, hidden, x_stride,
    E: tl.constexpr, K: tl.constexpr, PAD_K: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    number, inner = tl.arange(0, E), tl.arange(0, DEPTH)
    # Rows behind the last one repeat it: no mask in the loop, and nothing of them is stored.
    x_at = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_at = weight + tl.minimum(number, experts - 1)[:, None] * hidden + inner[None, :]
    logit = tl.zeros([E, TOKENS], tl.float32)
    middle_sum, low_sum = tl.zeros([E, TOKENS], tl.float32), tl.zeros([E, TOKENS], tl.float32)
    for start in range(0, hidden, DEPTH):
        if EVEN:
            rows, wide = tl.load(x_at), tl.load(weight_at)
        else:
            inside = (start + inner < hidden)[None, :]
            rows, wide = tl.load(x_at, mask=inside, other=0.0), tl.load(weight_at, mask=inside, other=0.0)
        turned = tl.trans(rows)
        if SPLIT:
            high = wide.to(tl.bfloat16)
            rest = wide - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            # Each part has a sum of its own: beside the large one small parts would be rounded away, and the products need not wait for each other.
            low_sum = tl.dot(low, turned, low_sum)
            middle_sum = tl.dot(middle, turned, middle_sum)
            logit = tl.dot(high, turned, logit)
        else:
            logit = tl.dot(wide, turned.to(tl.float32), logit, input_precision="ieee")
        x_at += DEPTH
        weight_at += DEPTH
    logit += middle_sum + low_sum
    here = (token < tokens)[None, :]
    expert = number[:, None]
    if KEEP:
        tl.store(logits + token.to(tl.int64)[None, :] * experts + expert, logit, mask=here & (expert < experts))
    logit = tl.where(expert < experts, logit, float("-inf"))
    p = tl.exp(logit - tl.max(logit, axis=0, keep_dims=True))
    left = p / tl.sum(p, axis=0, keep_dims=True)
    # A token that is not finite still chooses K different experts, or the sort would leave places unwritten; its outputs stay not finite by themselves.
    left = tl.where(expert < experts, tl.where(left == left, left, 0.0), -1.0)
    place = tl.arange(0, PAD_K)[:, None]
    best, chosen = tl.zeros([PAD_K, TOKENS], tl.float32), tl.zeros([PAD_K, TOKENS], tl.int32)
    for slot in tl.static_range(K):
        highest, winner = tl.max(left, axis=0, return_indices=True, return_indices_tie_break_left=True, keep_dims=True)
        best = tl.where(place == slot, highest, best)
        chosen = tl.where(place == slot, winner, chosen)
        left = tl.where(expert == winner, -2.0, left)
    total = tl.maximum(tl.sum(best, axis=0, keep_dims=True), 1e-8)
    mask = here & (place < K)
    at = token[None, :] * K + place
    tl.store(weights + at, best / total, mask=mask)
    tl.store(ids + at, chosen, mask=mask)
    taken = ((left < -1.5) & here).to(tl.int32)
    tl.store(counts + tl.program_id(0) * E + number, tl.sum(taken, axis=1).to(tl.uint8))


def route_tokens_triton(x: torch.Tensor, weight: torch.Tensor, topk: int, keep_logits: bool = False, *, tile: RouteTile | None = None) -> Routing:
    """As :func:`.router.route_tokens_eager`, with the counts; equal probabilities go by the expert's number. Rows of ``x`` may be strided, ``weight`` is
    contiguous; ``x`` bf16 or fp32."""
    tokens, hidden = x.shape
    experts, device = weight.shape[0], x.device
    tile = tile or choose_route_tile(tokens, x.element_size())
    padded = max(16, next_power_of_2(experts))  # the matrix unit takes at least 16 rows
    weights = torch.empty(tokens, topk, dtype=torch.float32, device=device)
    ids = torch.empty(tokens, topk, dtype=torch.int32, device=device)
    blocks = triton.cdiv(tokens, tile.tokens)
    counts = torch.empty(blocks, padded, dtype=torch.uint8, device=device)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=device) if keep_logits else None
    _route_tokens[(blocks,)](
        x, weight, weights, ids, counts, weights if logits is None else logits, tokens, experts, hidden, x.stride(0), E=padded, K=topk,
        PAD_K=next_power_of_2(topk), TOKENS=tile.tokens, DEPTH=tile.depth, EVEN=hidden % tile.depth == 0, SPLIT=x.dtype == torch.bfloat16,
        KEEP=keep_logits, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return Routing(weights, ids, Counts(counts, tile.tokens), logits)
