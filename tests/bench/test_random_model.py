"""Random models of the benchmarks: right scale, equal replicas, different shards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phase_parallel.bench.one_rank import OneRankCommunicator
from phase_parallel.bench.random_model import random_model
from phase_parallel.bench.release import from_spec, release
from phase_parallel.launch.cli import main
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import HunyuanImage3Model
from phase_parallel.models.hunyuan_image_3.sequence import build_text_row
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec
from phase_parallel.parallel.plan import make_plan

TINY = SyntheticSpec(kind="instruct", dtype="bfloat16", kv_heads=4, experts=8)


def tiny(rank: int, *, layout: str = "micro_major", seed: int = 0) -> HunyuanImage3Model:
    plan = make_plan("hybrid", world_size=4, rank=rank)
    options = LoadOptions(moe_layout=layout)
    return random_model(from_spec(TINY).config, plan, OneRankCommunicator(plan), options, device=torch.device("cpu"), seed=seed)


def test_release_has_the_published_sizes() -> None:
    config = release().config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (4096, 32, 32, 8)
    assert (config.num_experts[0], config.moe_topk[0], config.moe_intermediate_size[0], config.vocab_size) == (64, 8, 3072, 133120)
    assert (config.max_position_embeddings, config.vae.latent_channels, config.vit.num_hidden_layers) == (22800, 32, 27)
    assert release("distil", layers=2).config.cfg_distilled
    assert release(layers=2).config.num_hidden_layers == 2


def test_replicas_hold_the_same_values_and_shards_do_not() -> None:
    first, second, replica = (tiny(rank).weights["denoise"].layers[0] for rank in (0, 1, 2))
    assert torch.equal(first.qkv_proj.tensor, replica.qkv_proj.tensor)
    assert torch.equal(first.experts[0].w1, replica.experts[0].w1)
    assert not torch.equal(first.qkv_proj.tensor, second.qkv_proj.tensor)
    assert torch.equal(first.router, second.router)
    assert not torch.equal(tiny(0, seed=1).weights["denoise"].layers[0].router, first.router)


@pytest.mark.parametrize("layout", ["micro_major", "expert_major"])
def test_values_keep_their_scale(layout: str) -> None:
    model = tiny(0, layout=layout)
    built = from_spec(replace(TINY))
    row = build_text_row(
        built.tokenizer, built.config, prompt="a cat on the red mat", system_prompt=None, cot_text=None, cond_images=(), task="auto"
    )
    hidden = model.prefill(row, 0, len(row), model.new_cache(len(row), "prefill"))
    assert torch.isfinite(hidden).all()
    assert 0.5 < hidden.float().std() < 8


def test_bench_without_a_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "memory"]) == 1
    wanted = "bench memory measures CUDA devices and this machine has none; run it on a machine with a GPU."
    assert capsys.readouterr().err == f"phase-parallel: {wanted}\n"
