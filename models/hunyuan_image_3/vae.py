"""The picture autoencoder: 3D convolutions, stride 16 in space and 4 in time.

Letters: B pictures, C latent channels, T frames, H x W the picture, h x w = H/16 x W/16.

A picture enters as T equal frames and leaves as the last of T frames; the others must be computed, since
convolutions, norms and attention mix time. Attribute names are the checkpoint's keys below `vae.`.

The rows of a picture are dealt over all ranks; `vae_rows` does what looks beyond a rank's own rows.

Memory: at 1024 x 1024 in fp32 one activation of the finest level is 2 GiB, shared by the ranks. Pictures
are processed one at a time, nothing is kept for a backward pass, blocks overwrite their input, and a
convolution goes through its rows in bands, so that two of these activations and some bands are alive at
the peak (input, result of the first convolution).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn

from ...parallel.ledger import Role
from ...parallel.picture_view import PictureView
from .blocks import NUM_GROUPS, GroupNorm
from .config import VaeConfig
from .vae_blocks import EPS, AttnBlock, Conv3d, Downsample, Mid, ResBlock, Upsample, add, add_repeated, group_mean, ratio
from .vae_rows import PictureRows
from .vae_split import RowSplit

LOGVAR_RANGE = (-30.0, 20.0)


Check = Callable[[int, int], None]


def _no_check(done: int, total: int) -> None:
    return None


def _level(channels: int, num_blocks: int, **resize: nn.Module) -> nn.ModuleDict:
    """One level's residual blocks and, unless it is the last, its change of size, in running order."""
    blocks = nn.ModuleList(ResBlock(channels) for _ in range(num_blocks))
    return nn.ModuleDict({"block": blocks, **resize})


def _steps(levels: nn.ModuleList) -> list[nn.Module]:
    """All parts of all levels in running order.

    They run in one flat loop, because a forward per level would hold the level's input until the level's
    end.
    """
    return [
        step
        for level in levels
        for part in level.values()
        for step in (part if isinstance(part, nn.ModuleList) else [part])
    ]


class Encoder(nn.Module):
    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        channels = config.block_out_channels
        num_blocks = config.layers_per_block
        # Time is folded by the last size changes: those after levels 2 and 3 of 0..4 in the release.
        first_temporal = config.spatial_levels - config.temporal_levels
        self.conv_in = Conv3d(config.in_channels, channels[0])
        self.down = nn.ModuleList(
            _level(size, num_blocks, downsample=Downsample(size, following, rt=1 + (i >= first_temporal)))
            for i, (size, following) in enumerate(pairwise(channels))
        )
        self.down.append(_level(channels[-1], num_blocks))
        self.mid = Mid(channels[-1])
        self.norm_out = GroupNorm(NUM_GROUPS, channels[-1], eps=EPS)
        self.conv_out = Conv3d(channels[-1], 2 * config.latent_channels)
        self.group_out = ratio(channels[-1], 2 * config.latent_channels)

    def forward(self, x: Tensor, lay: PictureRows) -> Tensor:
        """x [B, 3, T, H, W] -> moments [B, 2*C, T/4, H/16, W/16]; both are this rank's rows."""
        x = lay.convolved(self.conv_in, x)
        for part in (*_steps(self.down), self.mid):
            x = part(x, lay)
        return add(lay.convolved(self.conv_out, x, norm=self.norm_out), group_mean(x, self.group_out))


class Decoder(nn.Module):
    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        channels = config.block_out_channels[::-1]
        num_blocks = config.layers_per_block + 1
        self.conv_in = Conv3d(config.latent_channels, channels[0])
        self.repeat_in = ratio(channels[0], config.latent_channels)
        self.mid = Mid(channels[0])
        self.up = nn.ModuleList(
            _level(size, num_blocks, upsample=Upsample(size, following, rt=1 + (i < config.temporal_levels)))
            for i, (size, following) in enumerate(pairwise(channels))
        )
        self.up.append(_level(channels[-1], num_blocks))
        self.norm_out = GroupNorm(NUM_GROUPS, channels[-1], eps=EPS)
        self.conv_out = Conv3d(channels[-1], config.out_channels)

    def forward(self, z: Tensor, lay: PictureRows, check: Check = _no_check) -> Tensor:
        """z [B, C, T, h, w] -> [B, 3, 4T, 16h, 16w]; both are this rank's rows.

        ``check(done, total)`` runs before each part and may end it by raising.
        """
        x = add_repeated(lay.convolved(self.conv_in, z), z, self.repeat_in)
        parts = [self.mid, *_steps(self.up)]
        for done, part in enumerate(parts):
            check(done, len(parts))
            x = part(x, lay)
        return lay.convolved(self.conv_out, x, norm=self.norm_out)


class Vae(nn.Module):
    """Encoder and decoder of single pictures.

    Without a ``view`` this rank works alone; with one, all ranks of the plan make the same call, share each picture and get the same bits.
    """

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self._names: Mapping[nn.Module, str] = {module: f"vae.{name}" for name, module in self.named_modules()}

    @torch.no_grad()
    def encode(self, pixels: Tensor, view: PictureView | None = None) -> tuple[Tensor, Tensor]:
        """pixels [B, 3, H, W] in [-1, 1] -> (mean, logvar), each [B, C, h, w], logvar clamped to [-30, 20].

        Raises ValueError if H or W is not a multiple of the spatial factor.
        """
        factor = self.config.ffactor_spatial
        height, width = pixels.shape[-2:]
        if height % factor or width % factor:
            raise ValueError(
                f"a picture of {height}x{width} (height x width) cannot be encoded: both sides must be "
                f"multiples of {factor}; resize or crop it first"
            )
        frames = self.config.ffactor_temporal
        clips = pixels.unsqueeze(2).expand(-1, -1, frames, -1, -1)
        lay = self._lay(height // factor, view)
        piece = lay.split.rows(factor)
        results = []
        for clip in clips:
            with _exactly(view, self.encoder):
                moments = self.encoder(clip[None, :, :, piece], lay)
                results.append(lay.whole(moments[:, :, 0], "the encoded picture"))
        mean, logvar = torch.cat(results).chunk(2, dim=1)
        return mean, logvar.clamp(*LOGVAR_RANGE)

    @torch.no_grad()
    def decode(self, latent: Tensor, check: Check = _no_check, view: PictureView | None = None) -> Tensor:
        """latent [B, C, h, w], already divided by the scaling factor -> picture [B, 3, H, W].

        It is the last frame, nominally in [-1, 1] and not clamped. ``check`` as in Decoder, for each picture anew.
        """
        lay = self._lay(latent.shape[2], view)
        pictures = []
        for z in latent[:, :, lay.split.rows()]:
            with _exactly(view, self.decoder):
                frames = self.decoder(z[None, :, None], lay, check)
                pictures.append(lay.whole(frames[:, :, -1], "the decoded picture"))
        return torch.cat(pictures)

    def _lay(self, height: int, view: PictureView | None) -> PictureRows:
        if view is None:
            return PictureRows.alone(height)
        return PictureRows(RowSplit.of(height, ranks=len(view.ranks), rank=view.rank), view, self._names)


def _exactly(view: PictureView | None, network: nn.Module) -> AbstractContextManager[None]:
    """Once through ``network``: each norm and each convolution of size 3 meets the other ranks once."""
    if view is None:
        return nullcontext()
    modules = list(network.modules())
    expected: dict[Role, int] = {
        "halo_gather": sum(isinstance(m, Conv3d) and m.kernel_size == (3, 3, 3) for m in modules),
        "norm_gather": sum(isinstance(m, GroupNorm) for m in modules),
        "kv_gather": sum(isinstance(m, AttnBlock) for m in modules),
        "picture_gather": 1,
    }
    return view.forward(expected, f"the VAE's {type(network).__name__.lower()}")
