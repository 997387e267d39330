"""One denoise step of ``phase-parallel bench denoise``: its rows, its time, its kernels, and how evenly the experts share the tokens.

A step is what the sampling loop does between two looks at the host: the velocities of all rows, guidance, and Euler's step. The prefixes are in K/V caches.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..kernels.router import Routing
from ..models.hunyuan_image_3.denoise import CfgMode, Denoiser, DenoiseRow, guide
from ..models.hunyuan_image_3.model import HunyuanImage3Model, StepInputs
from ..models.hunyuan_image_3.prefix import PrefixStore
from ..models.hunyuan_image_3.schedule import euler_step, flow_sigmas
from ..models.hunyuan_image_3.sequence import ImageRows, build_image_rows
from ..models.hunyuan_image_3.token_row import Grid, TokenRow
from .ar import LETTERS, Task
from .denoise_costs import collectives_ms, convolution_flops, denoise_flops, floor_ms
from .errors import BenchError
from .kernel_groups import by_group
from .one_rank import OneRankCommunicator, Transfer
from .pictures import cond_images, features_of
from .release import Release
from .timing import Spread, kernel_split, synchronize, wall_milliseconds

Size = tuple[int, int]
"""Height and width of a picture in pixels."""

GUIDANCE = 2.5
STEPS = 50
FLOW_SHIFT = 3.0


@dataclass(frozen=True)
class StepRow:
    """One line of the table. ``floor_ms``: this rank's matrix arithmetic at full speed; ``convolution_floor_ms`` that of the convolutions, which the
    floor leaves out. ``left_out``: the collectives that did not run, ``left_out_ms`` what they cost by other measurements, in no other number here."""

    task: str
    prefix: int
    height: int
    width: int
    image_tokens: int
    scheme: str
    plan: str
    moe: str
    cfg: str
    launch: str
    """eager: every kernel by the host; graph: one recorded step, replayed."""
    reduction: str
    """How the ranks' summands were added up: group or peer memory."""
    ms_per_step: Spread
    ms_device: float
    floor_ms: float
    convolution_floor_ms: float
    groups_us: dict[str, float]
    split_us: dict[str, float]
    left_out: dict[str, int]
    left_out_ms: float | None
    busiest_expert: float
    """Tokens of the busiest expert of a layer over the mean, averaged over the layers."""
    peak_gb: float
    digest: str
    """Of the latent after one step; equal on all ranks, and launched or replayed."""


def image_rows(built: Release, task: Task, size: Size | None = None) -> ImageRows:
    """Rows of a picture of ``size`` (height, width), else of a square of the model's base size, behind exactly ``task.tokens`` tokens."""
    rows = _image_rows(built, task, image_prompt(built, task))
    if size is None:
        return rows
    grid = tuple(side // built.config.vae.ffactor_spatial for side in size)
    cond, uncond = (with_grid(row, grid) for row in (rows.cond, rows.uncond))
    return replace(rows, cond=cond, uncond=uncond, height=size[0], width=size[1])


def image_prompt(built: Release, task: Task) -> str:
    """The prompt of these rows.

    Raises:
        BenchError: it would need more letters than there are.
    """
    shortest = _image_rows(built, task, LETTERS[0]).cond.prefix_length
    letters = max(1, task.tokens - shortest + 1)
    if letters > len(LETTERS):
        raise BenchError(f"a prefix of {task.tokens} tokens needs a longer text than the bench has; choose one up to {len(LETTERS) + shortest - 1}.")
    return "".join(LETTERS[:letters])


def with_grid(row: TokenRow, grid: Grid) -> TokenRow:
    """The row with another picture behind the same prefix. No token of the model's size table names every size, and a step's cost asks for none."""
    start, stop = row.gen.image
    end = start + grid[0] * grid[1]
    tokens = (*row.tokens[:start], *row.tokens[start : start + 1] * (end - start), *row.tokens[stop:])
    return replace(row, tokens=tokens, gen=replace(row.gen, image=(start, end), grid=grid))


def _image_rows(built: Release, task: Task, prompt: str) -> ImageRows:
    side = built.config.image_base_size
    pictures = cond_images(built.config, task.pictures)
    return build_image_rows(
        built.tokenizer, built.config, prompt=prompt, system_prompt=None, cot_text=None, cond_images=pictures, height=side, width=side
    )


class GuidedStep:
    """A call is one step from the same noise, with guidance. The first one computes the prefixes."""

    def __init__(self, model: HunyuanImage3Model, built: Release, task: Task, cfg: CfgMode, size: Size | None = None):
        rows = image_rows(built, task, size)
        features = features_of(model, task.pictures)
        self.model = model
        self.height, self.width = rows.height, rows.width
        self.prefix = rows.cond.prefix_length
        self.block = rows.cond.gen.image[1] - rows.cond.gen.timestep_index
        self.rows = [DenoiseRow(rows.cond, "cond", features), DenoiseRow(rows.uncond, "uncond", features)]
        factor = built.config.vae.ffactor_spatial
        shape = (1, built.config.vae.latent_channels, rows.height // factor, rows.width // factor)
        self.noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.device)
        prefixes = PrefixStore(model)
        self.denoisers = {"eager": Denoiser(model, prefixes, cfg_mode=cfg, graphs=False)}
        recording = Denoiser(model, prefixes, cfg_mode=cfg, alone=isinstance(model.comm, OneRankCommunicator))
        if recording.records:
            self.denoisers["graph"] = recording
        sigmas = flow_sigmas(STEPS, FLOW_SHIFT)
        self._sigma, self._after = float(sigmas[0]), float(sigmas[1])

    def velocity(self, launch: str) -> torch.Tensor:
        """``[2, C, h, w]``, the conditional branch first."""
        return self.denoisers[launch].velocity(self.rows, self.noise, StepInputs(1000.0 * self._sigma, 1000.0 * self._after))

    def __call__(self, launch: str) -> torch.Tensor:
        velocity = self.velocity(launch)
        return euler_step(self.noise, guide(velocity[:1], velocity[1:], GUIDANCE), self._sigma, self._after)

    @property
    def own_rows(self) -> int:
        """Rows that this rank computes; where guidance is split over ranks, one branch."""
        return len(self.rows) // self.model.plan.cfg_size

    @property
    def image_tokens(self) -> int:
        return self.noise.shape[-1] * self.noise.shape[-2]


def measure_step(
    model: HunyuanImage3Model,
    built: Release,
    task: Task,
    cfg: CfgMode,
    *,
    size: Size | None = None,
    scheme: str,
    moe: str,
    repeats: int,
    barrier: Callable[[], None],
) -> Iterator[StepRow]:
    """Launched by the host, and then replayed where that can be; of a given ``size`` only the latter, since there are many."""
    step = GuidedStep(model, built, task, cfg, size)
    step("eager")
    busiest = _busiest_expert(model, step)
    left_out = _left_out(model, step)
    about = {
        "task": task.name,
        "prefix": step.prefix,
        "height": step.height,
        "width": step.width,
        "image_tokens": step.image_tokens,
        "scheme": scheme,
        "plan": model.plan.describe(),
        "moe": moe,
        "cfg": cfg,
        "floor_ms": floor_ms(denoise_flops(model, step.own_rows, step.prefix, step.block)),
        "convolution_floor_ms": floor_ms(convolution_flops(model, 1, step.own_rows, step.image_tokens)),
        "left_out": {f"{t.kind} of {t.ranks} ranks, {t.nbytes} bytes": count for t, count in left_out.items()},
        "left_out_ms": collectives_ms(left_out),
        "busiest_expert": busiest,
        "reduction": model.row_reduction().name,
    }
    for launch in step.denoisers if size is None else list(step.denoisers)[-1:]:
        yield StepRow(launch=launch, **about, **_timed(step, launch, repeats, barrier))


def _timed(step: GuidedStep, launch: str, repeats: int, barrier: Callable[[], None]) -> dict[str, Any]:
    device = step.noise.device
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    spread = wall_milliseconds(lambda: step(launch), device, repeats=repeats, barrier=barrier)
    split = kernel_split(lambda: step(launch), device)
    digest = hashlib.sha256(step(launch).cpu().numpy().tobytes()).hexdigest()[:16]
    step.denoisers[launch].require()
    return {
        "ms_per_step": spread,
        "ms_device": sum(split.values()) / 1e3,
        "groups_us": by_group(split),
        "split_us": split,
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0,
        "digest": digest,
    }


def _left_out(model: HunyuanImage3Model, step: GuidedStep) -> Counter[Transfer]:
    """What one step would exchange with peers that are not there; nothing where they are."""
    if not isinstance(model.comm, OneRankCommunicator):
        return Counter()
    model.comm.left_out.clear()
    step("eager")
    return model.comm.left_out.copy()


def _busiest_expert(model: HunyuanImage3Model, step: GuidedStep) -> float:
    """Random weights could send all tokens to a few experts, which would be another measurement."""
    weights, shares = model.weights["denoise"], []

    def route(x: torch.Tensor, router: torch.Tensor, topk: int, keep_logits: bool) -> Routing:
        routing = weights.kernels.route(x, router, topk, keep_logits)
        counts = torch.bincount(routing.ids.flatten().long(), minlength=router.shape[0])
        shares.append(float(counts.max() * router.shape[0] / counts.sum()))
        return routing

    whole = model.weights
    model.weights = {**whole, "denoise": replace(weights, kernels=replace(weights.kernels, route=route))}
    try:
        step("eager")
    finally:
        model.weights = whole
    return sum(shares) / len(shares)
