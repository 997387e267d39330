"""The vision tower and its aligner against golden numbers, and what padding slots may and may not do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phase_parallel.models.hunyuan_image_3.config import AlignerConfig, VitConfig
from phase_parallel.models.hunyuan_image_3.vision import Aligner, VisionTower

RELEASE = VitConfig(
    hidden_size=1152,
    intermediate_size=4304,
    num_attention_heads=16,
    num_hidden_layers=27,
    patch_size=16,
    num_channels=3,
    num_patches=256,
    layer_norm_eps=1e-6,
    max_num_patches=1024,
)
SMALL = VitConfig(24, 40, 3, 2, 2, 3, 16, 1e-6, 20)
PICTURE_CASES = ["instruct_ti2i_one_image", "instruct_ti2i_recaption_ar", "instruct_ti2i_two_images_auto"]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def first(n: int, of: int = 20) -> Tensor:
    return torch.arange(of) < n


@pytest.fixture
def tower() -> VisionTower:
    module = VisionTower(SMALL).requires_grad_(False)
    for number, parameter in enumerate(module.parameters()):
        parameter.data = seeded(*parameter.shape, seed=number) * 0.3
    return module


def golden_modules(checkpoint) -> tuple[nn.Module, nn.Module]:
    with torch.device("meta"):
        tower, aligner = VisionTower(checkpoint.config.vit), Aligner(checkpoint.config.aligner)
    checkpoint.load(tower, "vision_model.", unused=("vision_model.head.",))
    return tower, checkpoint.load(aligner, "vision_aligner.")


def test_tower_and_aligner_match_golden(golden_case, golden_checkpoint):
    case = golden_case("modules_instruct")
    tower, aligner = golden_modules(golden_checkpoint(case.spec["checkpoint"]))
    grid = tuple(case.tensors["vit.grid"].tolist())
    hidden = tower(case.tensors["vit.patches"][None], case.tensors["vit.mask"][None], [grid])
    case.check("vit.last_hidden", hidden[0])
    case.check("vit.aligned", aligner(hidden)[0])


@pytest.mark.parametrize("name", PICTURE_CASES)
def test_conditioning_features_match_golden(name, golden_case, golden_checkpoint):
    """All pictures of a case in one call: they do not influence each other."""
    case = golden_case(name)
    tower, aligner = golden_modules(golden_checkpoint(case.spec["checkpoint"]))
    pictures = range(len(case.spec["input_images"]))
    patches = torch.stack([case.tensors[f"cond{i}.vit_patches"] for i in pictures])
    mask = torch.stack([case.tensors[f"cond{i}.vit_mask"] for i in pictures])
    grids = [tuple(case.tensors[f"cond{i}.vit_grid"].tolist()) for i in pictures]
    features = aligner(tower(patches, mask, grids))
    for i in pictures:
        case.check(f"cond{i}.vit_features", features[i])


def test_release_sizes_have_the_release_parameter_counts_without_the_pooling_head():
    with torch.device("meta"):
        tower = VisionTower(RELEASE)
        aligner = Aligner(AlignerConfig(input_dim=1152, n_embed=4096, depth=2))
    d, f = 1152, 4304
    head = d + (3 * d * d + 3 * d) + (d * d + d) + 2 * d + (f * d + f) + (d * f + d)
    assert count(tower) == 427_888_064 - head
    assert count(aligner) == 21_504_000


def test_aligner_depth_is_its_number_of_linears():
    keys = set(Aligner(AlignerConfig(input_dim=4, n_embed=8, depth=3)).state_dict())
    assert keys == {f"layers.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")}


def test_position_table_is_resized_and_padding_gets_its_first_entry(tower):
    table = tower.embeddings.position_embedding.weight
    assert torch.equal(tower.embeddings._positions(4, 4, 16), table)
    positions = tower.embeddings._positions(3, 5, 20)
    assert torch.equal(positions[15:], positions[:1].expand(5, -1))


def test_the_position_table_is_resized_with_antialias(tower):
    """Reduced to one entry, the table's corner still counts; without antialias only the middle four would."""
    table = tower.embeddings.position_embedding.weight
    table.zero_()
    table[0] = 1.0
    assert (tower.embeddings._positions(1, 1, 1) > 0).all()


def test_padding_slots_are_computed_but_real_patches_do_not_see_them(tower):
    patches, mask = seeded(1, 20, 12), first(6)[None]
    other = patches.clone()
    other[:, 6:] = seeded(1, 14, 12, seed=9)
    a, b = tower(patches, mask, [(2, 3)]), tower(other, mask, [(2, 3)])
    assert torch.equal(a[:, :6], b[:, :6])
    assert ((a - b).abs().amax(-1)[0] > 1e-3).nonzero().flatten().tolist() == list(range(6, 20))


def test_the_same_patches_in_another_grid_give_other_features(tower):
    patches, mask = seeded(1, 20, 12), first(6)[None]
    assert (tower(patches, mask, [(2, 3)]) - tower(patches, mask, [(3, 2)])).abs().max() > 1e-2


def test_a_grid_beyond_the_slots_is_refused_with_both_numbers(tower):
    with pytest.raises(ValueError, match=r"7x3.*20 slots"):
        tower(torch.zeros(1, 20, 12), first(20)[None], [(7, 3)])


def test_bf16_weights_take_fp32_patches_and_stay_near_fp32(tower):
    aligner = Aligner(AlignerConfig(24, 16, 2)).requires_grad_(False)
    patches, mask = seeded(1, 20, 12), first(6)[None]
    exact = aligner(tower(patches, mask, [(2, 3)]))
    hidden = tower.bfloat16()(patches, mask, [(2, 3)])
    features = aligner.bfloat16()(hidden)
    assert (hidden.dtype, features.dtype) == (torch.float32, torch.bfloat16)
    assert (features - exact).abs().max() < 0.1 * exact.abs().max()
