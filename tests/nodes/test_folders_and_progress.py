"""Finding checkpoints, fitting the preview, passing reports on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phase_parallel.nodes import checkpoint_folders, host_compat
from phase_parallel.nodes.latent_preview import PreviewFactors, colour_chart, fit_factors
from phase_parallel.nodes.progress import NodeProgress


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in checkpoint_folders.REQUIRED_FILES:
        (folder / name).write_text("{}")
    return folder


def test_checkpoints_are_found_by_their_files(tmp_path: Path) -> None:
    alone = make_checkpoint(tmp_path / "alone")
    many = tmp_path / "many"
    make_checkpoint(many / "first")
    make_checkpoint(many / "tencent" / "second")
    make_checkpoint(many / "too" / "deep" / "third")
    (many / "not_one").mkdir()
    found = checkpoint_folders.find_checkpoints([alone, many, tmp_path / "absent"])
    assert found == {
        "alone": alone,
        "first": many / "first",
        "tencent/second": many / "tencent" / "second",
    }


def test_names_come_from_the_launcher_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "given")
    monkeypatch.setenv("PHASE_PARALLEL_MODEL_DIRS", str(folder))
    assert checkpoint_folders.checkpoint_names() == ["given"]
    assert checkpoint_folders.checkpoint_folder("given") == folder
    before = checkpoint_folders.fingerprint(folder)
    (folder / "config.json").write_text('{"changed": true}')
    assert checkpoint_folders.fingerprint(folder) != before


def test_no_checkpoint_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHASE_PARALLEL_MODEL_DIRS", raising=False)
    assert checkpoint_folders.checkpoint_names() == [checkpoint_folders.NOTHING_FOUND]
    with pytest.raises(ValueError, match="put the downloaded folder into models/hunyuan_image_3"):
        checkpoint_folders.checkpoint_folder("nothing")


def test_preview_recovers_a_linear_picture() -> None:
    """A VAE whose latents are a linear map of the colours can be previewed exactly (up to the ridge)."""
    mix = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        small = torch.nn.functional.avg_pool2d(pixels, 16)
        return torch.einsum("nrhw,cr->nchw", small, mix) + 0.3

    factors = fit_factors(encode, scale=0.5, shift=0.1)
    latents = (encode(colour_chart()) - 0.1) * 0.5
    picture = factors.picture(latents)
    want = torch.nn.functional.avg_pool2d(colour_chart(), 16)[0].movedim(0, -1)
    got = torch.from_numpy(np.array(picture)) / 127.5 - 1
    assert (got - want).abs().max() < 0.1


class Bar:
    def __init__(self, total: int) -> None:
        self.total = total
        self.seen: list[tuple[int, int, Any]] = []

    def update_absolute(self, value: int, total: int, preview: Any = None) -> None:
        self.seen.append((value, total, preview))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {"bars": [], "texts": []}

    def bar(total: int, node_id: str | None) -> Bar:
        seen["bars"].append(Bar(total))
        return seen["bars"][-1]

    monkeypatch.setattr(host_compat, "progress_bar", bar)
    monkeypatch.setattr(host_compat, "preview_size", lambda: 64)
    monkeypatch.setattr(host_compat, "show_text", lambda text, node_id: seen["texts"].append(text))
    return seen


def test_tokens_then_steps_get_a_bar_each(shown: dict[str, list[Any]]) -> None:
    factors = PreviewFactors(factors=[[1.0, 0.0, 0.0]] * 2, bias=[0.0, 0.0, 0.0])
    progress = NodeProgress("3", factors)
    progress({"kind": "tokens", "done": 4, "total": 8, "text": "<think>"})
    progress({"kind": "tokens", "done": 8, "total": 8, "text": "<think>fox"})
    progress({"kind": "steps", "done": 1, "total": 2, "latents": torch.zeros(1, 2, 3, 5)})
    tokens, steps = shown["bars"]
    assert [(value, total) for value, total, _ in tokens.seen] == [(4, 8), (8, 8)]
    assert shown["texts"] == ["<think>", "<think>fox"]
    ((value, total, (kind, picture, size)),) = steps.seen
    assert (value, total, kind, size) == (1, 2, "JPEG", 64)
    assert picture.size == (5, 3)
