"""Sizes of synthetic checkpoints that several test files use."""

from __future__ import annotations

from dataclasses import replace

from phase_parallel.bench import release as bench_release
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec

# For drawing on GPUs: the experts get enough tokens for the kernels that the release's sizes use.
PICTURES_ON_GPUS = SyntheticSpec(
    kind="instruct", layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, experts=16, topk=4, expert_width=384, vocab=4096,
    max_positions=16384, image_base_size=512, patch_embed_width=128, dtype="bfloat16", max_shard_bytes=64 << 20,
)  # fmt: skip

# Every size divides by 8, so that all plans up to eight ranks work; two shared experts show which width is meant.
EIGHT_WAYS = SyntheticSpec(
    heads=16,
    kv_heads=8,
    head_dim=16,
    expert_width=48,
    shared_experts=2,
    experts=6,
    topk=2,
    latent_channels=4,
    vit_layers=1,
)

# The release's sizes (spec section 1), for arithmetic on paper.
RELEASE = replace(bench_release.RELEASE, kind="base")

# name, ranks, storage_tp, denoise, attention: every plan of one to eight ranks.
ALL_PLANS = {
    "single": dict(name="single", world_size=1),
    "tp2": dict(name="tp", world_size=2),
    "tp4": dict(name="tp", world_size=4),
    "tp8": dict(name="tp", world_size=8),
    "hybrid4-ulysses": dict(name="hybrid", world_size=4),
    "hybrid4-kv_gather": dict(name="hybrid", world_size=4, attention="kv_gather"),
    "hybrid4-cfg": dict(name="hybrid", world_size=4, denoise="cfg"),
    "hybrid4-tp": dict(name="hybrid", world_size=4, denoise="tp"),
    "hybrid8-s2-ulysses": dict(name="hybrid", world_size=8, storage_tp=2),
    "hybrid8-s2-kv_gather": dict(name="hybrid", world_size=8, storage_tp=2, attention="kv_gather"),
    "hybrid8-s2-cfg_sp": dict(name="hybrid", world_size=8, storage_tp=2, denoise="cfg_sp"),
    "hybrid8-s2-cfg_sp-kv_gather": dict(name="hybrid", world_size=8, storage_tp=2, denoise="cfg_sp", attention="kv_gather"),
    "hybrid8-s4-ulysses": dict(name="hybrid", world_size=8, storage_tp=4),
    "hybrid8-s4-kv_gather": dict(name="hybrid", world_size=8, storage_tp=4, attention="kv_gather"),
    "hybrid8-s4-cfg": dict(name="hybrid", world_size=8, storage_tp=4, denoise="cfg"),
    "replicated2": dict(name="replicated", world_size=2),
    "replicated4-ulysses": dict(name="replicated", world_size=4),
    "replicated4-kv_gather": dict(name="replicated", world_size=4, attention="kv_gather"),
    "replicated4-cfg": dict(name="replicated", world_size=4, denoise="cfg"),
    "replicated8-s2-cfg_sp": dict(name="replicated", world_size=8, storage_tp=2, denoise="cfg_sp"),
    "replicated8-s4-ulysses": dict(name="replicated", world_size=8),
}
