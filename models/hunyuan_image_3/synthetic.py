"""Writes a random checkpoint in the official folder format, for demos, tests and benchmarks.

Any sizes; streamed shard by shard, so that host memory stays near `max_shard_bytes` (or the largest tensor)
whatever the checkpoint's size. Imports torch, safetensors and its neighbours only.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from .config import HunyuanImage3Config
from .folder_format import FolderSpec, Json, config_json, generation_json, plan_shards, write_index, write_json, write_shard, write_weights
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


class SyntheticError(ValueError):
    """A synthetic checkpoint cannot be written as asked."""


@dataclass(frozen=True)
class SyntheticSpec(FolderSpec):
    """Sizes of a synthetic checkpoint. `auto_ratio` is the size row that the weights choose for "auto". With `dtype` bfloat16 the VAE is fp32, as in
    the releases.
    """

    auto_ratio: int = 12
    seed: int = 0


def write_checkpoint(
    folder: str | Path, spec: SyntheticSpec, *, progress: Callable[[int, int], None] | None = None
) -> HunyuanImage3Config:
    """Write the whole folder and return its configuration; `progress(done, total)` counts bytes.

    Raises SyntheticError, before anything is written, when the folder already has files, the disk is too full
    or the sizes do not fit each other.
    """
    folder = Path(folder)
    config, _, _, _ = _settings(folder, spec)
    shapes, size = checkpoint_shapes(config), weight_bytes(config, spec)
    _check_free_space(folder, sum(size.values()))
    config, tokenizer = write_settings(folder, spec)
    chain = chain_pairs(tokenizer, spec.image_base_size, spec.auto_ratio)
    shards = plan_shards(size, spec.max_shard_bytes)
    write_weights(folder, shards, size, lambda key: _stored(key, shapes[key], spec, chain), progress=progress)
    return config


def weight_bytes(config: HunyuanImage3Config, spec: SyntheticSpec) -> dict[str, int]:
    """Of every key of the checkpoint, as it is stored."""
    return {key: math.prod(shape) * storage_dtype(key, spec.dtype).itemsize for key, shape in checkpoint_shapes(config).items()}


def write_part(
    folder: str | Path, config: HunyuanImage3Config, spec: SyntheticSpec, make: Callable[[str, Shape], Tensor], *, part: int = 0, parts: int = 1
) -> list[Path]:
    """Every `parts`-th shard, from number `part` on, into a folder that `write_settings` has begun; part 0 also writes the index. So several processes
    share a large checkpoint. `make` gives the weights in place of the random ones, which take long to draw. Returns the files of this part.
    """
    folder, shapes, size = Path(folder), checkpoint_shapes(config), weight_bytes(config, spec)
    shards = plan_shards(size, spec.max_shard_bytes)
    if part == 0:
        write_index(folder, shards, size)
    return [write_shard(folder, shards, number, lambda key: make(key, shapes[key])) for number in range(part, len(shards), parts)]


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
    write_json(folder / "config.json", values)
    write_json(folder / "generation_config.json", generation)
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
    values, generation = config_json(spec, tokenizer), generation_json(spec, tokenizer)
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


