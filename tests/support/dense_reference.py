"""The trunk written a second time, as plainly as possible: one whole row, one dense mask, fp64, no cache, no ranks, no kernels of the pack.

Takes the checkpoint's own tensors. Positions, masks and rotary tables come from the token row, which has tests of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.token_row import TokenRow, dense_mask, rope_tables


class DenseTrunk:
    """``hidden [S, H]`` of a whole row through all layers."""

    def __init__(self, folder: Path):
        self.config = HunyuanImage3Config.from_folder(folder)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        self._weights: dict[str, torch.Tensor] = {}
        for name in sorted(set(index["weight_map"].values())):
            trunk = {k: v for k, v in load_file(folder / name).items() if k.startswith(("model.", "lm_head."))}
            self._weights |= {key: value.double() for key, value in trunk.items()}

    def weight(self, name: str) -> torch.Tensor:
        return self._weights[f"{name}.weight"]

    def embed(self, tokens: tuple[int, ...]) -> torch.Tensor:
        return self.weight("model.wte")[list(tokens)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, "model.ln_f") @ self.weight("lm_head").T

    def forward(self, hidden: torch.Tensor, row: TokenRow) -> torch.Tensor:
        """``hidden``: embeddings of the row, pictures and special tokens already in place."""
        mask = dense_mask(row, self.config.cond_token_attn_type)
        positions = row.positions(self.config.cond_token_attn_type, rope_type=self.config.rope_type)
        cos, sin = (table.double() for table in rope_tables(positions, self.config.head_dim, self.config.rope_theta))
        for layer in range(self.config.num_hidden_layers):
            at = f"model.layers.{layer}"
            hidden = hidden + self._attention(self._norm(hidden, f"{at}.input_layernorm"), f"{at}.self_attn", mask, cos, sin)
            hidden = hidden + self._experts(self._norm(hidden, f"{at}.post_attention_layernorm"), f"{at}.mlp", layer)
        return hidden

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weight(name)

    def _attention(self, x: torch.Tensor, name: str, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        d, groups = self.config.head_dim, self.config.num_key_value_heads
        g = self.config.num_attention_heads // groups
        qkv = x @ self.weight(f"{name}.qkv_proj").T
        out = []
        for group in range(groups):
            block = qkv[:, group * (g + 2) * d : (group + 1) * (g + 2) * d]
            key = self._norm(self._turn(block[:, g * d : (g + 1) * d], cos, sin), f"{name}.key_layernorm")
            value = block[:, (g + 1) * d :]
            for head in range(g):
                query = self._norm(self._turn(block[:, head * d : (head + 1) * d], cos, sin), f"{name}.query_layernorm")
                scores = (query @ key.T / d**0.5).masked_fill(~mask, float("-inf"))
                out.append(scores.softmax(-1) @ value)
        return torch.cat(out, dim=-1) @ self.weight(f"{name}.o_proj").T

    @staticmethod
    def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[:, half:], x[:, :half]), dim=-1) * sin

    def _experts(self, x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        chances = (x @ self.weight(f"{name}.gate.wg").T).softmax(-1)
        top, ids = chances.topk(self.config.moe_topk[layer], dim=-1)
        top = top / top.sum(-1, keepdim=True)
        out = self._unit(x, f"{name}.shared_mlp")
        for expert in range(self.config.num_experts[layer]):
            share = (top * (ids == expert)).sum(-1, keepdim=True)
            out = out + share * self._unit(x, f"{name}.experts.{expert}")
        return out

    def _unit(self, x: torch.Tensor, name: str) -> torch.Tensor:
        up, gate = (x @ self.weight(f"{name}.gate_and_up_proj").T).chunk(2, dim=-1)
        return (up * gate * torch.sigmoid(gate)) @ self.weight(f"{name}.down_proj").T
