"""A picture that does not fit on the ranks is decoded and encoded in tiles, and the user reads why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_engine import RecordingHandle, lone_engine

from phase_parallel.models.hunyuan_image_3 import engine as engine_module
from phase_parallel.models.hunyuan_image_3.vae_memory import peak_bytes
from phase_parallel.nodes import host_compat
from phase_parallel.nodes.vae_socket import HunyuanVae


@pytest.fixture
def engine(small_instruct: Path) -> RecordingHandle:
    return lone_engine(small_instruct)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(host_compat, "show_text", lambda text, node_id: texts.append(text))
    monkeypatch.setattr(host_compat, "running_node_id", lambda: "5")
    monkeypatch.setattr(host_compat, "result_device", lambda: torch.device("cpu"))
    return texts


@pytest.fixture
def tilings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ComfyUI's tiling was asked for; here tiles lie side by side."""
    asked: list[dict[str, Any]] = []

    def tiled(samples: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> torch.Tensor:
        asked.append(options)
        width, height = options["tile"]
        rows = [torch.cat([function(tile) for tile in row.split(width, 3)], 3) for row in samples.split(height, 2)]
        return torch.cat(rows, 2)

    monkeypatch.setattr(host_compat, "tiled", tiled)
    return asked


def leave_room(monkeypatch: pytest.MonkeyPatch, engine: RecordingHandle, height: int, width: int) -> None:
    """The ranks have what ``height`` x ``width`` latent pixels need, and not a byte more."""
    free = peak_bytes(engine.config.vae, height=height, width=width, ranks=1)
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: free)


def test_a_picture_that_fits_is_whole(engine, shown, tilings, monkeypatch) -> None:
    leave_room(monkeypatch, engine, 16, 8)
    latents = torch.zeros(1, engine.config.vae.latent_channels, 16, 8)
    HunyuanVae(engine).encode(HunyuanVae(engine).decode(latents))
    assert shown == [] and tilings == []


def test_decode_in_tiles(engine, shown, tilings, monkeypatch) -> None:
    leave_room(monkeypatch, engine, 8, 8)
    latents = torch.zeros(2, engine.config.vae.latent_channels, 16, 8)
    assert HunyuanVae(engine).decode(latents).shape == (2, 256, 128, 3)
    assert tilings == [{"tile": (8, 8), "overlap": 4, "scale": 16, "out_channels": 3}] * 2
    assert len(engine.made) == 2 * (1 + 2)
    assert len(shown) == 2 and shown[0].startswith("VAE in overlapping tiles of 128x128 (height x width)")


def test_encode_in_tiles(engine, shown, tilings, monkeypatch) -> None:
    leave_room(monkeypatch, engine, 8, 8)
    latents = HunyuanVae(engine).encode(torch.zeros(1, 128, 256, 3))
    assert latents.shape == (1, engine.config.vae.latent_channels, 8, 16)
    channels = engine.config.vae.latent_channels
    assert tilings == [{"tile": (128, 128), "overlap": 64, "scale": 1 / 16, "out_channels": channels}]
    assert len(shown) == 1


def test_a_tile_is_tried_even_if_less_is_free_by_then(engine, shown, tilings, monkeypatch) -> None:
    # Looked at twice for the whole picture: before recorded steps give way, and behind that.
    left = [peak_bytes(engine.config.vae, height=16, width=8, ranks=1)] * 2
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: left.pop(0) if left else 0)
    HunyuanVae(engine).decode(torch.zeros(1, engine.config.vae.latent_channels, 17, 8))
    assert len(tilings) == 1 and [args.get("tile") for _, args, _ in engine.made] == [None, True, True]
