"""Examples as arrays of numbers, as training reads them: everything of a row before the picture's tokens, and where its parts lie.

Letters: N examples, P tokens before the picture, padded to the longest of a bucket, R source pictures, C latent channels, h x w the token grid.

A bucket holds examples of one form, so that a batch of it is a few tensors: the aspects of the sources and of the result, and what is written.
Imports torch, numpy and its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.reference_images import vit_size
from ..models.hunyuan_image_3.sequence import CondImage, build_image_rows, build_text_row
from ..models.hunyuan_image_3.token_row import Grid, TokenRow
from ..models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from .drawing import render
from .examples import Example, Picture, Writing
from .scenes import ASPECT_ROWS, size_of

PAD = -1
LENGTH_STEP = 16
LEVELS = 127.5
"""Half the range of a byte: a picture's -1 is 0 and its 1 is 255."""


@dataclass(frozen=True)
class Form:
    """What the examples of a bucket have in common."""

    sources: tuple[str, ...]
    result: str
    writing: Writing


@dataclass(frozen=True)
class PackedRow:
    """One example's tokens up to its picture. ``tokens, blanked [P]`` (the unconditional row), ``positions [P, 2]`` and ``image_corner [2]`` (y, x),
    ``groups [P]``: tokens of one number above 0 attend to each other both ways. ``targets``: first and last (exclusive) token to be predicted.
    ``sources [R, 3]``: index of a source picture's timestep, of its first latent token and of its first patch.
    """

    tokens: np.ndarray
    blanked: np.ndarray
    positions: np.ndarray
    image_corner: tuple[int, int]
    groups: np.ndarray
    targets: tuple[int, int]
    sources: tuple[tuple[int, int, int], ...]


def cond_image(picture: Picture, config: HunyuanImage3Config) -> CondImage:
    """The sizes that the row needs of a source picture."""
    height, width = size_of(picture.scene.aspect)
    factor, vit = config.vae.ffactor_spatial, config.vit
    seen_height, seen_width = vit_size(height, width, patch_size=vit.patch_size, max_num_patches=vit.max_num_patches)
    vit_grid = (seen_height // vit.patch_size, seen_width // vit.patch_size)
    return CondImage(ASPECT_ROWS[picture.scene.aspect], (height // factor, width // factor), vit_grid, vit.max_num_patches)


def pack_row(example: Example, tokenizer: HunyuanTokenizer, config: HunyuanImage3Config) -> PackedRow:
    """The row that inference would build for this wish and this text."""
    texts = {"prompt": example.prompt, "system_prompt": example.system_prompt, "cond_images": [cond_image(p, config) for p in example.sources]}
    height, width = size_of(example.result.scene.aspect)
    rows = build_image_rows(tokenizer, config, **texts, cot_text=example.cot_text, height=height, width=width)
    opened = build_text_row(tokenizer, config, **texts, cot_text=None, task="auto")
    row = rows.cond
    blanked = row.tokens if rows.uncond is None else rows.uncond.tokens
    first_image = row.gen.image[0]
    positions = row.positions(config.cond_token_attn_type, rope_type=config.rope_type)
    return PackedRow(
        tokens=np.array(row.tokens[:first_image], np.int16),
        blanked=np.array(blanked[:first_image], np.int16),
        positions=positions[:first_image].numpy().astype(np.int16),
        image_corner=tuple(positions[first_image].tolist()),
        groups=_groups(row, first_image, config),
        targets=(len(opened), row.gen.timestep_index),
        sources=tuple((span.timestep_index, span.vae[0], span.vit[0]) for span in row.cond),
    )


def _groups(row: TokenRow, length: int, config: HunyuanImage3Config) -> np.ndarray:
    groups = np.zeros(length, np.int16)
    for number, (start, stop) in enumerate(row.full_slices(config.cond_token_attn_type), start=1):
        groups[start : min(stop, length)] = number
    return groups


@dataclass(frozen=True)
class Bucket:
    """Examples of one form. Besides PackedRow's fields, padded and stacked: ``lengths [N]``; ``latents [N, C, h, w]`` of the pictures to draw; for
    each source ``source_latents[r] [N, C, h, w]`` and the vision tower's ``source_vit[r] [N, slots, D]``, both as prefill sees them.
    """

    form: Form
    grid: Grid
    tokens: Tensor
    blanked: Tensor
    positions: Tensor
    image_corner: Tensor
    groups: Tensor
    lengths: Tensor
    targets: Tensor
    sources: Tensor
    latents: Tensor
    source_latents: tuple[Tensor, ...]
    source_vit: tuple[Tensor, ...]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Bucket:
        return self._mapped(lambda tensor: tensor.to(device))

    def chosen(self, index: Tensor) -> Bucket:
        """The examples of ``index [B]``."""
        return self._mapped(lambda tensor: tensor[index])

    def _mapped(self, change) -> Bucket:
        def changed(value):
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
                return tuple(change(tensor) for tensor in value)
            return value

        return Bucket(**{field.name: changed(getattr(self, field.name)) for field in fields(self)})


def stack(form: Form, rows: list[PackedRow], latents: Tensor, source_latents: tuple[Tensor, ...], source_vit: tuple[Tensor, ...]) -> Bucket:
    """A bucket of rows of one form; padding tokens are PAD."""
    longest = -(-max(len(row.tokens) for row in rows) // LENGTH_STEP) * LENGTH_STEP

    def padded(name: str, fill: int) -> Tensor:
        arrays = [getattr(row, name) for row in rows]
        out = np.full((len(rows), longest, *arrays[0].shape[1:]), fill, np.int16)
        for place, array in zip(out, arrays, strict=True):
            place[: len(array)] = array
        return torch.from_numpy(out)

    return Bucket(
        form=form,
        grid=latents.shape[-2:],
        tokens=padded("tokens", PAD),
        blanked=padded("blanked", PAD),
        positions=padded("positions", 0),
        image_corner=torch.tensor([row.image_corner for row in rows]),
        groups=padded("groups", 0),
        lengths=torch.tensor([len(row.tokens) for row in rows]),
        targets=torch.tensor([row.targets for row in rows]),
        sources=torch.tensor([row.sources for row in rows]).reshape(len(rows), -1, 3),
        latents=latents,
        source_latents=source_latents,
        source_vit=source_vit,
    )


def patches_as_bytes(patches: Tensor) -> Tensor:
    """What `vit_patches` gives, fp32 in [-1, 1], as the bytes that it was made of; empty slots become grey."""
    return (patches * LEVELS + LEVELS).round().to(torch.uint8)


def patches_from_bytes(levels: Tensor, mask: Tensor) -> Tensor:
    """The patches again, exactly: ``levels [N, slots, D]``, ``mask [N, slots]``."""
    return (levels.float() - LEVELS) / LEVELS * mask[..., None]


def draw(picture: Picture) -> np.ndarray:
    """uint8 ``[H, W, 3]``."""
    return render(picture.scene, *size_of(picture.scene.aspect), picture.seed)
