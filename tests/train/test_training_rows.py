"""The differentiable form of the VAE is the VAE: the same results, and gradients that finite differences confirm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phase_parallel.models.hunyuan_image_3.config import VaeConfig
from phase_parallel.models.hunyuan_image_3.vae import Vae
from phase_parallel.train.training_rows import TrainingRows, drop_outer_planes


def new_vae(frames: int) -> Vae:
    """All weights random, also those that a new network has at 0 or 1."""
    vae = Vae(VaeConfig((32,) * 5, 3, 3, 16, 1, 16, frames, 1.0, None))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in vae.named_parameters():
            tensor.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.05, generator=generator)
    return vae


def pixels(height: int, width: int) -> Tensor:
    return torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def encoded(vae: Vae, picture: Tensor) -> Tensor:
    frames = vae.config.ffactor_temporal
    return vae.encoder(picture[:, :, None].expand(-1, -1, frames, -1, -1), TrainingRows())[:, :, 0]


@pytest.mark.parametrize("frames", [1, 2])
def test_training_and_inference_compute_the_same(frames: int) -> None:
    vae = new_vae(frames)
    if frames > 1:
        drop_outer_planes(vae)
    picture = pixels(32, 48)
    mean, logvar = vae.encode(picture)
    assert logvar.abs().max() < 20, "within the range that inference cuts it to"
    torch.testing.assert_close(encoded(vae, picture), torch.cat([mean, logvar], dim=1), atol=1e-5, rtol=1e-5)
    decoded = vae.decoder(mean[:, :, None], TrainingRows())[:, :, -1]
    torch.testing.assert_close(decoded, vae.decode(mean), atol=1e-5, rtol=1e-5)


def reconstruction_loss(vae: Vae, picture: Tensor) -> Tensor:
    mean = encoded(vae, picture)[:, :16]
    return (vae.decoder(mean[:, :, None], TrainingRows())[:, :, -1] - picture).square().mean()


def test_gradients_agree_with_finite_differences() -> None:
    vae, picture = new_vae(2), pixels(32, 32)
    reconstruction_loss(vae, picture).backward()
    generator = torch.Generator().manual_seed(2)
    ways = [torch.randn(p.shape, generator=generator) for p in vae.parameters()]
    expected = sum(float((p.grad * way).sum()) for p, way in zip(vae.parameters(), ways, strict=True))
    sides = []
    for length in (1e-3, -2e-3):
        with torch.no_grad():
            for tensor, way in zip(vae.parameters(), ways, strict=True):
                tensor.add_(length * way)
            sides.append(float(reconstruction_loss(vae, picture)))
    assert (sides[0] - sides[1]) / 2e-3 == pytest.approx(expected, rel=0.03)


def test_all_weights_but_the_outer_planes_get_gradients() -> None:
    vae = new_vae(2)
    reconstruction_loss(vae, pixels(32, 32)).backward()
    logvar_only = ("encoder.conv_out",)
    for name, tensor in vae.named_parameters():
        if tensor.ndim == 5 and tensor.shape[2] == 3:
            assert tensor.grad[:, :, 0::2].abs().max() == 0, name
            assert tensor.grad[:, :, 1].flatten(1).any(1).all() or name.startswith(logvar_only), name
        elif name != "encoder.mid.attn_1.k.bias" and name != "decoder.mid.attn_1.k.bias":  # softmax does not see it
            assert tensor.grad.any(), name


def test_dropping_leaves_the_middle_plane() -> None:
    conv = nn.Conv3d(2, 2, 3)
    before = conv.weight[:, :, 1].clone()
    drop_outer_planes(conv)
    assert torch.equal(conv.weight[:, :, 1], before)
    assert not conv.weight[:, :, 0::2].any()
