"""The picture autoencoder against golden numbers, the rules of folding, and its memory at full size."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from small_vae import seeded, small_vae
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phase_parallel.models.hunyuan_image_3.config import VaeConfig
from phase_parallel.models.hunyuan_image_3.reference_images import encoder_input
from phase_parallel.models.hunyuan_image_3.vae import Vae
from phase_parallel.models.hunyuan_image_3.vae_blocks import (
    Downsample,
    Upsample,
    add_repeated,
    channel_to_space,
    group_mean,
    space_to_channel,
)
from phase_parallel.models.hunyuan_image_3.vae_memory import peak_bytes
from phase_parallel.models.hunyuan_image_3.vae_rows import BAND_BYTES, PictureRows

RELEASE = VaeConfig(
    block_out_channels=(128, 256, 512, 1024, 1024),
    in_channels=3,
    out_channels=3,
    latent_channels=32,
    layers_per_block=2,
    ffactor_spatial=16,
    ffactor_temporal=4,
    scaling_factor=0.562679178327931,
    shift_factor=None,
)
DECODE_CASES = ["base_t2i_square_even", "instruct_t2i_given_cot", "distil_t2i_8_steps"]
PICTURE_CASES = ["instruct_ti2i_one_image", "instruct_ti2i_two_images_auto"]


def plain(conv: nn.Conv3d, x: Tensor) -> Tensor:
    return nn.functional.conv3d(x, conv.weight, conv.bias, padding=1)


@pytest.fixture
def small() -> Vae:
    return small_vae()


def golden_vae(checkpoint) -> Vae:
    with torch.device("meta"):
        vae = Vae(checkpoint.config.vae)
    return checkpoint.load(vae, "vae.")


def test_encode_and_decode_match_golden(golden_case, golden_checkpoint):
    case = golden_case("modules_instruct")
    vae = golden_vae(golden_checkpoint(case.spec["checkpoint"]))
    mean, logvar = vae.encode(case.tensors["vae.encode.pixels"])
    case.check("vae.encode.mean", mean.unsqueeze(2))
    case.check("vae.encode.logvar", logvar.unsqueeze(2))
    case.check("vae.decode.image", vae.decode(case.tensors["vae.decode.latent"].squeeze(2)))


@pytest.mark.parametrize("name", DECODE_CASES)
def test_final_latents_decode_to_the_golden_pictures(name, golden_case, golden_checkpoint):
    case = golden_case(name)
    checkpoint = golden_checkpoint(case.spec["checkpoint"])
    latent = case.tensors["latent.final"] / checkpoint.config.vae.scaling_factor
    case.check("image", golden_vae(checkpoint).decode(latent)[0])


@pytest.mark.parametrize("name", PICTURE_CASES)
def test_conditioning_pictures_encode_to_the_golden_posteriors(name, golden_case, golden_checkpoint):
    case = golden_case(name)
    vae = golden_vae(golden_checkpoint(case.spec["checkpoint"]))
    for i in range(len(case.spec["input_images"])):
        mean, logvar = vae.encode(encoder_input(case.tensors[f"cond{i}.pixels_u8"])[None])
        case.check(f"cond{i}.vae_mean", mean)
        case.check(f"cond{i}.vae_logvar", logvar)


@pytest.mark.parametrize("rt", [1, 2])
def test_folding_follows_the_channel_order_and_unfolding_is_its_inverse(rt):
    x = seeded(2, 3, 4, 6, 10)
    folded = space_to_channel(x, rt)
    assert folded.shape == (2, rt * 4 * 3, 4 // rt, 3, 5)
    assert torch.equal(channel_to_space(folded, rt), x)
    for a in range(rt):
        for b in range(2):
            for d in range(2):
                first = ((a * 2 + b) * 2 + d) * 3
                assert torch.equal(folded[:, first : first + 3], x[:, :, a::rt, b::2, d::2])


def test_folding_is_not_pixel_unshuffle():
    x = seeded(1, 3, 1, 4, 4)
    assert not torch.equal(space_to_channel(x, 1)[:, :, 0], nn.functional.pixel_unshuffle(x[:, :, 0], 2))


@pytest.mark.parametrize(("rt", "in_channels", "out_channels"), [(1, 4, 8), (2, 4, 8), (2, 8, 8)])
def test_downsample_equals_the_rule_as_written(rt, in_channels, out_channels):
    block = Downsample(in_channels, out_channels, rt=rt).requires_grad_(False)
    x = seeded(2, in_channels, 4, 6, 8)
    folded = space_to_channel(x, rt)
    short = group_mean(folded, folded.shape[1] // out_channels)
    torch.testing.assert_close(block(x, PictureRows.alone(6)), space_to_channel(plain(block.conv, x), rt) + short)


@pytest.mark.parametrize(("rt", "in_channels", "out_channels"), [(1, 8, 4), (2, 8, 4), (2, 8, 8)])
def test_upsample_equals_the_rule_as_written(rt, in_channels, out_channels):
    block = Upsample(in_channels, out_channels, rt=rt).requires_grad_(False)
    x = seeded(2, in_channels, 2, 3, 4)
    before = x.clone()
    short = channel_to_space(x.repeat_interleave(4 * rt * out_channels // in_channels, dim=1), rt)
    torch.testing.assert_close(block(x, PictureRows.alone(3)), channel_to_space(plain(block.conv, x), rt) + short)
    assert torch.equal(x, before)


def test_add_repeated_repeats_each_channel():
    x, short = seeded(1, 6, 1, 2, 2), seeded(1, 2, 1, 2, 2, seed=1)
    wanted = x + short.repeat_interleave(3, dim=1)
    assert torch.equal(add_repeated(x, short, 3), wanted)


@torch.no_grad()
def test_one_latent_frame_becomes_four_and_the_last_is_the_picture(small):
    z = seeded(1, 8, 2, 3)
    frames = small.decoder(z[:, :, None], PictureRows.alone(2))
    assert frames.shape == (1, 3, 4, 32, 48)
    assert torch.equal(small.decode(z), frames[:, :, -1])
    assert not torch.allclose(frames[:, :, 0], frames[:, :, -1])


@torch.no_grad()
def test_a_picture_is_encoded_as_four_equal_frames(small):
    pixels = seeded(1, 3, 32, 48).clamp(-1, 1)
    moments = small.encoder(pixels[:, :, None].repeat(1, 1, 4, 1, 1), PictureRows.alone(2))
    assert moments.shape == (1, 16, 1, 2, 3)
    mean, logvar = small.encode(pixels)
    assert torch.equal(mean, moments[:, :8, 0])
    assert torch.equal(logvar, moments[:, 8:, 0].clamp(-30, 20))


def test_logvar_is_clamped(small):
    small.encoder.conv_out.bias.data[8:12] = 1000.0
    small.encoder.conv_out.bias.data[12:] = -1000.0
    _, logvar = small.encode(torch.zeros(1, 3, 16, 16))
    assert logvar[:, :4].eq(20).all() and logvar[:, 4:].eq(-30).all()


def test_pictures_of_a_batch_do_not_touch_each_other_or_their_inputs(small):
    pixels, z = seeded(2, 3, 16, 32), seeded(2, 8, 1, 2)
    pixels_before, z_before = pixels.clone(), z.clone()
    mean, logvar = small.encode(pixels)
    pictures = small.decode(z)
    assert torch.equal(pixels, pixels_before) and torch.equal(z, z_before)
    assert not (mean.requires_grad or logvar.requires_grad or pictures.requires_grad)
    assert torch.equal(pictures[1:], small.decode(z[1:]))
    assert torch.equal(mean[1:], small.encode(pixels[1:])[0])


def test_a_size_that_does_not_divide_is_refused_with_both_numbers(small):
    with pytest.raises(ValueError, match=r"40x32.*multiples of 16"):
        small.encode(torch.zeros(1, 3, 40, 32))


def test_half_precision_weights_stay_near_fp32(small):
    pixels, z = seeded(1, 3, 16, 32).clamp(-1, 1), seeded(1, 8, 1, 2)
    mean, picture = small.encode(pixels)[0], small.decode(z)
    small.bfloat16()
    half_mean, half_picture = small.encode(pixels)[0], small.decode(z)
    assert half_mean.dtype == half_picture.dtype == torch.bfloat16
    assert (half_mean - mean).abs().max() < 0.1 * mean.abs().max()
    assert (half_picture - picture).abs().max() < 0.1 * picture.abs().max()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations create, while they live; works on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def _freed(self, key: int, size: int) -> None:
        self.live -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(key)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
                self.peak = max(self.peak, self.live)
        return out


@pytest.fixture(scope="module")
def release() -> Vae:
    with torch.device("meta"):
        return Vae(RELEASE)


def test_release_sizes_have_the_release_parameter_counts(release):
    assert sum(p.numel() for p in release.encoder.parameters()) == 389_342_464
    assert sum(p.numel() for p in release.decoder.parameters()) == 871_332_483


@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_two_finest_activations_are_alive_at_the_peak(release, direction):
    """2 GiB each at 1024 x 1024 in fp32; the rest is bands of 256 MiB. A third means that someone holds or copies without need."""
    finest = 128 * 4 * 1024 * 1024 * 4
    with LiveBytes() as memory:
        if direction == "encode":
            release.encode(torch.empty(1, 3, 1024, 1024, device="meta"))
        else:
            release.decode(torch.empty(1, 32, 64, 64, device="meta"))
    assert 2 * finest < memory.peak < 2.4 * finest


@pytest.mark.parametrize("direction", ["encode", "decode"])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (8, 64), (64, 64), (128, 128)])
def test_the_estimate_of_the_peak_is_no_less_and_not_much_more(release, direction, height, width):
    with LiveBytes() as memory:
        if direction == "encode":
            release.encode(torch.empty(1, 3, 16 * height, 16 * width, device="meta"))
        else:
            release.decode(torch.empty(1, 32, height, width, device="meta"))
    estimate = peak_bytes(RELEASE, height=height, width=width, ranks=1)
    assert memory.peak <= estimate <= memory.peak + 3.1 * BAND_BYTES
