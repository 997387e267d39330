"""``bench e2e`` as a program, with toy sizes on the CPU: parts, JSON, refusals; its clock, its rows, and what would show that weights moved."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phase_parallel.bench.ar import TASKS, prompt_row
from phase_parallel.bench.e2e import PARTS, Picture, Trace, picture_rows
from phase_parallel.bench.e2e_table import row_of
from phase_parallel.bench.errors import BenchError
from phase_parallel.bench.picture_clock import ROOM, PartClock, Residence, require_no_copy
from phase_parallel.bench.pictures import cond_images
from phase_parallel.bench.release import release
from phase_parallel.launch.cli import main

PROGRAM = ["bench", "e2e", "--device", "cpu", "--scale", "small", "--repeats", "1"]


def test_one_rank_makes_a_whole_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "e2e.json"
    assert main([*PROGRAM, "--ranks", "1", "--task", "ti2i", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {"hardware", "commit", "torch", "date", "layers", "ranks"} <= set(result)
    (row,) = result["rows"]
    assert (row["scheme"], row["task"], row["prompt_tokens"], row["text_tokens"], row["steps"]) == ("single", "ti2i", 6290 // 8, 16, 2)
    assert list(row["parts_s"]) == list(PARTS) and sum(row["parts_s"].values()) == pytest.approx(row["e2e_s"])
    assert all(seconds > 0 for seconds in row["parts_s"].values())
    assert all(row[name] > 0 for name in ("ms_prefill", "ms_per_token", "switch_ms", "ms_per_step", "median_ms_per_step", "vae_s"))
    assert row["reused"] == 6290 // 8 + 16 - 1, "all of the text but its end"
    assert row["repeats_alike"] and len(row["digest"]) == 32
    assert "stayed at their addresses" in capfd.readouterr().out


def test_two_ranks_make_the_same_picture(tmp_path: Path) -> None:
    out = tmp_path / "e2e.json"
    assert main([*PROGRAM, "--ranks", "2", "--task", "t2i", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["scheme"], row["prompt_tokens"]) == ("tp2", 1251 // 8)
    assert len(row["peak_gb_of_ranks"]) == 2


@pytest.mark.ranks4
def test_four_ranks_change_their_groups_for_the_picture(tmp_path: Path) -> None:
    """The prefix of each branch comes from other ranks; the bench refuses ranks whose pictures differ."""
    out = tmp_path / "e2e.json"
    assert main([*PROGRAM, "--ranks", "4", "--scheme", "hybrid4-cfg", "--task", "t2i", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["scheme"] == "hybrid4-cfg" and len(row["peak_gb_of_ranks"]) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--scale", "small", "--alone"], "a rank without its peers makes none; leave --alone out"),
        (["--scale", "small", "--ranks", "2", "--scheme", "tp4"], "scheme tp4 does not run on 2 ranks; give --ranks 1, 2, 4."),
        ([], "add --scale small"),
    ],
)
def test_refusals(words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "e2e", "--device", "cpu", *words]) == 1
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_picture_goes_on_where_the_text_ends(task: object) -> None:
    built = release(layers=1)
    before, written = prompt_row(built, task), tuple(range(500, 540))
    rows = picture_rows(built, task, cond_images(built.config, task.pictures), SimpleNamespace(prompt_tokens=before.tokens, tokens=written))
    tokens, special = rows.cond.tokens, built.tokenizer.special
    assert tokens[: len(before)] == before.tokens and tokens[len(before) :][:39] == written[:-1]
    assert tokens[len(before) + 39] == special.think_end
    assert len(rows.uncond) == len(rows.cond) and rows.cond.gen.grid == (64, 64)


def test_parts_add_up_to_the_whole() -> None:
    clock = PartClock(torch.device("cpu"))
    clock.end("one")
    clock.end("two")
    whole = clock.total
    clock.move(clock.seconds["two"] / 4, "two", "three")
    assert list(clock.seconds) == ["one", "two", "three"] and clock.total == pytest.approx(whole)
    assert clock.seconds["three"] * 3 == pytest.approx(clock.seconds["two"])


def test_a_weight_that_moved_is_named() -> None:
    resident = {"a": torch.zeros(4), "b": torch.zeros(4)}
    home = Residence.of(resident)
    home.require_unmoved(resident, "after the switch")
    with pytest.raises(BenchError, match="1 of 2 weights lie elsewhere after the switch, the first of them b"):
        home.require_unmoved({**resident, "b": resident["b"].clone()}, "after the switch")


def test_a_switch_that_allocates_is_refused() -> None:
    require_no_copy(100, 100 + ROOM)
    with pytest.raises(BenchError, match="the switch to denoise allocated"):
        require_no_copy(100, 101 + ROOM)


def test_the_slowest_rank_of_the_median_picture_counts() -> None:
    def picture(denoise: float) -> Picture:
        seconds = dict.fromkeys(PARTS, 0.0) | {"denoise": denoise, "vae": 1.0}
        return Picture(seconds, {}, [4.0, 5.0, 90.0], 8, 16, 12, 64, {}, {}, "t", "d")

    mine = [picture(denoise) for denoise in (50.0, 3.0, 5.0, 4.0)]

    def gather(values: list[int]) -> list[list[int]]:
        """The other rank is a second slower in each picture."""
        other = list(values)
        for number in range(len(values) // (len(PARTS) + 1)):
            other[number * (len(PARTS) + 1)] += 1_000_000_000
        return [list(values), other]

    row = row_of(mine, Trace(TASKS[0], 11, 10), SimpleNamespace(control_gather=gather))
    assert (row["e2e_s"], row["first_e2e_s"], row["e2e_s_of_repeats"]) == (6.0, 52.0, [5.0, 7.0, 6.0])
    assert (row["parts_s"]["encode"], row["ms_per_step"], row["median_ms_per_step"]) == (1.0, 400.0, 5.0)
