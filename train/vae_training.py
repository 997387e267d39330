"""Trains the picture autoencoder: the pack's own `Vae` on rendered scenes, first on windows around the shapes, then on whole pictures.

Letters: B pictures, C latent channels, H x W the picture, h x w = H/16 x W/16. Pixels are fp32 in [-1, 1]. Imports torch, numpy and its neighbours.

Windows come first because a shape's edge is what has to be learnt and most of a picture is plain; whole pictures come last because the norms and the
attention look at all of a picture, and a window has other means and scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from torch import Tensor

from ..models.hunyuan_image_3.config import VaeConfig
from ..models.hunyuan_image_3.reference_images import encoder_input, posterior_sample
from ..models.hunyuan_image_3.vae import LOGVAR_RANGE, Vae
from .drawing import render
from .gradients import Gradients
from .judge import judge
from .loop import Average, LossLog, Stepper, seeded
from .scenes import ASPECTS, random_scene, size_of
from .training_rows import TrainingRows
from .vae_start import LOGVAR, prepare

FIRST_SEED = 1_000_000


@dataclass(frozen=True)
class Stage:
    """``steps`` with ``batch`` windows of ``window`` x ``window`` pixels, or with as many whole pictures (None)."""

    steps: int
    batch: int
    window: int | None


@dataclass(frozen=True)
class VaeRecipe:
    """``pictures`` are rendered once, from the training side of the split; ``rate``: the highest learning rate, one cosine over all stages."""

    stages: tuple[Stage, ...] = (Stage(2000, 32, 64), Stage(900, 8, None))
    pictures: int = 3000
    rate: float = 5e-4
    measured: int = 128
    """Pictures that the scaling factor is taken from."""
    squares: float = 2.0
    """Weight of the squared error beside the absolute one."""
    calm: float = 1e-4
    """Weight of the squares of the latents and of how far the logarithms of their variances are from LOGVAR. It stands in for a divergence from the
    unit normal, which would want as much noise as it can get."""
    jitter: float = 0.05
    """More noise in the latents, up to this deviation: what the trunk draws is never exactly a latent, and must be decoded all the same."""

    def scaled(self, share: float) -> VaeRecipe:
        """A shorter run, to try the program."""
        stages = tuple(replace(stage, steps=math.ceil(stage.steps * share)) for stage in self.stages)
        counts = {name: math.ceil(getattr(self, name) * share) for name in ("pictures", "measured")}
        return replace(self, stages=stages, **counts)


class Pictures:
    """Rendered scenes as uint8 by aspect, on the device of the training; batches are drawn by a seed."""

    def __init__(self, count: int, *, seed: int, device: torch.device) -> None:
        self._random = Random(f"vae/{seed}")
        drawn: dict[str, list[np.ndarray]] = {}
        first = FIRST_SEED * (seed + 1)
        for number in range(first, first + count):
            scene = random_scene(number, unseen=False)
            drawn.setdefault(scene.aspect, []).append(render(scene, *size_of(scene.aspect), number))
        self._drawn = {aspect: _stacked(drawn[aspect]).to(device) for aspect in ASPECTS if aspect in drawn}
        # A picture's corner is always background.
        self._marks = {aspect: [np.argwhere((picture != picture[0, 0]).any(-1)) for picture in some] for aspect, some in drawn.items()}

    def batch(self, size: int, window: int | None) -> Tensor:
        """``[size, 3, H, W]``: whole pictures of one aspect, or windows that hold a part of a shape each."""
        if window is not None:
            return encoder_input(torch.stack([self._window(window) for _ in range(size)]))
        some = self._drawn[self._random.choice(list(self._drawn))]
        return encoder_input(torch.stack([some[self._random.randrange(len(some))] for _ in range(size)]))

    def _window(self, side: int) -> Tensor:
        aspect = self._random.choice(list(self._drawn))
        number = self._random.randrange(len(self._drawn[aspect]))
        picture, marks = self._drawn[aspect][number], self._marks[aspect][number]
        y, x = marks[self._random.randrange(len(marks))].tolist()
        top = min(max(y - self._random.randrange(side), 0), picture.shape[1] - side)
        left = min(max(x - self._random.randrange(side), 0), picture.shape[2] - side)
        return picture[:, top : top + side, left : left + side]


def _stacked(pictures: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def train_vae(
    config: VaeConfig,
    recipe: VaeRecipe,
    *,
    device: torch.device,
    seed: int,
    log: LossLog,
) -> dict[str, Tensor]:
    """All tensors `vae.*` of the checkpoint, fp32, on the device, and `scaling_factor` (a scalar): the running mean of the training."""
    with seeded(seed):
        vae = Vae(config)
        prepare(vae)
    vae.to(device)
    pictures, noise = Pictures(recipe.pictures, seed=seed, device=device), torch.Generator(device).manual_seed(seed)
    steps = sum(stage.steps for stage in recipe.stages)
    stepper = Stepper(vae.parameters(), steps=steps, highest=recipe.rate)
    average = Average(vae, decay=max(0.9, 1 - 20 / steps))
    gradients = Gradients(vae.parameters(), lambda shape, pixels: _loss(vae, pixels, recipe, noise), noise, record=device.type == "cuda")
    for stage in recipe.stages:
        for _ in range(stage.steps):
            pixels = pictures.batch(stage.batch, stage.window)
            told = gradients.of(pixels.shape, pixels)
            gradient = stepper.follow()
            average.update(vae)
            log.add("vae", stepper.step, **told, gradient=gradient)
    stepper.check()
    vae.load_state_dict(average.weights())
    return _named(average) | {"scaling_factor": scaling_factor(vae, pictures, recipe.measured, noise)}


def _named(average: Average) -> dict[str, Tensor]:
    return {f"vae.{name}": tensor for name, tensor in average.weights().items()}


def _loss(vae: Vae, pixels: Tensor, recipe: VaeRecipe, noise: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    rows, frames = TrainingRows(), vae.config.ffactor_temporal
    moments = vae.encoder(pixels[:, :, None].expand(-1, -1, frames, -1, -1), rows)[:, :, 0]
    mean, logvar = moments.chunk(2, dim=1)
    logvar = logvar.clamp(*LOGVAR_RANGE)
    jitter = recipe.jitter * torch.rand((len(mean), 1, 1, 1), generator=noise, device=mean.device)
    variance = logvar.exp() + jitter.square()
    latent = mean + variance.sqrt() * torch.randn(mean.shape, generator=noise, device=mean.device)
    error = vae.decoder(latent[:, :, None], rows)[:, :, -1] - pixels
    absolute, squared = error.abs().mean(), error.square().mean()
    calm = mean.square().mean() + (logvar - LOGVAR).square().mean()
    loss = absolute + recipe.squares * squared + recipe.calm * calm
    return loss, {"absolute": absolute, "squared": squared, "latents": mean.std(), "noise": logvar.mul(0.5).exp().mean()}


@torch.no_grad()
def scaling_factor(vae: Vae, pictures: Pictures, count: int, noise: torch.Generator) -> Tensor:
    """What brings the drawn latents of ``count`` pictures to a standard deviation of 1."""
    drawn = []
    for _ in range(count):
        mean, logvar = vae.encode(pictures.batch(1, None))
        drawn.append((mean + torch.exp(0.5 * logvar) * torch.randn(mean.shape, generator=noise, device=mean.device)).flatten())
    return 1 / torch.cat(drawn).std()


@dataclass(frozen=True)
class Fidelity:
    """How well pictures of scenes that no training shows survive the encoder, a draw from its posterior and the decoder, as inference runs them."""

    exact: float
    """Share of pictures in which the judge finds everything as it should be."""
    psnr: float
    """Mean over the pictures, in dB."""
    worst: float
    """Of the worst picture, in dB."""


def measure_vae(vae: Vae, count: int, *, seed: int) -> Fidelity:
    """On ``count`` pictures. The VAE may be on any device."""
    device = next(vae.parameters()).device
    exact, decibels = 0, []
    noise = torch.Generator().manual_seed(seed)
    for number in range(seed, seed + count):
        scene = random_scene(number, unseen=True)
        picture = render(scene, *size_of(scene.aspect), number)
        mean, logvar = vae.encode(encoder_input(torch.from_numpy(picture).permute(2, 0, 1)[None]).to(device))
        latent = posterior_sample(mean, logvar, torch.randn(mean.shape, generator=noise).to(device), scaling_factor=1.0)
        again = vae.decode(latent)[0].permute(1, 2, 0).clamp(-1, 1)
        levels = ((again + 1) * 127.5).round().to("cpu", torch.uint8).numpy()
        exact += judge(levels, scene).score.exact
        decibels.append(10 * math.log10(255**2 / max(float(np.square(levels.astype(np.float64) - picture).mean()), 1e-6)))
    return Fidelity(exact / count, sum(decibels) / count, min(decibels))
