"""The key list: equal to the golden checkpoints' files, and to the published counts of the real sizes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from specs import RELEASE

from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.keys import checkpoint_shapes
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_settings


def test_golden_checkpoints(golden_dir: Path) -> None:
    folders = sorted((golden_dir / "checkpoints").iterdir())
    assert folders
    for folder in folders:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        stored: dict[str, tuple[int, ...]] = {}
        for name in set(index["weight_map"].values()):
            with safe_open(folder / name, "pt") as shard:
                stored |= {key: tuple(shard.get_slice(key).get_shape()) for key in shard.keys()}  # noqa: SIM118
        assert checkpoint_shapes(HunyuanImage3Config.from_folder(folder)) == stored


@pytest.mark.parametrize(
    ("kind", "tensors", "parameters"),
    [("base", 5161, 83_009_199_459), ("instruct", 5161, 83_009_199_459), ("distil", 5169, 83_044_867_427)],
)
def test_release_counts(tmp_path: Path, kind: str, tensors: int, parameters: int) -> None:
    config, _ = write_settings(tmp_path / "release", replace(RELEASE, kind=kind))
    shapes = checkpoint_shapes(config)
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_release_shapes_of_irregular_layers(tmp_path: Path) -> None:
    config, _ = write_settings(tmp_path / "release", RELEASE)
    shapes = checkpoint_shapes(config)
    assert shapes["model.layers.31.self_attn.qkv_proj.weight"] == (6144, 4096)
    assert shapes["vae.encoder.down.2.downsample.conv.weight"] == (128, 512, 3, 3, 3)
    assert shapes["vae.decoder.up.0.upsample.conv.weight"] == (8192, 1024, 3, 3, 3)
    assert shapes["vae.decoder.up.3.upsample.conv.weight"] == (512, 256, 3, 3, 3)
    assert shapes["final_layer.model.0.skip_connection.weight"] == (1024, 4096, 1, 1)
    assert shapes["vision_model.head.attention.in_proj_weight"] == (3456, 1152)


def test_equal_widths_have_no_skip_weights(tmp_path: Path) -> None:
    config, _ = write_settings(tmp_path / "equal", SyntheticSpec(hidden=64, patch_embed_width=64))
    assert not [key for key in checkpoint_shapes(config) if "skip_connection" in key]
