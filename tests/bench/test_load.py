"""``bench load``: how large the checkpoint may be, its cheap weights, its folder, and what the disk gave."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phase_parallel.bench import load_table
from phase_parallel.bench.disk import OWNER, fetched, forget, own_folder, probe, read_whole
from phase_parallel.bench.errors import BenchError
from phase_parallel.bench.load_table import LONGEST_S, RESERVE_BYTES, PooledNoise, checkpoint_bytes, choose_layers, spec_of, timed
from phase_parallel.bench.release import SMALL
from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.synthetic import weight_bytes, write_part, write_settings
from phase_parallel.parallel.checkpoint import Checkpoint

ROOM = 1 << 40


def test_the_whole_release_where_there_is_room() -> None:
    assert choose_layers(ROOM, small=False, gib=None, speeds=None) == (32, "whole")
    assert 150e9 < checkpoint_bytes(32, small=False) < 180e9


@pytest.mark.parametrize(
    ("free", "gib", "speeds", "why"),
    [
        (100 << 30, None, None, "free space"),
        (ROOM, 40.0, None, "--gib"),
        (ROOM, None, (1e9, 1e9), "the disk's speed"),
        (100 << 30, 40.0, (1e9, 1e9), "--gib"),
    ],
)
def test_the_largest_that_fits(free: int, gib: float | None, speeds: tuple[float, float] | None, why: str) -> None:
    layers, reason = choose_layers(free, small=False, gib=gib, speeds=speeds)
    limits = [free - RESERVE_BYTES, *([gib * 2**30] if gib else []), *([LONGEST_S / (1 / speeds[0] + 3 / speeds[1])] if speeds else [])]
    assert reason == why
    assert checkpoint_bytes(layers, small=False) <= min(limits) < checkpoint_bytes(layers + 1, small=False)


def test_a_disk_too_small_for_one_layer() -> None:
    with pytest.raises(BenchError, match=r"one layer has [0-9.]+ GB, and --gib allows 1\.1 GB; give --folder on another disk"):
        choose_layers(ROOM, small=False, gib=1.0, speeds=None)


def test_parts_of_several_processes_are_one_checkpoint(tmp_path: Path) -> None:
    spec = replace(spec_of(2, small=True), max_shard_bytes=1 << 20)
    folder = tmp_path / "checkpoint"
    write_settings(folder, spec)
    config = HunyuanImage3Config.from_folder(folder)
    written = [write_part(folder, config, spec, PooledNoise(spec.dtype), part=part, parts=3) for part in (2, 0, 1)]
    assert sorted(file for part in written for file in part) == sorted(folder.glob("*.safetensors")) and all(written)
    assert Checkpoint(folder).bytes_on_disk() == sum(weight_bytes(config, spec).values())


def test_pooled_noise_differs_between_keys_and_is_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_table, "POOL", 1 << 12)
    make, again = PooledNoise("bfloat16"), PooledNoise("bfloat16")
    a, b = make("a", (300, 70)), make("b", (300, 70))
    assert a.shape == (300, 70) and a.dtype == torch.bfloat16 and torch.equal(a, again("a", (300, 70))) and not torch.equal(a, b)
    assert make("vae.a", (4,)).dtype == torch.float32
    long = make("vae.long", (9000,))
    assert torch.equal(long[:4904], long[4096:]) and len(long.unique()) > 4000, "one block again and again"


def test_a_folder_is_made_and_removed_and_what_was_left_behind_too(tmp_path: Path) -> None:
    place = tmp_path / "load"
    with own_folder(place) as folder:
        (folder / "x").write_text("")
    assert not place.exists()
    place.mkdir()
    (place / OWNER).write_text("4000001")  # no process has this number
    (place / "left").write_text("")
    with own_folder(place) as folder:
        assert [file.name for file in folder.iterdir()] == [OWNER]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    with pytest.raises(BenchError, match="was not made by this program"), own_folder(tmp_path / "theirs"):
        pass
    (tmp_path / "theirs" / OWNER).write_text(str(os.getppid()))
    with pytest.raises(BenchError, match="is in use by process"), own_folder(tmp_path / "theirs"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match=r"cannot be used for a checkpoint \(Not a directory\)"), own_folder(tmp_path / "file" / "x"):
        pass


def test_a_forgotten_file_comes_from_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(os.urandom(4 << 20))
    forget([file])
    before = fetched()
    assert read_whole([file]) == 4 << 20
    if before is None or fetched() == before:
        pytest.skip("this system does not count reads of the disk, or keeps these files in memory")
    assert fetched() - before >= 4 << 20
    before = fetched()
    assert read_whole([file]) == 4 << 20 and fetched() - before < 1 << 20


def test_a_probe_of_the_disk_leaves_nothing(tmp_path: Path) -> None:
    assert all(speed > 0 for speed in probe(tmp_path, 1 << 20)) and not list(tmp_path.iterdir())


def test_the_slowest_rank_counts() -> None:
    class Comm:
        def control_gather(self, values: list[int]) -> list[list[int]]:
            return [values, [values[0] + 5_000_000_000, 7, *values[2:]]] if len(values) > 1 else [values]

    found = timed(lambda: time.sleep(0.01) or 3, Comm())
    assert found["seconds"] > 5.0 and found["bytes"] == 10 and len(found["seconds_of_ranks"]) == 2


def test_the_small_one_is_the_toy() -> None:
    assert spec_of(2, small=True) == SMALL and choose_layers(ROOM, small=True, gib=None, speeds=None) == (2, "whole")
