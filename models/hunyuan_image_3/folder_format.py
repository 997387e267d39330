"""The official folder format: configuration, generation settings and weights as the releases store them.

Whoever makes a checkpoint (random weights, the trained mini model) describes its sizes here. Imports torch, safetensors and its neighbours only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

Json = dict[str, Any]


@dataclass(frozen=True)
class FolderSpec:
    """Sizes of a checkpoint; the defaults are the smallest that use every feature of `kind`.

    `vae_channels` counts from the picture to the latent, five entries that are multiples of 32; `vae_frames` is the stride in time. `vit_table` is
    the side of the vision tower's position table, `vit_slots` the patches of an input picture. `dtype` is that of config.json.
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
    vae_frames: int = 4
    scaling_factor: float = 0.562679178327931
    vit_layers: int = 2
    vit_hidden: int = 48
    vit_heads: int = 4
    vit_width: int = 96
    vit_table: int = 4
    vit_slots: int = 64
    dtype: Literal["bfloat16", "float32"] = "float32"
    max_shard_bytes: int = 2 << 20


def write_weights(
    folder: Path,
    shards: Sequence[Sequence[str]],
    size: Mapping[str, int],
    make: Callable[[str], Tensor],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """A file for each of `shards`, and the index. `size` gives the bytes of a key, `make` its tensor; `progress(done, total)` counts bytes."""
    done, total = 0, sum(size.values())
    for number, keys in enumerate(shards):
        write_shard(folder, shards, number, make)
        done += sum(size[key] for key in keys)
        if progress is not None:
            progress(done, total)
    write_index(folder, shards, size)


def write_shard(folder: Path, shards: Sequence[Sequence[str]], number: int, make: Callable[[str], Tensor]) -> Path:
    """The file of `shards[number]`; returns its place."""
    file = folder / _shard_name(number, len(shards))
    # Built inside the call, so that no shard is still held while the next one is made.
    save_file({key: make(key) for key in shards[number]}, file, metadata={"format": "pt"})
    return file


def write_index(folder: Path, shards: Sequence[Sequence[str]], size: Mapping[str, int]) -> None:
    weight_map = {key: _shard_name(number, len(shards)) for number, keys in enumerate(shards) for key in keys}
    values = {"metadata": {"total_size": sum(size.values())}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", values)


def _shard_name(number: int, count: int) -> str:
    """`number` counts from 0, the names from 1."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def plan_shards(size: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
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


def config_json(spec: FolderSpec, tokenizer: Tokenizer) -> Json:
    """config.json; special tokens as `tokenizer` numbers them."""
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


def _network_sections(spec: FolderSpec) -> Json:
    return {
        "vae": {
            "block_out_channels": list(spec.vae_channels),
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": spec.latent_channels,
            "layers_per_block": spec.vae_blocks,
            "ffactor_spatial": 16,
            "ffactor_temporal": spec.vae_frames,
            "downsample_match_channel": True,
            "upsample_match_channel": True,
            "scaling_factor": spec.scaling_factor,
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


def generation_json(spec: FolderSpec, tokenizer: Tokenizer) -> Json:
    """generation_config.json with the releases' settings."""
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


def write_json(path: Path, values: Json) -> None:
    """Two spaces, non-ASCII escaped, one newline at the end."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
