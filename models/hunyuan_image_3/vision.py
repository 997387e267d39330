"""The vision tower (SigLIP2, any aspect ratio) and the aligner that brings its features to the hidden size.

Letters: N pictures, P patch slots of a picture (padded), D tower width, H hidden size, gh x gw the patch
grid.

Attribute names are the checkpoint's keys below `vision_model.` and `vision_aligner.`. The checkpoint's
pooling head (`vision_model.head.*`) has no module here: its output is not used. Padding slots are
computed and returned like the others, because the sequence contains all P slots. Norms and softmax are
fp32, linears have the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import LayerNorm, Linear
from .config import AlignerConfig, VitConfig


class Embeddings(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.side = config.table_side
        # A linear over flattened patches, not a convolution.
        self.patch_embedding = Linear(config.patch_dim, config.hidden_size)
        self.position_embedding = nn.Embedding(config.num_patches, config.hidden_size)

    def forward(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """patches [N, P, 768], grids N x (gh, gw) -> [N, P, D]."""
        by_grid = {grid: self._positions(*grid, patches.shape[1]) for grid in dict.fromkeys(grids)}
        return self.patch_embedding(patches) + torch.stack([by_grid[grid] for grid in grids])

    def _positions(self, gh: int, gw: int, num_slots: int) -> Tensor:
        """[P, D]: the table resized to gh x gw, row-major; padding slots get its first entry."""
        table = self.position_embedding.weight
        square = table.float().T.reshape(1, -1, self.side, self.side)
        resized = F.interpolate(square, size=(gh, gw), mode="bilinear", align_corners=False, antialias=True)
        rows = resized[0].flatten(1).T.to(table.dtype)  # [gh*gw, D]
        return torch.cat([rows, rows[:1].expand(num_slots - gh * gw, -1)])


class Attention(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.hidden_size)
        self.v_proj = Linear(config.hidden_size, config.hidden_size)
        self.out_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        """x [N, P, D]; key_mask [N, 1, 1, P] bool, true where a key is a real patch -> [N, P, D]."""
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        u = F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask)
        return self.out_proj(u.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        # The tower uses the tanh form of GELU; the aligner and the timestep embedders use the exact one.
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class EncoderLayer(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = Attention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), key_mask)
        return x + self.mlp(self.layer_norm2(x))


class Encoder(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, key_mask)
        return x


class VisionTower(nn.Module):
    """Checkpoint prefix `vision_model.`, without its pooling head."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, patches: Tensor, mask: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """patches [N, P, 768], mask [N, P] (non-zero = real patch), grids N x (gh, gw) -> [N, P, D] fp32.

        The result is after `post_layernorm`, padding slots included.
        """
        for gh, gw in grids:
            if not 0 < gh * gw <= patches.shape[1]:
                raise ValueError(
                    f"a picture of {gh}x{gw} patches does not fit the vision tower's {patches.shape[1]} "
                    "slots; cut it with reference_images.vit_patches"
                )
        x = self.embeddings(patches, grids)
        x = self.encoder(x, mask.bool()[:, None, None, :])
        return self.post_layernorm(x)


class Aligner(nn.Module):
    """Checkpoint prefix `vision_aligner.`: `depth` linears with exact GELUs between them."""

    def __init__(self, config: AlignerConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = [Linear(config.input_dim, config.n_embed)]
        for _ in range(1, config.depth):
            layers += [nn.GELU(), Linear(config.n_embed, config.n_embed)]
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """features [N, P, D] -> [N, P, H] in the dtype of the weights."""
        return self.layers(features)
