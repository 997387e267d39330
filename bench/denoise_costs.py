"""What a denoise step costs at least, and what the collectives cost that one rank without its peers leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from ..models.hunyuan_image_3.model import HunyuanImage3Model
from .one_rank import CollectiveKind, Transfer

MATRIX_SPEED = 790e12
"""FLOP/s of dense bf16 products on an H200: 804 measured on 8192³ (performance.md section 1), 790 in the floors there."""

MIB = 1 << 20
MEASURED_US: Mapping[tuple[CollectiveKind, int], tuple[tuple[float, float], ...]] = {
    ("all_reduce", 2): ((16 * MIB, 75.0), (32 * MIB, 136.0)),
    ("all_reduce", 4): ((1 * MIB, 27.0), (16 * MIB, 95.0), (32 * MIB, 174.0)),
    ("all_gather", 2): ((4 * MIB, 40.0), (16 * MIB, 91.0)),
    ("all_to_all", 2): ((4 * MIB, 49.0), (16 * MIB, 55.0)),
}
"""NCCL on 4 x H200 without multicast, 2026-11-29: (bytes of a rank's tensor, microseconds) by kind and ranks."""


def denoise_flops(model: HunyuanImage3Model, rows: int, prefix: int, block: int) -> float:
    """Matrix arithmetic of this rank in one step of ``rows`` rows that it computes, of ``block`` tokens each behind ``prefix`` ones.

    As research/kernels.md section 7 counts: 2 FLOP for every weight that a token meets (of the experts the chosen ones), 4·q·kv·heads·d for a layer's
    attention. Its floor also counts the all-reduce, which is :func:`collectives_ms` here, and neither counts :func:`convolution_flops`.
    """
    weights, config, topology = model.weights["denoise"], model.config, model.plan.topology("denoise")
    sp = topology.sp_size
    tokens = rows * -(-block // sp)
    total = 0.0
    for layer in weights.layers:
        active = sum(weight.tensor.numel() for weight in (layer.qkv_proj, layer.o_proj, layer.shared_gate_and_up, layer.shared_down))
        active += layer.router.numel() + layer.topk * sum(b.w1[0].numel() + b.w2[0].numel() for b in layer.experts)
        # Either half of the queries or half of the heads.
        heads = config.num_attention_heads / topology.tp_size / sp
        total += 2 * active * tokens + 4 * rows * block * (prefix + block) * heads * config.head_dim
    return total


def convolution_flops(model: HunyuanImage3Model, pictures: int, rows: int, pixels: int) -> float:
    """Of the patch embedding of ``pictures`` latents and the final layer of ``rows`` rows, which every rank computes whole; ``pixels`` of the latent."""

    def weights(module: object) -> int:
        return sum(tensor.numel() for tensor in module.parameters() if tensor.dim() == 4)

    return 2.0 * pixels * (pictures * weights(model.around.patch_embed) + rows * weights(model.around.final_layer))


def floor_ms(flops: float) -> float:
    return flops / MATRIX_SPEED * 1e3


def collectives_ms(left_out: Mapping[Transfer, int]) -> float | None:
    """Time of these collectives by :data:`MEASURED_US`, in a straight line between and beyond its points; None where one was not measured."""
    total = 0.0
    for transfer, count in left_out.items():
        points = MEASURED_US.get((transfer.kind, transfer.ranks))
        if points is None:
            return None
        (x0, y0), (x1, y1) = next(((a, b) for a, b in pairwise(points) if transfer.nbytes <= b[0]), points[-2:])
        # A small message still costs what starting it does.
        total += count * max(points[0][1], y0 + (transfer.nbytes - x0) * (y1 - y0) / (x1 - x0)) / 1e3
    return total
