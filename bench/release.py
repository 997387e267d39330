"""The sizes of the 80B release with a toy tokenizer, and the token rows that the published figures were measured with."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..models.hunyuan_image_3 import random_weights
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

SMALL = replace(
    RELEASE, layers=2, hidden=256, heads=8, kv_heads=4, head_dim=32, experts=8, topk=2, expert_width=128, vocab=512, image_base_size=256,
    patch_embed_width=64, latent_channels=16, vae_channels=(32, 32, 32, 32, 32), vae_blocks=1, vit_layers=1, vit_hidden=48, vit_heads=4,
    vit_width=96, vit_table=4, vit_slots=64,
)  # fmt: skip
"""Toy sizes, to try the programs."""

ODD_TEXTS = (" ", " word", "\n", "漢", "\U0001f600", "\u202e", "\x00", '"', "\\", "<b>", "\ufffd")


@dataclass(frozen=True)
class Release:
    """Configuration and tokenizer of one synthetic release."""

    config: HunyuanImage3Config
    tokenizer: HunyuanTokenizer


def release(kind: Literal["base", "instruct", "distil"] = "instruct", *, layers: int = RELEASE.layers) -> Release:
    """The 80B sizes with ``layers`` layers; all layers are alike, so fewer of them measure activations as well."""
    return from_spec(replace(RELEASE, kind=kind, layers=layers))


def write_release(folder: Path, spec: SyntheticSpec) -> Release:
    """A checkpoint folder that every node takes, of random weights that the ranks draw themselves. Every token id has a text, as in the releases."""
    config, _ = write_settings(folder, spec)
    random_weights.declare(folder)
    _fill_vocabulary(folder / "tokenizer.json", spec.vocab)
    return Release(config, HunyuanTokenizer.from_folder(folder, config))


def _fill_vocabulary(file: Path, size: int) -> None:
    """The toy tokenizer knows characters and special tokens; the other ids get texts that a page, a log and JSON must bear. Prompts never contain them."""
    values = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    # Named in the model too, special tokens keep their ids when the file is read.
    vocabulary |= {token["content"]: token["id"] for token in values["added_tokens"]}
    known = set(vocabulary.values())
    for number in range(size):
        if number not in known:
            vocabulary[f"{ODD_TEXTS[number % len(ODD_TEXTS)]}{number:x}"] = number
    file.write_text(json.dumps(values), encoding="utf-8")


def sizes(layers: int, *, small: bool) -> SyntheticSpec:
    """Those of the release or toy ones, with ``layers`` layers."""
    return replace(SMALL if small else RELEASE, layers=layers)


def full_vocabulary(spec: SyntheticSpec) -> Release:
    """As :func:`write_release`, without the folder: for texts of whatever tokens a random model writes."""
    with tempfile.TemporaryDirectory(prefix="phase-parallel-bench-") as folder:
        return write_release(Path(folder) / "release", spec)


def from_spec(spec: SyntheticSpec) -> Release:
    with tempfile.TemporaryDirectory(prefix="phase-parallel-bench-") as folder:
        config, _ = write_settings(Path(folder) / "release", spec)
        return Release(config, HunyuanTokenizer.from_folder(Path(folder) / "release", config))
