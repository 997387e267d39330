"""Timestep embedders and the two convolution blocks between latents and the token stream.

Letters: B rows, C latent channels, H hidden size, h*w the token grid (picture / 16).

Attribute names are the checkpoint's keys. The dtype flow is that of a bf16 autocast run: linears and
convolutions work in the dtype of their weights, norms and the modulation in fp32. With fp32 weights
everything is fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.group_norm import GROUPS, NormSilu, norm_silu_eager

SINUSOID_DIM = 256
MAX_PERIOD = 10000.0
NUM_GROUPS = GROUPS


class GroupNorm(nn.GroupNorm):
    """Group norm whose arithmetic and result are fp32, whatever the dtype of input and weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps)


class LayerNorm(nn.LayerNorm):
    """Layer norm whose arithmetic and result are fp32, whatever the dtype of input and weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)


class Linear(nn.Linear):
    """Linear layer that casts its input to the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Conv2d(nn.Conv2d):
    """Convolution that casts its input to the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def timestep_embedding(t: Tensor, dim: int = SINUSOID_DIM) -> Tensor:
    """Sinusoid of raw timesteps: t [B] any dtype -> [B, dim] fp32, the dim/2 cosines first, then the sines.

    Frequencies are exp(-ln(10000) * i / (dim/2)). t reaches 1000, so the rounding of a frequency is visible
    in the result at 1e-5: keep this order of operations.
    """
    half = dim // 2
    index = torch.arange(half, dtype=torch.float32, device=t.device)
    frequencies = torch.exp(-math.log(MAX_PERIOD) * index / half)
    angles = t.float()[:, None] * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepEmbedder(nn.Module):
    """One of timestep_emb, time_embed, time_embed_2 and, in Distil, guidance_emb and timestep_r_emb."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            Linear(SINUSOID_DIM, hidden_size),
            nn.GELU(),
            Linear(hidden_size, hidden_size),
        )

    def forward(self, t: Tensor) -> Tensor:
        """t [B], the raw value in 0..1000 in fp32 -> [B, H] in the dtype of the weights."""
        return self.mlp(timestep_embedding(t))


def norm_silu_convolution(
    layers: nn.Sequential, x: Tensor, norm_silu: NormSilu, modulation: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """A group norm, SiLU and a convolution, the first and the last of ``layers``; what is before the convolution is one operation."""
    norm, convolution = layers[0], layers[-1]
    return convolution(norm_silu(x, norm.weight, norm.bias, norm.eps, convolution.weight.dtype, modulation))


class ResBlock(nn.Module):
    """Residual block whose second norm is scaled and shifted by an embedding."""

    norm_silu: NormSilu = staticmethod(norm_silu_eager)

    def __init__(self, in_channels: int, out_channels: int, *, emb_channels: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            GroupNorm(NUM_GROUPS, in_channels, eps=1e-5),
            nn.SiLU(),
            Conv2d(in_channels, out_channels, 3, padding=1),
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), Linear(emb_channels, 2 * out_channels))
        # Position 2 is a dropout in training; it stays so that the convolution keeps its key `out_layers.3`.
        self.out_layers = nn.Sequential(
            GroupNorm(NUM_GROUPS, out_channels, eps=1e-5),
            nn.SiLU(),
            nn.Identity(),
            Conv2d(out_channels, out_channels, 3, padding=1),
        )
        same = in_channels == out_channels
        self.skip_connection = nn.Identity() if same else Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """x [B, in, h, w], e [B, emb] -> [B, out, h, w] in the dtype of the weights."""
        scale, shift = self.emb_layers(e).float().chunk(2, dim=1)
        u = norm_silu_convolution(self.in_layers, x, self.norm_silu)
        u = norm_silu_convolution(self.out_layers, u, self.norm_silu, (scale, shift))
        return self.skip_connection(x).to(u.dtype) + u


class PatchEmbed(nn.Module):
    """Noisy or clean latent -> one hidden vector per latent pixel (checkpoint prefix `patch_embed.`)."""

    def __init__(self, latent_channels: int, *, inner_channels: int, hidden_size: int) -> None:
        super().__init__()
        self.model = nn.ModuleList(
            [
                Conv2d(latent_channels, inner_channels, 3, padding=1),
                ResBlock(inner_channels, hidden_size, emb_channels=hidden_size),
            ]
        )

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """x [B, C, h, w], e = time_embed(t) [B, H] -> [B, h*w, H], row-major, in the dtype of the weights."""
        conv, block = self.model
        return block(conv(x), e).flatten(2).transpose(1, 2)


class FinalLayer(nn.Module):
    """Hidden vectors of the picture's tokens -> velocity (checkpoint prefix `final_layer.`)."""

    def __init__(self, latent_channels: int, *, inner_channels: int, hidden_size: int) -> None:
        super().__init__()
        self.model = nn.ModuleList(
            [
                ResBlock(hidden_size, inner_channels, emb_channels=hidden_size),
                nn.Sequential(
                    GroupNorm(NUM_GROUPS, inner_channels, eps=1e-5),
                    nn.SiLU(),
                    Conv2d(inner_channels, latent_channels, 3, padding=1),
                ),
            ]
        )

    def forward(self, hidden: Tensor, e: Tensor, h: int, w: int) -> Tensor:
        """hidden [B, h*w, H] row-major, e = time_embed_2(t) [B, H] -> velocity [B, C, h, w].

        It has the dtype of the weights; guidance and the Euler step want fp32, so the caller converts.
        """
        block, head = self.model
        x = hidden.transpose(1, 2).unflatten(2, (h, w))
        return norm_silu_convolution(head, block(x, e), block.norm_silu)
