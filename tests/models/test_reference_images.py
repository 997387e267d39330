"""Conditioning pictures: exact pixels and patches, odd file modes, and what is refused in which words."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from phase_parallel.models.hunyuan_image_3.config import VitConfig
from phase_parallel.models.hunyuan_image_3.reference_images import (
    MAX_ASPECT,
    ReferenceImageError,
    encoder_input,
    posterior_sample,
    to_rgb,
    vae_pixels,
    vit_patches,
    vit_size,
)
from phase_parallel.models.hunyuan_image_3.resolution import ResolutionTable

VIT = VitConfig(1152, 4304, 16, 27, 16, 3, 256, 1e-6, 1024)
PICTURE_CASES = ["instruct_ti2i_one_image", "instruct_ti2i_recaption_ar", "instruct_ti2i_two_images_auto"]


MODES = ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBX", "RGBA", "RGBa", "CMYK", "YCbCr", "LAB", "HSV"]


class OneRow:
    """A size table with a single row."""

    def __init__(self, height: int, width: int) -> None:
        self.rows = [(height, width)]

    def nearest(self, height: int, width: int) -> int:
        return 0


def noise_picture(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def reopened(image: Image.Image, **options: object) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return Image.open(file)


@pytest.mark.parametrize("name", PICTURE_CASES)
def test_golden_pictures_are_exact(name, golden_case, golden_checkpoint):
    case = golden_case(name)
    config = golden_checkpoint(case.spec["checkpoint"]).config
    table = ResolutionTable(config.image_base_size, True)
    for i, file in enumerate(case.spec["input_images"]):
        with Image.open(case.folder / file) as image:
            pixels, index = vae_pixels(image, table)
            patches, mask, grid = vit_patches(image, config.vit)
        case.check(f"cond{i}.pixels_u8", pixels)
        assert table.rows[index] == tuple(pixels.shape[1:])
        case.check(f"cond{i}.vit_mask", mask)
        case.check(f"cond{i}.vit_grid", torch.tensor(grid))
        assert torch.equal(patches, case.tensors[f"cond{i}.vit_patches"])


@pytest.mark.parametrize("name", PICTURE_CASES)
def test_posterior_samples_match_golden(name, golden_case, golden_checkpoint):
    case = golden_case(name)
    scaling = golden_checkpoint(case.spec["checkpoint"]).config.vae.scaling_factor
    for i in range(len(case.spec["input_images"])):
        parts = (case.tensors[f"cond{i}.{part}"] for part in ("vae_mean", "vae_logvar", "posterior_noise"))
        case.check(f"cond{i}.latent", posterior_sample(*parts, scaling))


def test_a_real_vision_resize_is_within_one_level_of_golden(golden_case, golden_checkpoint):
    case = golden_case("modules_instruct")
    vit = golden_checkpoint(case.spec["checkpoint"]).config.vit
    patches, mask, grid = vit_patches(case.tensors["vit.image_u8"], vit)
    case.check("vit.mask", mask)
    case.check("vit.grid", torch.tensor(grid))
    assert (patches - case.tensors["vit.patches"]).abs().max() < 1.01 / 127.5


@pytest.mark.parametrize(("height", "top"), [(16, 0), (17, 0), (18, 1), (19, 2), (21, 2), (23, 4)])
def test_the_crop_rounds_half_to_even(height, top):
    array = noise_picture(height, 16)
    pixels, _ = vae_pixels(array, OneRow(16, 16))
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), array[top : top + 16])


@pytest.mark.parametrize("size", [(100, 60), (60, 100), (33, 47), (500, 20)])
def test_the_vae_branch_covers_the_nearest_row(size):
    table = ResolutionTable(256, False)
    pixels, index = vae_pixels(noise_picture(*size), table)
    assert index == table.nearest(*size)
    assert tuple(pixels.shape) == (3, *table.rows[index])
    assert pixels.dtype == torch.uint8 and pixels.is_contiguous()


@pytest.mark.parametrize("size", [(16, 16), (37, 911), (3000, 2000), (4096, 4096), (64, 4096)])
def test_the_vision_size_uses_the_budget_and_keeps_to_it(size):
    height, width = vit_size(*size, patch_size=16, max_num_patches=1024)
    assert height % 16 == width % 16 == 0
    # Two more rows and columns of patches would be too many: the ceilings cost less than that.
    assert height * width // 256 <= 1024 < (height // 16 + 2) * (width // 16 + 2)


def test_the_vision_size_of_a_square_fills_the_budget():
    assert vit_size(1, 1, patch_size=16, max_num_patches=1024) == (112, 112)  # the scale ends at 100
    assert vit_size(100, 100, patch_size=16, max_num_patches=1024) == (512, 512)
    assert vit_size(1024, 1024, patch_size=16, max_num_patches=64) == (128, 128)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((3000, 2000), (624, 416)),
        ((37, 911), (96, 2368)),
        ((4637, 4492), (512, 496)),
        ((2677, 5864), (336, 736)),
    ],
)
def test_the_bisection_ends_where_the_official_one_does(size, wanted):
    """For the last two a finer bisection finds one more row or column of patches."""
    assert vit_size(*size, patch_size=16, max_num_patches=1024) == wanted


def test_patches_are_row_major_with_the_channel_fastest():
    vit = VitConfig(8, 8, 1, 1, 2, 3, 16, 1e-6, 6)
    array = noise_picture(4, 6)
    patches, mask, grid = vit_patches(array, vit)
    assert grid == (2, 3) and mask.all() and mask.dtype == torch.bool
    values = ((torch.from_numpy(array).float() - 127.5) / 127.5).numpy()
    assert np.array_equal(patches[4].numpy(), values[2:4, 2:4].reshape(-1))


def test_slots_after_the_grid_are_zero_and_masked():
    patches, mask, (gh, gw) = vit_patches(noise_picture(40, 90), VIT)
    assert patches.shape == (1024, 768) and patches.dtype == torch.float32
    assert int(mask.sum()) == gh * gw < 1024
    assert not patches[~mask].any()


def test_encoder_input_spans_minus_one_to_one():
    assert encoder_input(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1.0, 1.0]


def test_the_shift_is_subtracted_before_scaling():
    mean, logvar, noise = torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([1.0])
    assert posterior_sample(mean, logvar, noise, 0.5, shift_factor=1.0).item() == 1.0
    assert posterior_sample(mean, logvar, noise, 0.5).item() == 1.5


def test_alpha_is_dropped_and_not_composited():
    array = noise_picture(8, 8, 4)
    array[..., 3] = 0
    for image in (Image.fromarray(array), array, torch.from_numpy(array)):
        assert np.array_equal(np.asarray(to_rgb(image)), array[..., :3])


def test_exif_orientation_is_applied():
    array = noise_picture(8, 12)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise
    upright = to_rgb(reopened(Image.fromarray(array), exif=exif))
    assert np.array_equal(np.asarray(upright), np.rot90(array, -1))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1)])
def test_grey_is_repeated(shape):
    array = noise_picture(5, 7, 1)
    rgb = np.asarray(to_rgb(array.reshape(shape)))
    assert np.array_equal(rgb, array.repeat(3, axis=2))


@pytest.mark.parametrize("mode", MODES)
def test_every_8_bit_mode_becomes_rgb(mode):
    assert to_rgb(Image.new(mode, (8, 5))).mode == "RGB"


def test_a_palette_with_transparency_keeps_its_colours():
    image = Image.fromarray(noise_picture(9, 9)).quantize(8)
    wanted = np.asarray(image.convert("RGB"))
    saved = reopened(image, transparency=bytes([0] * 8))
    assert saved.mode == "P"
    assert np.array_equal(np.asarray(to_rgb(saved)), wanted)


@pytest.mark.parametrize("mode", ["I;16", "I"])
def test_16_bit_grey_is_scaled_and_not_clipped(mode):
    grey = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    image = Image.fromarray(grey) if mode == "I;16" else Image.fromarray(grey.astype(np.int32))
    assert image.mode == mode
    if mode == "I;16":
        image = reopened(image)
    assert np.array_equal(np.asarray(to_rgb(image))[..., 1], np.arange(256).reshape(16, 16))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((8, 8, 3), dtype=np.float32), "must be uint8, not float32"),
        (np.zeros((8, 8, 3), dtype=np.uint16), "must be uint8, not uint16"),
        (np.zeros((2, 8, 8, 3), dtype=np.uint8), "one picture at a time"),
        (np.zeros((8, 8, 2), dtype=np.uint8), "channels last"),
        (Image.new("F", (8, 8)), "save it as 8-bit RGB"),
        (np.zeros((1, MAX_ASPECT + 1, 3), dtype=np.uint8), "crop it first"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_remedy(image, message):
    with pytest.raises(ReferenceImageError, match=message):
        to_rgb(image)
