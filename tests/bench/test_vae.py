"""``bench vae`` as a program, with toy sizes on the CPU: rows, JSON, refusals; its tiles and its bands."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engines import engine_of
from thread_world import run_ranks

from phase_parallel.bench import vae as vae_module
from phase_parallel.bench.release import RELEASE, from_spec
from phase_parallel.bench.vae import VaePicture, finest_bands, measure_way, tile_starts
from phase_parallel.bench.vae_table import FULL, TOY, widest
from phase_parallel.launch.cli import main
from phase_parallel.models.hunyuan_image_3.vae_memory import peak_bytes

PROGRAM = ["bench", "vae", "--device", "cpu", "--scale", "small", "--repeats", "1", "--size", "48x32"]


def test_one_rank_makes_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vae.json"
    assert main([*PROGRAM, "--alone", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["ranks"], result["alone"]) == (1, True) and {"hardware", "commit", "torch", "date"} <= set(result)
    assert [(row["direction"], row["height"], row["width"], row["way"], row["path"]) for row in result["rows"]] == [
        ("decode", 48, 32, "one rank", "whole"),
        ("encode", 48, 32, "one rank", "whole"),
    ]
    assert all(row["ms"]["median"] > 0 and row["difference"] is None for row in result["rows"])
    assert "decode    48x32" in capfd.readouterr().out


def test_two_ranks_make_what_one_makes(tmp_path: Path) -> None:
    out = tmp_path / "vae.json"
    assert main([*PROGRAM, "--ranks", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["direction"], row["way"], row["ranks"]) for row in rows] == [
        ("decode", "one rank", 1), ("decode", "all ranks", 2), ("encode", "one rank", 1), ("encode", "all ranks", 2),
    ]  # fmt: skip
    assert all(0 <= row["difference"] < 1e-4 * row["largest"] for row in rows if row["way"] == "all ranks")
    assert all(len(row["peak_gb_of_ranks"]) == 2 for row in rows)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--scale", "small", "--size", "100x64"], "give multiples of 16"),
        ([], "bench vae --device cpu only tries the program; add --scale small."),
    ],
)
def test_refusals(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vae", "--device", "cpu", "--alone", *words]) == 1
    assert sentence in capsys.readouterr().err


def test_sizes_of_the_release() -> None:
    built = from_spec(FULL)
    assert widest(built) == (512, 2048)
    assert built.config.vae == from_spec(RELEASE).config.vae
    assert from_spec(TOY).config.num_hidden_layers == 1


@pytest.mark.parametrize("tile", [8, 9, 24, 100])
@pytest.mark.parametrize("size", [8, 25, 64, 100])
def test_tiles_cover_the_picture_and_overlap(size: int, tile: int) -> None:
    starts = tile_starts(size, tile)
    covered = sorted({place for start in starts for place in range(start, min(start + tile, size))})
    assert covered == list(range(size)) and starts[-1] + min(tile, size) == size
    assert all(a < b <= a + tile - min(8, tile // 2) for a, b in pairwise(starts))


def test_what_does_not_fit_is_made_in_tiles(eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = run_ranks(lambda plan, comm: engine_of(eight_ways, plan, comm), "single", world_size=1)[0]
    picture = VaePicture(engine, 32, 256)
    free = peak_bytes(engine.config.vae, height=2, width=8, ranks=1)
    monkeypatch.setattr(vae_module, "free_bytes", lambda device: free)
    row, whole = measure_way(picture, "encode", "one rank", 1, None, repeats=1, barrier=lambda: None)
    assert (row.path, row.tile, whole, row.difference) == ("tiles", (32, 128), None, None)
    assert [part.shape[2:] for part in picture.parts("encode", (2, 8))] == [torch.Size((32, 128))] * 3


def test_bands_are_those_of_the_tallest_piece() -> None:
    config = from_spec(RELEASE).config.vae
    assert finest_bands(config, (64, 64), 1) == 8, "2 GiB in bands of 256 MiB"
    assert finest_bands(config, (64, 64), 4) == 2
    assert finest_bands(config, (8, 64), 1) == 1


@pytest.mark.parametrize(
    "words", [["vae", "--repeats", "0"], ["vae", "--beside", "-1"], ["denoise", "--layers", "0"], ["ar", "--tokens", "-3"], ["e2e", "--ranks", "0"]]
)
def test_numbers_that_measure_nothing_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words, "--device", "cpu", "--scale", "small"])
    assert end.value.code == 2
    assert f"argument {words[1]}: {words[2]!r} is no" in capsys.readouterr().err
