"""The weights that the VAE's training starts from: a network that already hands on the mean colour of each 8 x 8 pixels, and nothing else.

Residual branches add nothing at first. Every change of size is one linear map (a convolution and a fixed shortcut); three of its channels are set to
carry red, green and blue, what the shortcut adds to them is taken away again, and the other channels stay random. Imports torch and the VAE.

The norms are why this is worth it: 32 groups over 32 channels take away each channel's mean and scale over the picture, and no shortcut leads around the
decoder's last one, so that a plain background would lose its colour there. The way out are the two frames of the VAE, over both of which a norm goes and
of which only the last is shown: the first is used as a reference. It holds the negative of the last one, and a chequered pattern of a known height that
outweighs both; so every norm finds mean 0 and nearly the same scale in each picture.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..models.hunyuan_image_3.vae import Decoder, Encoder, Vae
from ..models.hunyuan_image_3.vae_blocks import Downsample, Upsample
from .training_rows import drop_outer_planes

COLOURS = 3
PIXELS = ((0, 0), (0, 1), (1, 0), (1, 1))
"""(row, column) of the four pixels that one unfolds to, or that are folded into one."""
LOGVAR = -7.0
"""Of the latents, whose own size is about 1."""
PATTERN = 4.0
"""Height of the reference's pattern, where a colour is in [-1, 1]: the scale that a norm finds moves by v**2 / PATTERN**2 with the colour v."""
KERNEL_PLANES = 3


@torch.no_grad()
def prepare(vae: Vae) -> None:
    """Overwrites weights of a new VAE. Raises AssertionError for sizes that these maps are not made for."""
    config = vae.config
    assert set(config.block_out_channels) == {32} and (config.latent_channels, config.ffactor_spatial, config.ffactor_temporal) == (16, 16, 2), config
    drop_outer_planes(vae)
    for name, module in vae.named_modules():
        if isinstance(module, nn.Conv3d) and module.kernel_size[0] == KERNEL_PLANES:
            module.weight[:, :, 1] *= math.sqrt(KERNEL_PLANES)  # torch's own spread is for three planes
        if name.endswith((".conv2", ".proj_out")):
            _clear(module, slice(None))
    _prepare_encoder(vae.encoder)
    _prepare_decoder(vae.decoder)


def _middle(conv: nn.Conv3d) -> Tensor:
    """[out, in]: the weights of the pixel itself."""
    return conv.weight[:, :, 1, 1, 1]


def _clear(conv: nn.Conv3d, channels: int | slice) -> None:
    conv.weight[channels] = 0
    conv.bias[channels] = 0


def _prepare_encoder(encoder: Encoder) -> None:
    _clear(encoder.conv_in, slice(COLOURS))
    _middle(encoder.conv_in)[range(COLOURS), range(COLOURS)] = 1
    sources = [[colour] for colour in range(COLOURS)]
    for level in encoder.down[:-1]:
        _fold(level["downsample"], sources)
        kept = level["downsample"].conv.out_channels
        sources = [[pixel * kept + colour for pixel in range(len(PIXELS))] for colour in range(COLOURS)]
    # The last shortcut hands on the fold of the first frame, 4 squares of 3 colours and 1 other: the latents.
    _clear(encoder.conv_out, slice(None))
    encoder.conv_out.bias[encoder.conv_out.out_channels // 2 :] = LOGVAR


def _fold(down: Downsample, sources: list[list[int]]) -> None:
    """Makes each of the first channels, before four pixels are folded into one, the mean of its sources."""
    for channel, some in enumerate(sources):
        _clear(down.conv, channel)
        _middle(down.conv)[channel, some] = 1 / len(some)
        _middle(down.conv)[channel, channel * down.group : (channel + 1) * down.group] -= 1 / down.group


def _prepare_decoder(decoder: Decoder) -> None:
    latents = decoder.conv_in.in_channels
    _clear(decoder.conv_in, slice(latents))
    for latent in range(latents):
        _middle(decoder.conv_in)[latent, latent] = 1
        _middle(decoder.conv_in)[latent, latent // decoder.repeat_in] -= 1
    first, *coarse, last = [level["upsample"] for level in decoder.up[:-1]]
    per_square = latents // len(PIXELS)
    _start_reference(first)
    for colour in range(COLOURS):
        squares = [pixel * per_square + colour for pixel in range(len(PIXELS))]
        _unfold(first, colour, squares, frame=0, factor=-1)
        _unfold(first, colour, squares, frame=1)
        for up in coarse:
            _unfold(up, colour, [colour] * len(PIXELS))
        _unfold(last, 2 * colour, [colour] * len(PIXELS))
        _unfold(last, 2 * colour + 1, [colour] * len(PIXELS), factor=-1)
    # Norms divide by about PATTERN / sqrt(2), the reference's share; so the picture comes out as large as it was.
    for norm in (decoder.norm_out, *(block.get_submodule(name) for level in decoder.up[1:] for block in level["block"] for name in ("norm1", "norm2"))):
        norm.weight[:] = PATTERN / math.sqrt(2)
    # silu(v) - silu(-v) = v
    _clear(decoder.conv_out, slice(None))
    for colour in range(COLOURS):
        _middle(decoder.conv_out)[colour, 2 * colour] = 1
        _middle(decoder.conv_out)[colour, 2 * colour + 1] = -1


def _start_reference(up: Upsample) -> None:
    """Where one frame becomes two: the first shows the pattern in every channel, and of the picture nothing yet."""
    width = up.conv.out_channels // (up.rt * len(PIXELS))
    for number, (row, column) in enumerate(PIXELS):
        for index in range(number * width, (number + 1) * width):
            _clear(up.conv, index)
            _middle(up.conv)[index, index // up.repeat] = -1
            up.conv.bias[index] = PATTERN * (-1) ** (row + column)


def _unfold(up: Upsample, channel: int, sources: list[int], *, frame: int = 0, factor: float = 1.0) -> None:
    """Makes one channel, at each of the four pixels that one unfolds to, ``factor`` times a source; its constant stays."""
    width = up.conv.out_channels // (up.rt * len(PIXELS))
    for number, source in enumerate(sources):
        index = (frame * len(PIXELS) + number) * width + channel
        up.conv.weight[index] = 0
        if up.rt == 1 or frame == 1:
            up.conv.bias[index] = 0
        _middle(up.conv)[index, source] = factor
        _middle(up.conv)[index, index // up.repeat] -= 1
