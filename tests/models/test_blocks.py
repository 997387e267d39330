"""Timestep embedders, patch embed and final layer against golden numbers and their own rules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from phase_parallel.models.hunyuan_image_3.blocks import (
    FinalLayer,
    GroupNorm,
    LayerNorm,
    PatchEmbed,
    ResBlock,
    TimestepEmbedder,
    timestep_embedding,
)

RELEASE = {"inner_channels": 1024, "hidden_size": 4096}
SMALL = {"inner_channels": 32, "hidden_size": 64}


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return module.requires_grad_(False)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def embedder(checkpoint, name: str) -> nn.Module:
    with torch.device("meta"):
        module = TimestepEmbedder(checkpoint.config.hidden_size)
    return checkpoint.load(module, f"{name}.")


def projection(checkpoint, kind: type[nn.Module], prefix: str) -> nn.Module:
    config = checkpoint.config
    with torch.device("meta"):
        module = kind(
            config.vae.latent_channels,
            inner_channels=config.patch_embed_hidden_dim,
            hidden_size=config.hidden_size,
        )
    return checkpoint.load(module, prefix)


EMBEDDERS = [("modules_instruct", name) for name in ("timestep_emb", "time_embed", "time_embed_2")]
EMBEDDERS += [("modules_distil_embedders", name) for _, name in EMBEDDERS]
EMBEDDERS += [("modules_distil_embedders", name) for name in ("guidance_emb", "timestep_r_emb")]


@pytest.mark.parametrize(("case_name", "name"), EMBEDDERS)
def test_embedders_match_golden(case_name, name, golden_case, golden_checkpoint):
    case = golden_case(case_name)
    module = embedder(golden_checkpoint(case.spec["checkpoint"]), name)
    case.check(f"time.{name}", module(case.tensors["time.t"]))


def test_patch_embed_matches_golden(golden_case, golden_checkpoint):
    case = golden_case("modules_instruct")
    checkpoint = golden_checkpoint(case.spec["checkpoint"])
    e = embedder(checkpoint, "time_embed")(case.tensors["patch_embed.t"])
    module = projection(checkpoint, PatchEmbed, "patch_embed.")
    case.check("patch_embed.out", module(case.tensors["patch_embed.latent"], e))


def test_final_layer_matches_golden(golden_case, golden_checkpoint):
    case = golden_case("modules_instruct")
    checkpoint = golden_checkpoint(case.spec["checkpoint"])
    e = embedder(checkpoint, "time_embed_2")(case.tensors["final_layer.t"])
    module = projection(checkpoint, FinalLayer, "final_layer.")
    case.check("final_layer.out", module(case.tensors["final_layer.hidden"], e, 5, 7))


def test_sinusoid_has_cosines_first_and_is_exact_in_fp32():
    t = torch.tensor([0.0, 0.5, 999.0, 2496.0])
    got = timestep_embedding(t)
    assert got.dtype == torch.float32
    assert torch.equal(got[0], torch.cat([torch.ones(128), torch.zeros(128)]))
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(128, dtype=torch.float64) / 128)
    angles = t.double()[:, None] * frequencies
    wanted = torch.cat([angles.cos(), angles.sin()], dim=1)
    # An fp32 angle near 2500 has steps of 2.4e-4.
    assert (got - wanted).abs().max() < 4e-4
    assert (got[1] - wanted[1]).abs().max() < 1e-7


def test_sinusoid_is_fp32_for_a_half_precision_timestep():
    t = torch.tensor([642.0], dtype=torch.bfloat16)
    assert torch.equal(timestep_embedding(t), timestep_embedding(t.float()))


def test_release_sizes_have_the_release_parameter_counts():
    with torch.device("meta"):
        assert count(TimestepEmbedder(4096)) == 17_833_984
        assert count(PatchEmbed(32, **RELEASE)) == 226_819_072
        assert count(FinalLayer(32, **RELEASE)) == 60_081_184


def test_equal_widths_have_a_skip_without_weights():
    block = randomise(ResBlock(64, 64, emb_channels=16))
    assert not [key for key in block.state_dict() if key.startswith("skip_connection")]
    assert block(torch.randn(1, 64, 3, 4), torch.randn(1, 16)).shape == (1, 64, 3, 4)


def test_modulation_has_the_scale_first():
    """With scale -1 the normed input vanishes and only the shift is left, whatever x is."""
    block = randomise(ResBlock(32, 64, emb_channels=16))
    block.emb_layers[1].weight.zero_()
    block.emb_layers[1].bias[:64] = -1
    block.emb_layers[1].bias[64:] = 0.7
    x = torch.randn(2, 32, 3, 4, generator=torch.Generator().manual_seed(1))
    constant = F.silu(torch.full((2, 64, 3, 4), 0.7))
    wanted = block.skip_connection(x) + block.out_layers[3](constant)
    torch.testing.assert_close(block(x, torch.randn(2, 16)), wanted)
    block.emb_layers[1].bias.copy_(block.emb_layers[1].bias.roll(64))
    assert (block(x, torch.zeros(2, 16)) - wanted).abs().max() > 0.1


def test_tokens_are_row_major():
    """A change far right in the first row moves only tokens near it, so h and w are not exchanged."""
    module = randomise(PatchEmbed(4, **SMALL))
    # Without norms a block reaches three pixels and no further.
    module.model[1].norm_silu = lambda x, weight, bias, eps, dtype, modulation=None: F.silu(x)
    x, e = torch.zeros(1, 4, 3, 40), torch.zeros(1, 64)
    moved = x.clone()
    moved[0, :, 0, 39] = 1
    changed = (module(moved, e) - module(x, e)).abs().amax(-1)[0].nonzero().flatten().tolist()
    assert changed == [row * 40 + column for row in range(3) for column in range(36, 40)]


@pytest.mark.parametrize("norm", [GroupNorm(4, 8), LayerNorm(8)], ids=["group", "layer"])
def test_norms_work_in_fp32_under_half_precision_weights(norm):
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16() + 100
    half = norm.bfloat16()
    got = half(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, half.float()(x.float()))


def test_bf16_weights_take_an_fp32_latent_and_stay_near_fp32():
    module = randomise(PatchEmbed(4, **SMALL)).bfloat16()
    final = randomise(FinalLayer(4, **SMALL), seed=2).bfloat16()
    time = randomise(TimestepEmbedder(64), seed=3).bfloat16()
    x, t = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(5)), torch.tensor([1000.0, 3.0])
    hidden = module(x, time(t))
    velocity = final(hidden, time(t), 3, 5)
    assert hidden.dtype == velocity.dtype == torch.bfloat16
    exact = final.float()(module.float()(x, time.float()(t)), time(t), 3, 5)
    assert (velocity - exact).abs().max() < 0.05 * exact.abs().max()
