"""Random weights for synthetic checkpoints: finite activations, a picture that is not flat, a text that ends.

Each tensor depends on the seed and its own key only, so it is the same in any shard order. Imports torch and
its neighbours only.

The text: embeddings keep their direction through the residual stream, and `lm_head` maps the direction of
each token of a short chain to the next one. So greedy decoding (and sampling, the gap is wide) writes one
fixed think and recaption text and then the wanted ratio token.
"""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import torch
from tokenizers import Tokenizer

from .keys import Shape

THINK_TEXT = "quick."
RECAPTION_TEXT = "a dog!"
# How far the next token of a chain stands out of the random rows; the tests sample, so a smaller gap fails.
_CHAIN_STRENGTH = 4.0
_BIAS_STD = 0.02
_NORM_SPREAD = 0.1


def chain_pairs(tokenizer: Tokenizer, image_base_size: int, ratio_index: int) -> list[tuple[int, int]]:
    """(token, next token) of the text that the weights write; no token has two successors."""
    parts = [
        "<think>", *THINK_TEXT, "</think>",
        "<recaption>", *RECAPTION_TEXT, "</recaption>",
        "<answer>", "<boi>", f"<img_size_{image_base_size}>", f"<img_ratio_{ratio_index}>",
    ]  # fmt: skip
    ids = [tokenizer.token_to_id(part) for part in parts]
    assert None not in ids, parts
    assert len(set(ids)) == len(ids), "a token of the chain would have two successors"
    return list(pairwise(ids))


def storage_dtype(key: str, dtype: str) -> torch.dtype:
    """As in the releases: with bfloat16 weights the VAE is still stored in fp32."""
    return torch.float32 if dtype == "float32" or key.startswith("vae.") else torch.bfloat16


def random_tensor(
    key: str, shape: Shape, *, seed: int, layers: int, chain: list[tuple[int, int]]
) -> torch.Tensor:
    """The weight `key` of `shape`, fp32; `layers` scales what is added to the residual stream."""
    values = _noise(key, shape, seed)
    if key == "model.wte.weight":
        return values
    if key == "lm_head.weight":
        values *= shape[1] ** -0.5
        embeddings = _noise("model.wte.weight", shape, seed)
        for token, following in chain:
            values[following] += _CHAIN_STRENGTH * embeddings[token] / embeddings[token].norm()
        return values
    if key.endswith("bias"):
        return values * _BIAS_STD
    if len(shape) == 1:
        return 1 + values * _NORM_SPREAD
    values *= math.prod(shape[1:]) ** -0.5
    if key.startswith("model.layers.") and key.endswith(("o_proj.weight", "down_proj.weight")):
        values *= 0.5 / math.sqrt(layers)
    return values


def _noise(key: str, shape: Shape, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(shape, generator=generator)
