"""The whole recipe at a ten-thousandth of its length: both folders come out, a second run makes nothing again, another recipe is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phase_parallel.launch.cli import main
from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.keys import checkpoint_shapes
from phase_parallel.models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from phase_parallel.parallel.checkpoint import Checkpoint
from phase_parallel.train import recipe as recipe_module
from phase_parallel.train.errors import MiniError
from phase_parallel.train.loop import read_log
from phase_parallel.train.mini import NAMES
from phase_parallel.train.recipe import FULL, Recipe, train
from phase_parallel.train.vae_training import Stage

CPU = torch.device("cpu")


def tiny() -> Recipe:
    scaled = FULL.scaled(1e-4)
    return replace(
        scaled,
        vae=replace(scaled.vae, stages=(Stage(1, 1, 64),), pictures=4, measured=1),
        tower=replace(scaled.tower, steps=1, batch=4, pictures=4),
        corpus={kind: 2 for kind in FULL.corpus},
        trunk=replace(scaled.trunk, steps=2, tokens=600),
        distil=replace(scaled.distil, steps=1, tokens=600),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mini")
    run(folder, tiny())
    return folder


def run(folder: Path, recipe: Recipe) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_module, "plot_losses", lambda log, out: out.write_bytes(b""))
        train(folder, CPU, recipe=recipe, workers=1, tell=said.append)
    return said


@pytest.mark.parametrize("kind", ["instruct", "distil"])
def test_both_folders_are_official_ones(made: Path, kind: str) -> None:
    folder = made / NAMES[kind]
    config = HunyuanImage3Config.from_folder(folder)
    HunyuanTokenizer.from_folder(folder, config)
    stored = Checkpoint(folder).tensors
    assert {key: info.shape for key, info in stored.items()} == checkpoint_shapes(config)
    assert {info.dtype for info in stored.values()} == {"F16"}
    assert config.cfg_distilled == config.use_meanflow == (kind == "distil")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10 << 20


def test_what_both_have_alike_is_one_file_twice(made: Path) -> None:
    shards = [sorted((made / name).glob("model-*.safetensors"))[-1] for name in NAMES.values()]
    assert shards[0].name == shards[1].name and shards[0].read_bytes() == shards[1].read_bytes()


def test_every_stage_wrote_its_losses(made: Path) -> None:
    assert [line["stage"] for line in read_log(made / "losses.jsonl")] == ["vae", "tower", "trunk", "distil"]


def test_a_second_run_makes_nothing_again(made: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in made.rglob("*.safetensors")}
    said = run(made, tiny())
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*.safetensors")} == before
    assert sum("is there" in line for line in said) == 4


def test_a_stage_of_another_recipe_is_refused(made: Path) -> None:
    with pytest.raises(MiniError, match=r"tower\.safetensors was made by another recipe; remove it, or train into another folder"):
        run(made, replace(tiny(), tower=replace(tiny().tower, rate=1e-5)))


def test_a_damaged_stage_is_named(made: Path, tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "vae.safetensors").write_bytes(b"no tensors")
    with pytest.raises(MiniError, match=r"vae\.safetensors cannot be read"):
        run(tmp_path, tiny())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--scale", "0"], "--scale 0.0 is outside"),
        (["--scale", "2"], "--scale 2.0 is outside"),
        (["--workers", "0"], "--workers 0 is too few"),
    ],
)
def test_bad_options_are_one_sentence(tmp_path: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "out"), "--device", "cpu", *words]) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_found_before_any_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["train", "--out", str(tmp_path / "file"), "--device", "cpu", "--scale", "0.0001"]) == 1
    assert f"nothing can be written into {tmp_path / 'file'} (File exists); give --out in a place that you may write to." in capsys.readouterr().err


def test_what_draws_the_curves_is_asked_for_before_any_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("phase_parallel.train.loss_plot.find_spec", lambda name: None)
    monkeypatch.setattr("phase_parallel.train.cli.train", lambda *_, **__: pytest.fail("a training would have started"))
    assert main(["train", "--out", str(tmp_path / "out"), "--device", "cpu", "--scale", "0.0001"]) == 1
    assert "drawn with matplotlib, which is not installed; run `python -m pip install matplotlib`" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "out")]) == 1
    assert "needs a CUDA device and this machine has none" in capsys.readouterr().err
