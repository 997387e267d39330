"""Pictures as they really arrive at image1 …: huge, deep, turned, broken."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lone_engine import RecordingHandle, lone_engine
from PIL import Image, ImageOps

from phase_parallel.models.hunyuan_image_3.references import prepare_reference
from phase_parallel.nodes.node_ask import HunyuanImage3Ask
from phase_parallel.nodes.node_encode import HunyuanImage3Encode
from phase_parallel.nodes.node_rewrite import HunyuanImage3Rewrite
from phase_parallel.nodes.references import References, prepare_references
from phase_parallel.nodes.text_socket import HunyuanText
from phase_parallel.nodes.vae_socket import HunyuanVae

EXIF_ORIENTATION = 0x0112


@pytest.fixture
def engine(small_instruct: Path) -> RecordingHandle:
    return lone_engine(small_instruct)


def prepare(engine: RecordingHandle, image: torch.Tensor) -> References:
    return prepare_references(engine, (image,), seed=0)


def levels(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def as_image(picture: np.ndarray) -> torch.Tensor:
    """[1, H, W, C] in [0, 1], as LoadImage gives it."""
    return torch.from_numpy(picture.copy()).float()[None] / 255


@pytest.mark.parametrize("size", [(8000, 400), (400, 8000), (8000, 2000)])
def test_a_huge_picture_is_as_cheap_as_a_small_one_for_the_model(engine: RecordingHandle, size: tuple[int, int]) -> None:
    image = torch.zeros(1, 1, 1, 3).expand(1, *size, 3)
    (prepared,) = prepare(engine, image).pictures
    assert tuple(prepared.pixels.shape[-2:]) in engine.table.rows
    assert prepared.patches.shape[0] == engine.config.vit.max_num_patches >= prepared.grid[0] * prepared.grid[1]


def test_the_users_picture_is_not_changed(engine: RecordingHandle) -> None:
    image = torch.rand(1, 20, 30, 3) * 3 - 1
    before = image.clone()
    prepare(engine, image)
    assert torch.equal(image, before)


def test_16_bit_values_are_rounded_to_the_nearest_of_8_bits(engine: RecordingHandle) -> None:
    """LoadImage gives a 16-bit file as fractions of 65535."""
    fine = np.random.default_rng(0).integers(0, 65536, (24, 40, 3))
    coarse = np.rint(fine / 257).astype(np.uint8)
    image = torch.from_numpy(fine / 65535)[None]
    for given in (image.float(), image.double()):
        assert prepare(engine, given).keys == prepare(engine, as_image(coarse)).keys


def test_half_precision_and_values_out_of_range_are_fine(engine: RecordingHandle) -> None:
    image = as_image(levels(24, 40))
    assert prepare(engine, image.half()).keys == prepare(engine, image).keys
    beyond = torch.where(image > 0.5, image + 100, image - 100)
    assert prepare(engine, beyond).keys == prepare(engine, (image > 0.5).float()).keys
    infinite = torch.where(image > 0.5, torch.inf, -torch.inf)
    assert prepare(engine, infinite).keys == prepare(engine, beyond).keys


def test_a_turned_photo_is_turned_once(engine: RecordingHandle) -> None:
    """LoadImage turns it upright; nothing here turns it again, and a file that we would read ourselves gives the same."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    file = io.BytesIO()
    Image.fromarray(levels(40, 90)).save(file, format="PNG", exif=exif)
    opened = Image.open(file)
    upright = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    assert upright.shape[:2] == (90, 40)
    (from_socket,) = prepare(engine, as_image(upright)).pictures
    from_file = prepare_reference(opened, engine.config, engine.table)
    assert torch.equal(from_socket.pixels, from_file.pixels) and torch.equal(from_socket.patches, from_file.patches)


def with_nan() -> torch.Tensor:
    image = as_image(levels(16, 16))
    image[0, 3, 5, 1] = torch.nan
    return image


BROKEN = [
    (with_nan(), r"image1 has pixels that are not numbers \(NaN\)"),
    (torch.zeros(1, 16, 16, 3, dtype=torch.uint8), "image1 holds torch.uint8 values"),
    (torch.zeros(1, 16, 16, 3, dtype=torch.bool), "image1 holds torch.bool values"),
    (torch.zeros(2, 16, 16, 3), "image1 holds a batch of 2 pictures"),
    (torch.zeros(1, 0, 16, 3), "image1 has shape"),
    (torch.zeros(1, 16, 16), "image1 has shape"),
]


@pytest.mark.parametrize(("image", "words"), BROKEN)
def test_every_node_refuses_a_broken_picture_before_a_rank_works(engine: RecordingHandle, image: Any, words: str) -> None:
    clip, vae = HunyuanText(engine), HunyuanVae(engine)
    for attempt in (
        lambda: HunyuanImage3Encode().encode(clip, vae, "a dog", 256, 256, image1=image),
        lambda: HunyuanImage3Rewrite().rewrite(clip, "a dog", "recaption", image1=image),
        lambda: HunyuanImage3Ask().ask(clip, "what is it", image1=image),
    ):
        with pytest.raises(ValueError, match=words):
            attempt()
    assert engine.made == []
