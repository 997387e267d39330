"""The examples of a training run: drawn and packed by worker processes, encoded on the device, kept there as buckets.

A seed gives the same corpus whatever the number of workers. What they draw is fifty gigabytes: it comes as bytes, in tensors that processes share.
Imports torch, numpy and its neighbours.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.reference_images import encoder_input, posterior_sample, vit_patches
from ..models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from ..models.hunyuan_image_3.vae import LOGVAR_RANGE, Vae
from ..models.hunyuan_image_3.vision import VisionTower
from .errors import MiniError
from .examples import Example, Writing, draw_example
from .mini import mini_config
from .packing import Bucket, Form, PackedRow, draw, pack_row, patches_as_bytes, patches_from_bytes, stack
from .training_rows import TrainingRows, has_outer_planes

CHUNK = 384
"""Examples of one job: enough for whole batches on the device."""
JOB_BYTES = 300_000_000
"""More than a job with two source pictures takes in shared memory."""
SHARED_MEMORY = "/dev/shm"
ENCODED_TOGETHER = 128
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
        """uint8 ``[B, 3, H, W]`` -> fp16 ``[B, C, h, w]``: a sample of the posterior, scaled, as prefill and sampling have it. A GPU encodes in
        fp16, which moves a mean by a tenth of the posterior's noise at most (seen with a trained VAE)."""
        made = []
        for some in pixels.split(ENCODED_TOGETHER):
            clip = encoder_input(some.to(self.device)).unsqueeze(2).expand(-1, -1, self.config.vae.ffactor_temporal, -1, -1)
            with torch.autocast(self.device.type, dtype=torch.float16, enabled=self.device.type == "cuda"):
                moments = self._vae.encoder(clip, TrainingRows())[:, :, 0]
            mean, logvar = moments.float().chunk(2, dim=1)
            noise = torch.randn(mean.shape, generator=generator, device=self.device)
            vae = self.config.vae
            made.append(posterior_sample(mean, logvar.clamp(*LOGVAR_RANGE), noise, vae.scaling_factor, shift_factor=vae.shift_factor).half())
        return torch.cat(made)

    @torch.no_grad()
    def vision(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """uint8 ``patches [B, slots, 768]``, of which the first of each picture fill the grid -> fp16 ``[B, slots, D]``, before the aligner."""
        count, slots, _ = patches.shape
        masks = (torch.arange(slots, device=self.device) < grid[0] * grid[1]).expand(count, -1)
        return self._tower(patches_from_bytes(patches.to(self.device), masks), masks, [grid] * count).half()


@dataclass(frozen=True)
class _Job:
    pictures: int
    writing: Writing
    seeds: range
    scaling_factor: float


@dataclass(frozen=True)
class _Seen:
    """A source picture of N examples as the vision tower gets it: patches uint8 ``[N, slots, 768]``."""

    patches: Tensor
    grid: tuple[int, int]


@dataclass(frozen=True)
class _Drawn:
    """N examples of one form, ready to be encoded: pictures uint8 ``[N, 3, H, W]``, the result first; the sources once more for the tower."""

    form: Form
    rows: list[PackedRow]
    pixels: list[Tensor]
    seen: list[_Seen]


def _drawn(job: _Job) -> list[_Drawn]:
    """The job's examples by form."""
    config, tokenizer = mini_config("instruct", job.scaling_factor)
    groups: dict[Form, list[Example]] = {}
    for seed in job.seeds:
        example = draw_example(seed, pictures=job.pictures, writing=job.writing)
        form = Form(tuple(p.scene.aspect for p in example.sources), example.result.scene.aspect, job.writing)
        groups.setdefault(form, []).append(example)
    return [_drawn_group(form, examples, tokenizer, config) for form, examples in groups.items()]


def _drawn_group(form: Form, examples: list[Example], tokenizer: HunyuanTokenizer, config: HunyuanImage3Config) -> _Drawn:
    results, *sources = [
        np.stack([draw(picture) for picture in column]) for column in zip(*((e.result, *e.sources) for e in examples), strict=True)
    ]
    seen = []
    for column in sources:
        patches, _, grids = zip(*(vit_patches(picture, config.vit) for picture in column), strict=True)
        seen.append(_Seen(torch.stack([patches_as_bytes(part) for part in patches]), grids[0]))
    pixels = [torch.from_numpy(column).permute(0, 3, 1, 2).contiguous() for column in (results, *sources)]
    return _Drawn(form, [pack_row(example, tokenizer, config) for example in examples], pixels, seen)


def drawing_processes(workers: int) -> int:
    """``workers``, or as many as shared memory has room for a job of, but at least 1, which needs none."""
    return max(1, min(workers, shutil.disk_usage(SHARED_MEMORY).free // JOB_BYTES))


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
        for group in drawn:
            rows.setdefault(group.form, []).extend(group.rows)
            encoded.setdefault(group.form, []).append(_encode(encoders, group, generator))
            done += len(group.rows)
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
    processes = min(workers, len(jobs))
    if processes < 2:
        return DataLoader(_Jobs(jobs), batch_size=None, collate_fn=lambda drawn: drawn)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each shared tensor is an open file, and usually 1,024 are allowed
    forked = {"num_workers": processes, "multiprocessing_context": "fork", "prefetch_factor": 1}
    return DataLoader(_Jobs(jobs), batch_size=None, collate_fn=lambda drawn: drawn, **forked)


def _encode(encoders: Encoders, group: _Drawn, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Latents of result and sources, and vision features of the sources."""
    return [encoders.latents(column, generator) for column in group.pixels], [encoders.vision(s.patches, s.grid) for s in group.seen]


def _bucket(form: Form, rows: list[PackedRow], parts: list[tuple[list[Tensor], list[Tensor]]], device: torch.device) -> Bucket:
    latents = [torch.cat(column) for column in zip(*(latents for latents, _ in parts), strict=True)]
    vision = tuple(torch.cat(column) for column in zip(*(vision for _, vision in parts), strict=True)) if form.sources else ()
    if not all(bool(tensor.isfinite().all()) for tensor in (*latents, *vision)):
        raise MiniError("The encoders gave numbers that are not finite; remove the stages vae and tower, and they are trained again.")
    return stack(form, rows, latents[0], tuple(latents[1:]), vision).to(device)
