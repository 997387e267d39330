"""Which size is drawn: the tables of both releases, pinned sizes, sizes of pictures, and the sentence when it became another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lone_engine import RecordingHandle, lone_engine

from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint
from phase_parallel.nodes import host_compat, size_choices
from phase_parallel.nodes.node_encode import HunyuanImage3Encode
from phase_parallel.nodes.text_socket import HunyuanText
from phase_parallel.nodes.text_stage import Sampling, TextOutcome, TextWish, run_text_stage
from phase_parallel.nodes.vae_socket import HunyuanVae

EXTRA = {33: (1024, 768), 34: (1280, 720), 35: (768, 1024), 36: (720, 1280)}


@pytest.fixture(scope="module", params=["base", "instruct"])
def release_sizes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that draws the sizes of the releases."""
    folder = tmp_path_factory.mktemp("sizes") / request.param
    write_checkpoint(folder, SyntheticSpec(kind=request.param, layers=1, image_base_size=1024, vit_layers=1, max_positions=8192))
    return folder


@pytest.fixture
def engine(release_sizes: Path) -> RecordingHandle:
    return lone_engine(release_sizes)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(host_compat, "show_text", lambda text, node_id: texts.append(text))
    return texts


def outcome(engine: RecordingHandle, size: str, *, height: int = 1024, width: int = 1024, image: torch.Tensor | None = None) -> TextOutcome:
    wish = TextWish("a dog", "off", "None", "", size, width, height, 8, 0, Sampling("greedy"), images=(image,))
    return run_text_stage(engine, wish, node_id="1", report=None)


def test_every_choice_of_the_widget_is_drawn_or_explained(engine: RecordingHandle) -> None:
    exact = 0
    for label in size_choices.bucket_labels():
        asked, found = size_choices.parse_label(label), outcome(engine, label)
        assert (found.height, found.width) in engine.table.rows
        exact += asked == (found.height, found.width)
        assert (found.note == "") == (asked == (found.height, found.width)), label
    assert exact == len(engine.table) == {"base": 33, "instruct": 37}[engine.config.kind]
    assert engine.made == [], "a pinned size asks no model"


@pytest.mark.parametrize(("index", "size"), EXTRA.items())
def test_the_four_extra_ratios(engine: RecordingHandle, shown: list[str], index: int, size: tuple[int, int]) -> None:
    height, width = size
    positive, _, latent = HunyuanImage3Encode().encode(HunyuanText(engine), HunyuanVae(engine), "a dog", width, height)
    row = positive[0][1]["hunyuan_image_3_row"]
    ratios = engine.tokenizer.ratio_ids
    drawn = next(ratios.index(token) for token in row.row.tokens if token in ratios)
    assert engine.table.size(drawn) == (row.height, row.width)
    assert tuple(latent["samples"].shape[2:]) == (row.height // 16, row.width // 16)
    if engine.config.kind == "instruct":
        assert drawn == index and (row.height, row.width) == size and shown == []
    else:
        assert drawn < 33
        assert shown == [f"{width}x{height} is not a size of this model; the nearest one is drawn: {row.width}x{row.height}."]


def test_following_a_picture(engine: RecordingHandle) -> None:
    if engine.config.kind == "base":
        pytest.skip("takes no pictures")
    same = outcome(engine, size_choices.FOLLOW_IMAGE, image=torch.zeros(1, 720, 1280, 3))
    assert (same.height, same.width, same.note) == (720, 1280, "")
    photo = outcome(engine, size_choices.FOLLOW_IMAGE, image=torch.zeros(1, 300, 400, 3))
    assert (photo.height, photo.width) == (768, 1024)
    assert photo.note.startswith("400x300 is not a size of this model")
