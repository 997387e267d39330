"""One decode step over fixed buffers: token in, next token out, without the host in between.

Everything a step needs from the one before lies on the device (the chooser's state and the KV cache), so a step can be captured in a CUDA graph and
replayed. The eager definition of the same step is ``HunyuanImage3Model.decode`` followed by the stage rules.
"""

from __future__ import annotations

import torch

from ...kernels.decode_attention import DecodeAttention
from ...kernels.decode_moe import DecodeMoeBuffers, router_and_shared_triton
from ...kernels.embedding import embed_row_triton
from ...kernels.gemv import gemv_triton
from ...kernels.next_token import TokenChooser
from ...parallel.collectives import Partial
from ..reduction import Reduction
from .kv_cache import KVCache
from .model import HunyuanImage3Model
from .token_row import rope_tables
from .transformer import LayerWeights, expected_collectives


class DecodeStep:
    """Buffers and launches of one rank. ``logits [vocab]`` fp32 are those that the last launch chose its token from."""

    def __init__(self, model: HunyuanImage3Model, cache: KVCache, chooser: TokenChooser, reduction: Reduction):
        config, device, dtype = model.config, model.device, model.dtype
        self._weights = model.weights["decode"]
        self._view = model.comm.phase("decode")
        self._attention_kind = model.plan.attention
        self._cache, self._chooser, self._reduction = cache, chooser, reduction
        positions = torch.arange(cache.capacity, device=device).unsqueeze(1).repeat(1, 2)
        self._cos, self._sin = rope_tables(positions, config.head_dim, config.rope_theta)
        layer = self._weights.layers[0]
        heads = layer.qkv_proj.tensor.shape[0] // ((self._weights.query_group + 2) * config.head_dim)
        self._attend = DecodeAttention(heads, self._weights.query_group, config.head_dim, device)

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        hidden = config.hidden_size
        self._residual, self._normed, self._summand = buffer(hidden), buffer(hidden), buffer(hidden)
        self._qkv = buffer(heads, self._weights.query_group + 2, config.head_dim)
        self._attended = buffer(heads * self._weights.query_group, config.head_dim)
        self._layers = [_moe_buffers(layer, dtype, device) for layer in self._weights.layers]
        self._experts = [self._weights.kernels.one_token(layer.experts[0], layer.topk) for layer in self._weights.layers]
        self._head = reduction.head(self._view, self._weights.lm_head, self._weights.vocab_start, config.vocab_size)
        self.logits = self._head.logits

    def launch(self) -> None:
        """Embeds the chooser's last token at its position, writes its keys and values, and lets the chooser choose the next one."""
        weights, view = self._weights, self._view
        with view.forward({"row_reduce": 1}, "embedding"):
            self._residual.zero_()
            embed_row_triton(self._chooser.token, weights.wte.tensor, weights.vocab_start, self._summand)
            self._reduce(weights.wte.site, weights.layers[0].input_layernorm)
        with view.forward(expected_collectives(len(weights.layers), view, self._attention_kind), "trunk"):
            for index, layer in enumerate(weights.layers):
                self._layer(index, layer)
        with view.forward({"vocab_gather": 1}, "head"):
            self._head(self._normed)
        self._chooser.choose(self.logits)

    def _layer(self, index: int, layer: LayerWeights) -> None:
        weights, buffers, (block,) = self._weights, self._layers[index], layer.experts
        gemv_triton(self._normed, layer.qkv_proj.tensor, self._qkv.view(-1))
        self._attend(
            self._qkv, self._cos, self._sin, layer.query_layernorm, layer.key_layernorm, self._cache.k[index], self._cache.v[index],
            self._chooser.position, weights.eps, self._attended,
        )  # fmt: skip
        gemv_triton(self._attended.view(-1), layer.o_proj.tensor, self._summand)
        self._reduce(layer.o_proj.site, layer.post_attention_layernorm)
        router_and_shared_triton(self._normed, layer.router, layer.shared_gate_and_up.tensor, buffers)
        self._experts[index](self._normed, block, layer.shared_down.tensor, buffers, self._summand)
        following = weights.layers[index + 1].input_layernorm if index + 1 < len(weights.layers) else weights.ln_f
        self._reduce(layer.shared_down.site, following)

    def _reduce(self, site: str, norm: torch.Tensor) -> None:
        self._reduction(self._view, Partial(self._summand, site), self._residual, norm, self._weights.eps, self._normed)


def _moe_buffers(layer: LayerWeights, dtype: torch.dtype, device: torch.device) -> DecodeMoeBuffers:
    """Sizes may differ from layer to layer."""
    width, shared_width = layer.experts[0].w1.shape[1] // 2, layer.shared_gate_and_up.tensor.shape[0] // 2
    return DecodeMoeBuffers.make(layer.router.shape[0], layer.topk, width, shared_width, dtype, device)
