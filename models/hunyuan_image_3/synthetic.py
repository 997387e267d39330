"""Writes a random checkpoint in the official folder format, for demos, tests and benchmarks.

Any sizes; streamed shard by shard, so that host memory stays near `max_shard_bytes` (or the largest tensor)
whatever the checkpoint's size. Imports torch, safetensors and its neighbours only.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from .config import HunyuanImage3Config
from .keys import Shape, checkpoint_shapes
from .resolution import BASE_ROWS
from .synthetic_tokenizer import toy_tokenizer, write_tokenizer
from .synthetic_weights import chain_pairs, random_tensor, storage_dtype

_SYSTEM_PROMPTS = '''"""Toy system prompts of a synthetic checkpoint."""

t2i_system_prompt_en_vanilla = "Draw what the user says."
t2i_system_prompt_en_recaption = "Describe the picture, then draw it."
t2i_system_prompt_en_think_recaption = "Think, describe the picture, then draw it."
unified_system_prompt_en = "Draw or change pictures as the user says."
'''

Json = dict[str, Any]


class SyntheticError(ValueError):
    """A synthetic checkpoint cannot be written as asked."""


@dataclass(frozen=True)
class SyntheticSpec:
    """Sizes of a synthetic checkpoint; the defaults are the smallest that use every feature of `kind`.

    `vae_channels` counts from the picture to the latent, five entries that are multiples of 32. `vit_table`
    is the side of the vision tower's position table, `vit_slots` the patches of an input picture.
    `auto_ratio` is the size row that the weights choose for "auto". With `dtype` bfloat16 the VAE is fp32, as
    in the releases.
    """

    kind: Literal["base", "instruct", "distil"] = "base"
    layers: int = 2
    hidden: int = 64
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    experts: int = 8
    topk: int = 3
    expert_width: int = 48
    shared_experts: int = 1
    vocab: int = 192
    max_positions: int = 4096
    image_base_size: int = 256
    latent_channels: int = 16
    patch_embed_width: int = 32
    vae_channels: tuple[int, ...] = (32, 32, 32, 32, 32)
    vae_blocks: int = 1
    vit_layers: int = 2
    vit_hidden: int = 48
    vit_heads: int = 4
    vit_width: int = 96
    vit_table: int = 4
    vit_slots: int = 64
    auto_ratio: int = 12
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "float32"
    max_shard_bytes: int = 2 << 20


def write_checkpoint(
    folder: str | Path, spec: SyntheticSpec, *, progress: Callable[[int, int], None] | None = None
) -> HunyuanImage3Config:
    """Write the whole folder and return its configuration; `progress(done, total)` counts bytes.

    Raises SyntheticError, before anything is written, when the folder already has files, the disk is too full
    or the sizes do not fit each other.
    """
    folder = Path(folder)
    config, _, _, _ = _settings(folder, spec)
    shapes = checkpoint_shapes(config)
    size = {key: math.prod(shape) * storage_dtype(key, spec.dtype).itemsize for key, shape in shapes.items()}
    total = sum(size.values())
    _check_free_space(folder, total)
    config, tokenizer = write_settings(folder, spec)
    chain = chain_pairs(tokenizer, spec.image_base_size, spec.auto_ratio)
    shards = plan_shards(size, spec.max_shard_bytes)
    weight_map: dict[str, str] = {}
    done = 0
    for number, keys in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # Built inside the call, so that no shard is still held while the next one is made.
        save_file(
            {key: _stored(key, shapes[key], spec, chain) for key in keys},
            folder / name,
            metadata={"format": "pt"},
        )
        weight_map.update(dict.fromkeys(keys, name))
        done += sum(size[key] for key in keys)
        if progress is not None:
            progress(done, total)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    return config


def _stored(key: str, shape: Shape, spec: SyntheticSpec, chain: list[tuple[int, int]]) -> Tensor:
    values = random_tensor(key, shape, seed=spec.seed, layers=spec.layers, chain=chain)
    return values.to(storage_dtype(key, spec.dtype))


def write_settings(folder: str | Path, spec: SyntheticSpec) -> tuple[HunyuanImage3Config, Tokenizer]:
    """Write everything except weights: configuration, tokenizer and, for Instruct, toy system prompts.

    Enough for whatever works on texts and rows alone. Raises SyntheticError like `write_checkpoint`.
    """
    folder = Path(folder)
    config, tokenizer, values, generation = _settings(folder, spec)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", values)
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(folder, tokenizer)
    if spec.kind != "base":
        (folder / "system_prompt.py").write_text(_SYSTEM_PROMPTS, encoding="utf-8")
    return config, tokenizer


def _settings(folder: Path, spec: SyntheticSpec) -> tuple[HunyuanImage3Config, Tokenizer, Json, Json]:
    """Check everything and build what `write_settings` writes, without touching the disk."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SyntheticError(f"{folder} already exists and is not an empty folder; name a new one.")
    tokenizer = toy_tokenizer(spec.kind, spec.image_base_size)
    known = tokenizer.get_vocab_size()
    if spec.vocab < known:
        raise SyntheticError(
            f"vocab {spec.vocab} is smaller than the toy tokenizer's {known} tokens; raise it."
        )
    if not 0 <= spec.auto_ratio < BASE_ROWS:
        last = BASE_ROWS - 1
        raise SyntheticError(f"auto_ratio {spec.auto_ratio} is outside the size table; choose 0 to {last}.")
    values, generation = _config_json(spec, tokenizer), _generation_json(spec, tokenizer)
    try:
        config = HunyuanImage3Config.from_dicts(values, generation, where="the synthetic sizes")
    except ValueError as error:
        raise SyntheticError(str(error)) from error
    return config, tokenizer, values, generation


def _check_free_space(folder: Path, needed: int) -> None:
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise SyntheticError(
            f"{folder} needs {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; "
            "choose another disk or smaller sizes."
        )


def plan_shards(size: dict[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Keys of each shard, filled in order up to the limit; a larger tensor gets a shard of its own.

    Experts with odd numbers come last: the experts of every layer are spread over shards, as a loader must
    expect.
    """
    ordered = sorted(size, key=_is_odd_expert)  # stable: file order within both halves
    shards: list[list[str]] = [[]]
    filled = 0
    for key in ordered:
        if shards[-1] and filled + size[key] > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size[key]
    return shards


def _is_odd_expert(key: str) -> bool:
    parts = key.split(".")
    return "experts" in parts and int(parts[parts.index("experts") + 1]) % 2 == 1


def _config_json(spec: SyntheticSpec, tokenizer: Tokenizer) -> Json:
    token = tokenizer.token_to_id
    values: Json = {
        "architectures": ["HunyuanImage3ForCausalMM"],
        "model_type": "hunyuan_image_3_moe",
        "model_version": "HunyuanImage-3.0" + ("" if spec.kind == "base" else "-Instruct"),
        "torch_dtype": spec.dtype,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "attention_head_dim": spec.head_dim,
        "intermediate_size": spec.expert_width,
        "moe_intermediate_size": [spec.expert_width] * spec.layers,
        "num_experts": spec.experts,
        "moe_topk": [spec.topk] * spec.layers,
        "num_shared_expert": [spec.shared_experts] * spec.layers,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_type": "2d",
        "rope_scaling": {"type": "custom", "alpha": 1.0, "factor": 1.0},
        "image_base_size": spec.image_base_size,
        "patch_embed_hidden_dim": spec.patch_embed_width,
        "cond_image_type": "vae_vit",
        "cond_token_attn_type": "joint_full",
        "bos_token_id": token("<|startoftext|>"),
        "eos_token_id": token("<|endoftext|>"),
        "pad_token_id": token("<pad>"),
        "im_start_id": token("<boi>"),
        "im_end_id": token("<eoi>"),
        "image_token_id": token("<img>"),
        "vae_downsample_factor": [16, 16],
        **_network_sections(spec),
    }
    values |= dict.fromkeys(
        ("use_qk_norm", "use_rotary_pos_emb", "use_mixed_mlp_moe", "norm_topk_prob"), True
    )
    if spec.kind == "distil":
        values |= {"cfg_distilled": True, "use_meanflow": True}
    return values


def _network_sections(spec: SyntheticSpec) -> Json:
    return {
        "vae": {
            "block_out_channels": list(spec.vae_channels),
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": spec.latent_channels,
            "layers_per_block": spec.vae_blocks,
            "ffactor_spatial": 16,
            "ffactor_temporal": 4,
            "downsample_match_channel": True,
            "upsample_match_channel": True,
            "scaling_factor": 0.562679178327931,
        },
        "vit": {
            "hidden_size": spec.vit_hidden,
            "intermediate_size": spec.vit_width,
            "num_attention_heads": spec.vit_heads,
            "num_hidden_layers": spec.vit_layers,
            "num_channels": 3,
            "num_patches": spec.vit_table**2,
            "patch_size": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
        "vit_processor": {"max_num_patches": spec.vit_slots, "patch_size": 16},
        "vit_aligner": {
            "projector_type": "mlp_gelu",
            "input_dim": spec.vit_hidden,
            "n_embed": spec.hidden,
            "depth": 2,
        },
    }


def _generation_json(spec: SyntheticSpec, tokenizer: Tokenizer) -> Json:
    return {
        "sequence_template": "pretrain" if spec.kind == "base" else "instruct",
        "bot_task": "image",
        "use_system_prompt": "None",
        "diff_infer_steps": 8 if spec.kind == "distil" else 50,
        "diff_guidance_scale": 5.0 if spec.kind == "base" else 2.5,
        "flow_shift": 3.0,
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 1024,
        "top_p": 0.95,
        "drop_think": False,
        "max_length": spec.max_positions,
        "eos_token_id": [tokenizer.token_to_id("<|endoftext|>")],
    }


def _write_json(path: Path, values: Json) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
