"""The mini model: its sizes, and its folder as the releases store theirs. Imports torch, safetensors and its neighbours.

4 million parameters: small enough for a repository, wide enough that every plan of up to four ranks can split it (4 KV heads).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.folder_format import FolderSpec, config_json, generation_json, plan_shards, write_json, write_weights
from ..models.hunyuan_image_3.keys import checkpoint_shapes
from ..models.hunyuan_image_3.synthetic_tokenizer import write_tokenizer
from ..models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from .errors import MiniError
from .mini_tokenizer import SYSTEM_PROMPTS, mini_tokenizer
from .scenes import BASE_SIZE

Kind = Literal["instruct", "distil"]
NAMES: dict[Kind, str] = {"instruct": "HunyuanImage-3-Mini-Instruct", "distil": "HunyuanImage-3-Mini-Instruct-Distil"}
STORED = torch.float16
"""Of every tensor in the files. All weights are near 1 or smaller, so that its 10 bits of mantissa beat those of bf16; computing is in fp32."""
# What both variants have alike is the last shard, so that the repository holds it once.
SHARED = ("vae.", "vision_model.")
SHARD_BYTES = 3 << 20

SPEC = FolderSpec(
    kind="instruct",
    layers=6,
    hidden=128,
    heads=8,
    kv_heads=4,
    head_dim=32,
    experts=8,
    topk=2,
    expert_width=48,
    shared_experts=1,
    vocab=512,
    max_positions=2048,
    image_base_size=BASE_SIZE,
    latent_channels=16,
    patch_embed_width=64,
    vae_channels=(32, 32, 32, 32, 32),
    vae_blocks=1,
    vae_frames=2,
    vit_layers=2,
    vit_hidden=64,
    vit_heads=4,
    vit_width=128,
    vit_table=8,
    vit_slots=64,
    dtype="float32",
    max_shard_bytes=SHARD_BYTES,
)


def mini_config(kind: Kind, scaling_factor: float) -> tuple[HunyuanImage3Config, HunyuanTokenizer]:
    """Configuration and tokenizer without a folder. ``scaling_factor``: what makes the VAE's latents have a standard deviation of 1."""
    spec, tokenizer = replace(SPEC, kind=kind, scaling_factor=scaling_factor), mini_tokenizer(kind)
    config = HunyuanImage3Config.from_dicts(config_json(spec, tokenizer), generation_json(spec, tokenizer), where="the mini model's sizes")
    return config, HunyuanTokenizer(tokenizer, config, clean_up=False, where="the mini model's tokenizer")


def write_mini(folder: Path, kind: Kind, weights: Mapping[str, Tensor], scaling_factor: float) -> None:
    """The whole official folder. ``weights``: every key of the checkpoint.

    Raises MiniError, before anything is written, when keys or shapes are not those of the configuration, or the folder has files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MiniError(f"{folder} already exists and is not an empty folder; name a new one.")
    config, _ = mini_config(kind, scaling_factor)
    shapes = checkpoint_shapes(config)
    wrong = sorted(set(shapes) ^ set(weights)) or sorted(key for key, shape in shapes.items() if tuple(weights[key].shape) != shape)
    if wrong:
        raise MiniError(f"{wrong[0]} is missing, unknown or has another shape than the mini model's; train all parts with the same sizes.")
    spec, tokenizer = replace(SPEC, kind=kind, scaling_factor=scaling_factor), mini_tokenizer(kind)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_json(spec, tokenizer))
    write_json(folder / "generation_config.json", generation_json(spec, tokenizer))
    write_tokenizer(folder, tokenizer)
    texts = "".join(f"{name} = {text!r}\n" for name, text in SYSTEM_PROMPTS.items())
    (folder / "system_prompt.py").write_text(f'"""System prompts of the mini model."""\n\n{texts}', encoding="utf-8")
    size = {key: math.prod(shape) * STORED.itemsize for key, shape in shapes.items()}
    own = plan_shards({key: count for key, count in size.items() if not key.startswith(SHARED)}, SHARD_BYTES)
    shards = [*own, [key for key in size if key.startswith(SHARED)]]
    write_weights(folder, shards, size, lambda key: weights[key].detach().to("cpu", STORED).contiguous())
