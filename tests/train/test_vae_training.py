"""The VAE's training: where it starts, that it learns, that a seed repeats it, and what it hands over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phase_parallel.models.hunyuan_image_3.keys import checkpoint_shapes
from phase_parallel.models.hunyuan_image_3.vae import Vae
from phase_parallel.train.loop import LossLog, read_log
from phase_parallel.train.mini import mini_config
from phase_parallel.train.vae_start import LOGVAR, prepare
from phase_parallel.train.vae_training import Pictures, Stage, VaeRecipe, measure_vae, scaling_factor, train_vae

CPU = torch.device("cpu")
CONFIG, _ = mini_config("instruct", 1.0)
SHORT = VaeRecipe(stages=(Stage(4, 1, 32), Stage(2, 2, 48)), pictures=8, rate=1e-3, measured=1)


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    return Pictures(12, seed=3, device=CPU)


@pytest.fixture(scope="module")
def prepared() -> Vae:
    vae = Vae(CONFIG.vae)
    prepare(vae)
    return vae


def decibels(one: Tensor, other: Tensor) -> float:
    return float(-10 * torch.log10((one - other).square().mean() / 4))


def test_it_starts_with_the_means_of_small_squares(pictures: Pictures, prepared: Vae) -> None:
    """Through the inference path: no norm takes the colours away."""
    pixels = pictures.batch(3, 96)
    mean, logvar = prepared.encode(pixels)
    squares = F.interpolate(F.avg_pool2d(pixels, 8), scale_factor=8)
    assert decibels(prepared.decode(mean), squares) > 30
    assert (logvar - LOGVAR).abs().max() < 3


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What two runs of one seed return."""
    folder = tmp_path_factory.mktemp("vae")
    return [train_vae(CONFIG.vae, SHORT, device=CPU, seed=4, log=LossLog(folder / f"{run}.jsonl", every=2)) for run in range(2)]


def test_a_seed_repeats_the_training(twice) -> None:
    one, other = twice
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_it_hands_over_all_of_the_checkpoints_vae(twice) -> None:
    made = dict(twice[0])
    assert made.pop("scaling_factor").shape == ()
    assert {key: tuple(tensor.shape) for key, tensor in made.items()} == {
        key: shape for key, shape in checkpoint_shapes(CONFIG).items() if key.startswith("vae.")
    }
    assert not any(tensor[:, :, 0::2].any() for tensor in made.values() if tensor.shape[2:] == (3, 3, 3))


def test_training_lowers_the_error(tmp_path: Path) -> None:
    """Of the windows of one picture."""
    recipe = VaeRecipe(stages=(Stage(24, 2, 32),), pictures=1, rate=1e-3, measured=1)
    train_vae(CONFIG.vae, recipe, device=CPU, seed=1, log=LossLog(tmp_path / "log.jsonl", every=8))
    errors = [line["squared"] for line in read_log(tmp_path / "log.jsonl")]
    assert errors[-1] < 0.7 * errors[0], errors


def test_windows_hold_a_part_of_a_shape(pictures: Pictures) -> None:
    windows = pictures.batch(40, 48)
    assert windows.shape == (40, 3, 48, 48) and -1 <= windows.min() < windows.max() <= 1
    plain = (windows == windows[:, :, :1, :1]).flatten(1).all(1)
    assert plain.float().mean() < 0.1, "a large shape fills one now and then; windows laid anywhere would be plain half of the time"


def test_a_whole_batch_has_one_aspect_of_the_three(pictures: Pictures) -> None:
    assert {tuple(pictures.batch(2, None).shape[2:]) for _ in range(20)} == {(256, 256), (192, 320), (320, 192)}


def test_the_scaling_factor_makes_latents_of_unit_size(pictures: Pictures) -> None:
    def latents_of(pixels: Tensor) -> tuple[Tensor, Tensor]:
        return F.avg_pool2d(pixels, 16) * 5, torch.full((1, 3, 1, 1), -30.0)

    factor = scaling_factor(Passing(encode=latents_of), pictures, 20, torch.Generator().manual_seed(0))
    latents = torch.cat([latents_of(pictures.batch(1, None))[0].flatten() for _ in range(20)])
    assert float((latents * factor).std()) == pytest.approx(1, abs=0.2)


class Passing(nn.Module):
    """In the place of a VAE: hands the picture through."""

    def __init__(self, encode=lambda x: (x, torch.full_like(x, -30.0)), decode=lambda x: x) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.encode, self.decode = encode, decode


def test_the_measure_tells_a_perfect_from_a_blind_vae() -> None:
    perfect, blind = measure_vae(Passing(), 4, seed=0), measure_vae(Passing(decode=torch.zeros_like), 4, seed=0)
    assert perfect.exact == 1 and perfect.worst > 55
    assert blind.exact == 0 and blind.psnr < 12


def test_a_scaled_recipe_is_shorter_in_all_stages() -> None:
    short = VaeRecipe(stages=(Stage(2400, 32, 64), Stage(1200, 8, None)), pictures=3000).scaled(0.001)
    assert [stage.steps for stage in short.stages] == [3, 2] and short.pictures == 3
