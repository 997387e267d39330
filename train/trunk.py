"""The network as training runs it: rows of one bucket at once, text and picture in one pass, everything differentiable.

Weights have the checkpoint's names, and the arithmetic is that of the eager kernels; what inference spreads over phases, caches and ranks is one
attention with a mask here. tests/train/test_trunk.py holds the two against each other.

Letters: B rows, P tokens before the picture, S = P + h*w, H hidden, G KV heads, g query heads for each, d head dim, E experts, K of them per token.
Imports torch and its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.moe import gated_unit_eager
from ..kernels.rms_norm import rms_norm_eager
from ..kernels.rope_norm import rope_norm_eager
from ..kernels.router import route_eager, router_logits_eager
from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.token_row import rope_tables
from ..models.hunyuan_image_3.weights import Around
from .packing import Bucket

INIT_STD = 0.02


@dataclass(frozen=True)
class StepTimes:
    """``t, r, guidance [B]``: this step's timestep and, for Distil, the next one's (both 0..1000) and the guidance as the embedder takes it."""

    t: Tensor
    r: Tensor | None = None
    guidance: Tensor | None = None


@dataclass(frozen=True)
class Predicted:
    """``velocity [B, C, h, w]``; ``logits [B, P, vocab]`` of the token behind each place, where the text was asked for; ``balance``: 1 where the experts
    get equal shares of the tokens, E where one gets all."""

    velocity: Tensor
    logits: Tensor | None
    balance: Tensor


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Gate(nn.Module):
    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden, experts, bias=False)


class Mlp(nn.Module):
    """`up * silu(gate)` between two products, rows [up, gate] as in the checkpoint (spec 3.5)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(hidden, 2 * width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_unit_eager(self.gate_and_up_proj(x), 1))


class Experts(nn.Module):
    """Shared expert and routed ones. Every token goes through all of them as through one wide unit, and the routing weights, 0 for those not chosen,
    scale their parts of it: at this size that is faster than sorting, and nothing waits for the device."""

    def __init__(self, config: HunyuanImage3Config, layer: int) -> None:
        super().__init__()
        self.topk = config.moe_topk[layer]
        self.gate = Gate(config.num_experts[layer], config.hidden_size)
        self.shared_mlp = Mlp(config.hidden_size, config.shared_intermediate_size[layer])
        self.experts = nn.ModuleList(Mlp(config.hidden_size, config.moe_intermediate_size[layer]) for _ in range(config.num_experts[layer]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x [T, H]`` -> ``[T, H]``, balance."""
        count = len(self.experts)
        with torch.autocast(x.device.type, enabled=False):
            logits = router_logits_eager(x, self.gate.wg.weight)
            weights, ids = route_eager(logits, self.topk)
        routed = torch.zeros_like(logits).scatter(1, ids, weights)
        balance = count / self.topk * ((routed > 0).float().mean(0) * torch.softmax(logits, dim=-1).mean(0)).sum()
        up = torch.cat([expert.gate_and_up_proj.weight for expert in self.experts])
        down = torch.cat([expert.down_proj.weight for expert in self.experts], dim=1)
        units = gated_unit_eager(F.linear(x, up), count).unflatten(1, (count, -1)) * routed.unsqueeze(2)
        return self.shared_mlp(x) + F.linear(units.flatten(1).to(x.dtype), down), balance


class Attention(nn.Module):
    def __init__(self, config: HunyuanImage3Config) -> None:
        super().__init__()
        heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.groups, self.g, self.d, self.eps = groups, heads // groups, d, config.rms_norm_eps
        self.qkv_proj = nn.Linear(config.hidden_size, (heads + 2 * groups) * d, bias=False)
        self.o_proj = nn.Linear(heads * d, config.hidden_size, bias=False)
        self.query_layernorm, self.key_layernorm = Norm(d), Norm(d)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """``x [B, S, H]``, ``rope`` cos and sin ``[B*S, d]``, ``mask [B, 1, S, S]`` -> ``[B, S, H]``."""
        b, s, _ = x.shape
        qkv = self.qkv_proj(x).view(b * s, self.groups, self.g + 2, self.d)
        query, key, value = qkv.split([self.g, 1, 1], dim=2)
        query = rope_norm_eager(query.flatten(1, 2), *rope, self.query_layernorm.weight, self.eps)
        key = rope_norm_eager(key.flatten(1, 2), *rope, self.key_layernorm.weight, self.eps)
        q, k, v = (part.reshape(b, s, -1, self.d).transpose(1, 2) for part in (query, key, value.flatten(1, 2)))
        k, v = (part.repeat_interleave(self.g, dim=1) for part in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: HunyuanImage3Config, index: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = Norm(config.hidden_size), Norm(config.hidden_size)
        self.self_attn, self.mlp = Attention(config), Experts(config, index)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(rms_norm_eager(x, self.input_layernorm.weight, self.eps), rope, mask)
        out, balance = self.mlp(rms_norm_eager(x, self.post_attention_layernorm.weight, self.eps).flatten(0, 1))
        return x + out.view_as(x), balance


class Stack(nn.Module):
    def __init__(self, config: HunyuanImage3Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.ln_f = Norm(config.hidden_size)


class TrainingTrunk(Around):
    """The trunk beside the inference modules around it; ``state_dict`` has the checkpoint's keys, without VAE and vision tower."""

    def __init__(self, config: HunyuanImage3Config) -> None:
        super().__init__(config)
        self.config = config
        # Trained before, and not here: their outputs are in the buckets.
        del self.vae, self.vision_model
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def initialize(self, seed: int) -> None:
        """Small normal weights, smaller still where a layer adds to the stream; a velocity of 0 to begin with."""
        generator = torch.Generator().manual_seed(seed)
        depth = 2 * self.config.num_hidden_layers
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() < 2:
                    weight.fill_(float(name.endswith("weight")))
                    continue
                fan_in = weight[0].numel()
                std = INIT_STD if name == "model.wte.weight" else fan_in**-0.5
                if name.startswith("model.") and name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= depth**-0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            self.final_layer.model[1][-1].weight.zero_()

    def placed(self, device: torch.device) -> TrainingTrunk:
        """Itself, on the device. On a GPU the layers are compiled, one program for all sizes, which does in few passes over memory what else takes many."""
        if device.type == "cuda":
            for layer in self.model.layers:
                layer.compile(dynamic=True)
        return self.to(device)

    def forward(self, batch: Bucket, noisy: Tensor, times: StepTimes, unconditional: Tensor, *, text: bool = True) -> Predicted:
        """``noisy [B, C, h, w]``; ``unconditional [B]`` bool; ``text``: whether the next tokens are predicted too."""
        tokens = torch.where(unconditional[:, None], batch.blanked, batch.tokens)
        prefix = self._prefix(batch, tokens.long().clamp_min(0), times)
        image = self.patch_embed(noisy, self.time_embed(times.t))
        hidden = torch.cat([prefix, image.to(prefix.dtype)], dim=1)
        rope, mask = self._rope(batch), _mask(batch)
        balances = []
        for layer in self.model.layers:
            hidden, balance = layer(hidden, rope, mask)
            balances.append(balance)
        length = tokens.shape[1]
        velocity = self.final_layer(hidden[:, length:], self.time_embed_2(times.t), *batch.grid).float()
        logits = self.lm_head(rms_norm_eager(hidden[:, :length], self.model.ln_f.weight, self.config.rms_norm_eps)).float() if text else None
        return Predicted(velocity, logits, torch.stack(balances).mean())

    def _prefix(self, batch: Bucket, tokens: Tensor, times: StepTimes) -> Tensor:
        """``[B, P, H]`` with the continuous embeddings in their places (spec section 8)."""
        hidden = self.model.wte(tokens)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        specials = [self.timestep_emb(times.t)]
        if self.guidance_emb is not None:
            specials.append(self.guidance_emb(times.guidance))
        if self.timestep_r_emb is not None:
            specials.append(self.timestep_r_emb(times.r))
        pieces = [(batch.lengths - len(specials), torch.stack(specials, dim=1))]
        zero = torch.zeros(tokens.shape[0], device=tokens.device)
        for number, (latent, vit) in enumerate(zip(batch.source_latents, batch.source_vit, strict=True)):
            picture = self.patch_embed(latent.float(), self.time_embed(zero))
            timestep, first_latent, first_patch = batch.sources[:, number].unbind(1)
            pieces += [(timestep, self.timestep_emb(zero)[:, None]), (first_latent, picture), (first_patch, self.vision_aligner(vit.float()))]
        at = torch.cat([start[:, None] + torch.arange(piece.shape[1], device=tokens.device) for start, piece in pieces], dim=1)
        values = torch.cat([piece.to(hidden.dtype) for _, piece in pieces], dim=1)
        return hidden.index_put((rows[:, None].expand_as(at), at), values)

    def _rope(self, batch: Bucket) -> tuple[Tensor, Tensor]:
        h, w = batch.grid
        device = batch.positions.device
        grid = torch.stack(torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij"), dim=-1).flatten(0, 1)
        image = batch.image_corner[:, None] + grid
        positions = torch.cat([batch.positions.long(), image], dim=1).flatten(0, 1)
        return rope_tables(positions, self.config.head_dim, self.config.rope_theta)


def _mask(batch: Bucket) -> Tensor:
    """bool ``[B, 1, S, S]``: text is causal, a source picture sees itself, the picture sees everything but padding."""
    b, length = batch.tokens.shape
    area = batch.grid[0] * batch.grid[1]
    place = torch.arange(length, device=batch.tokens.device)
    groups = batch.groups
    inner = (place[:, None] >= place) | ((groups[:, :, None] == groups[:, None, :]) & (groups[:, :, None] > 0))
    mask = torch.zeros(b, length + area, length + area, dtype=torch.bool, device=place.device)
    mask[:, :length, :length] = inner
    mask[:, length:, :length] = (place < batch.lengths[:, None])[:, None]
    mask[:, length:, length:] = True
    return mask.unsqueeze(1)
