"""The sizes of the 80B release with a toy tokenizer, and the token rows that the published figures were measured with."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.synthetic import SyntheticSpec, write_settings
from ..models.hunyuan_image_3.tokenizer import HunyuanTokenizer

RELEASE = SyntheticSpec(
    kind="instruct",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    experts=64,
    topk=8,
    expert_width=3072,
    vocab=133120,
    max_positions=22800,
    image_base_size=1024,
    latent_channels=32,
    patch_embed_width=1024,
    vae_channels=(128, 256, 512, 1024, 1024),
    vae_blocks=2,
    vit_layers=27,
    vit_hidden=1152,
    vit_heads=16,
    vit_width=4304,
    vit_table=16,
    vit_slots=1024,
    dtype="bfloat16",
)


@dataclass(frozen=True)
class Release:
    """Configuration and tokenizer of one synthetic release."""

    config: HunyuanImage3Config
    tokenizer: HunyuanTokenizer


def release(kind: Literal["base", "instruct", "distil"] = "instruct", *, layers: int = RELEASE.layers) -> Release:
    """The 80B sizes with ``layers`` layers; all layers are alike, so fewer of them measure activations as well."""
    return from_spec(replace(RELEASE, kind=kind, layers=layers))


def from_spec(spec: SyntheticSpec) -> Release:
    with tempfile.TemporaryDirectory(prefix="phase-parallel-bench-") as folder:
        config, _ = write_settings(Path(folder) / "release", spec)
        return Release(config, HunyuanTokenizer.from_folder(Path(folder) / "release", config))
