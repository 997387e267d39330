"""The examples of a training run: drawn and packed by worker processes, encoded on the device, kept there as buckets.

A seed gives the same corpus whatever the number of workers. Imports torch, numpy and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.reference_images import encoder_input, posterior_sample, vit_patches
from ..models.hunyuan_image_3.vae import LOGVAR_RANGE, Vae
from ..models.hunyuan_image_3.vision import VisionTower
from .examples import Writing, draw_example
from .mini import mini_config
from .packing import Bucket, Form, PackedRow, draw, pack_row, stack
from .training_rows import TrainingRows, has_outer_planes

CHUNK = 384
"""Examples of one job: enough for whole batches on the device."""
ENCODED_TOGETHER = 64
Counts = Mapping[tuple[int, Writing], int]


class Encoders:
    """The trained VAE encoder and vision tower, for many pictures at once."""

    def __init__(self, config: HunyuanImage3Config, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """``weights`` by checkpoint key; only ``vae.*`` and ``vision_model.*`` without its pooling head are used."""
        self.config, self.device = config, device
        self._vae, self._tower = Vae(config.vae), VisionTower(config.vit)
        for prefix, module in (("vae.", self._vae), ("vision_model.", self._tower)):
            mine = {key.removeprefix(prefix): value.float() for key, value in weights.items() if key.startswith(prefix) and ".head." not in key}
            module.load_state_dict(mine)
            module.to(device).requires_grad_(False)
        assert not has_outer_planes(self._vae.encoder), "its kernels look at other frames, but pictures are encoded frame by frame here"

    @torch.no_grad()
    def latents(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """uint8 ``[B, 3, H, W]`` -> fp16 ``[B, C, h, w]``: a sample of the posterior, scaled, as prefill and sampling have it."""
        made = []
        for some in pixels.split(ENCODED_TOGETHER):
            clip = encoder_input(some.to(self.device)).unsqueeze(2).expand(-1, -1, self.config.vae.ffactor_temporal, -1, -1)
            mean, logvar = self._vae.encoder(clip, TrainingRows())[:, :, 0].chunk(2, dim=1)
            noise = torch.randn(mean.shape, generator=generator, device=self.device)
            vae = self.config.vae
            made.append(posterior_sample(mean, logvar.clamp(*LOGVAR_RANGE), noise, vae.scaling_factor, shift_factor=vae.shift_factor).half())
        return torch.cat(made)

    @torch.no_grad()
    def vision(self, patches: Tensor, mask: Tensor, grid: tuple[int, int]) -> Tensor:
        """``patches [B, slots, 768]``, ``mask [slots]`` -> fp16 ``[B, slots, D]``, before the aligner."""
        masks = mask.to(self.device).expand(patches.shape[0], -1)
        return self._tower(patches.to(self.device), masks, [grid] * patches.shape[0]).half()


@dataclass(frozen=True)
class _Job:
    pictures: int
    writing: Writing
    seeds: range
    scaling_factor: float


@dataclass(frozen=True)
class _Drawn:
    """One example, ready to be encoded: pictures uint8 ``[3, H, W]``, the result first; patches of the sources."""

    form: Form
    row: PackedRow
    pixels: list[np.ndarray]
    patches: list[np.ndarray]
    masks: list[np.ndarray]
    grids: list[tuple[int, int]]


def _drawn(job: _Job) -> list[_Drawn]:
    config, tokenizer = mini_config("instruct", job.scaling_factor)
    made = []
    for seed in job.seeds:
        example = draw_example(seed, pictures=job.pictures, writing=job.writing)
        sources = [draw(picture) for picture in example.sources]
        seen = [vit_patches(picture, config.vit) for picture in sources]
        made.append(
            _Drawn(
                Form(tuple(p.scene.aspect for p in example.sources), example.result.scene.aspect, job.writing),
                pack_row(example, tokenizer, config),
                [np.ascontiguousarray(picture.transpose(2, 0, 1)) for picture in (draw(example.result), *sources)],
                [patches.numpy().astype(np.float16) for patches, _, _ in seen],
                [mask.numpy() for _, mask, _ in seen],
                [grid for _, _, grid in seen],
            )
        )
    return made


def build_corpus(
    encoders: Encoders, counts: Counts, *, seed: int, workers: int, tell: Callable[[int, int], None] = lambda done, total: None
) -> list[Bucket]:
    """Buckets on the encoders' device, in a fixed order. ``counts``: how many examples of each (source pictures, writing)."""
    scaling = encoders.config.vae.scaling_factor
    jobs = [
        _Job(pictures, writing, range(start, min(start + CHUNK, first + count)), scaling)
        for (pictures, writing), count in counts.items()
        for first in (seed << 32,)
        for start in range(first, first + count, CHUNK)
    ]
    generator = torch.Generator(encoders.device).manual_seed(seed)
    rows: dict[Form, list[PackedRow]] = {}
    encoded: dict[Form, list[tuple[list[Tensor], list[Tensor]]]] = {}
    done, total = 0, sum(counts.values())
    for drawn in _in_order(jobs, workers):
        for form in dict.fromkeys(item.form for item in drawn):
            group = [item for item in drawn if item.form == form]
            rows.setdefault(form, []).extend(item.row for item in group)
            encoded.setdefault(form, []).append(_encode(encoders, group, generator))
        done += len(drawn)
        tell(done, total)
    return [_bucket(form, rows[form], encoded.pop(form), encoders.device) for form in sorted(rows, key=repr)]


class _Jobs(Dataset):
    """Drawn when asked for, so that a loader's processes draw."""

    def __init__(self, jobs: list[_Job]) -> None:
        self._jobs = jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, number: int) -> list[_Drawn]:
        return _drawn(self._jobs[number])


def _in_order(jobs: list[_Job], workers: int) -> Iterable[list[_Drawn]]:
    """The jobs' examples, drawn by so many processes. They are forks, which need not find the pack anew, and never touch the device."""
    processes = 0 if workers == 1 else min(workers, len(jobs))
    context = "fork" if processes else None
    return DataLoader(_Jobs(jobs), batch_size=None, collate_fn=lambda drawn: drawn, num_workers=processes, multiprocessing_context=context)


def _encode(encoders: Encoders, group: list[_Drawn], generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Latents of result and sources, and vision features of the sources."""
    pixels = [torch.from_numpy(np.stack(column)) for column in zip(*(item.pixels for item in group), strict=True)]
    latents = [encoders.latents(column, generator) for column in pixels]
    vision = []
    for number in range(len(group[0].patches)):
        patches = torch.from_numpy(np.stack([item.patches[number] for item in group])).float()
        vision.append(encoders.vision(patches, torch.from_numpy(group[0].masks[number]), group[0].grids[number]))
    return latents, vision


def _bucket(form: Form, rows: list[PackedRow], parts: list[tuple[list[Tensor], list[Tensor]]], device: torch.device) -> Bucket:
    latents = [torch.cat(column) for column in zip(*(latents for latents, _ in parts), strict=True)]
    vision = tuple(torch.cat(column) for column in zip(*(vision for _, vision in parts), strict=True)) if form.sources else ()
    return stack(form, rows, latents[0], tuple(latents[1:]), vision).to(device)
