"""``bench ar`` as a program, with toy sizes on the CPU: rows, JSON, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from phase_parallel.bench.ar import TASKS, decode_floor_ms, prompt_row
from phase_parallel.bench.one_rank import OneRankCommunicator
from phase_parallel.bench.random_model import random_model
from phase_parallel.bench.release import release
from phase_parallel.bench.timing import Spread, wall_milliseconds
from phase_parallel.launch.cli import main
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.parallel.plan import make_plan

SMALL = ["bench", "ar", "--device", "cpu", "--scale", "small", "--repeats", "1"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_table_of_one_and_of_two_ranks(ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ar.json"
    assert main([*SMALL, "--ranks", str(ranks), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["ranks"] == ranks
    assert [row["task"] for row in result["prefill"]] == ["t2i", "ti2i"]
    assert {(row["task"], row["decode"]) for row in result["decode"]} == {("t2i", "eager"), ("ti2i", "eager")}
    assert all(row["ms_per_token"]["median"] > 0 and row["floor_ms_per_token"] > 0 for row in result["decode"])
    assert all(("slowest_rank" in row["ms_prefill"]) == (ranks > 1) for row in result["prefill"])
    assert {row["moe_backend"] for row in [*result["decode"], *result["prefill"]]} == {result["experts"]} == {"eager"}
    assert {"hardware", "commit", "torch", "date", "scheme", "moe"} <= set(result)
    assert f"t2i   prefill   {1251 // 8} tokens" in capfd.readouterr().out


@pytest.mark.ranks4
def test_replicas_write_the_same_text(tmp_path: Path) -> None:
    """Each replica by itself: the bench refuses rows whose ranks wrote different tokens."""
    out = tmp_path / "ar.json"
    assert main([*SMALL, "--ranks", "4", "--scheme", "replicated", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["scheme"] == "replicated: AR TP2 on each of 2 replicas · denoise TP2×SP2 (ulysses)"


def test_rows_have_the_published_lengths() -> None:
    built = release(layers=2)
    assert [len(prompt_row(built, task)) for task in TASKS] == [1251, 6290]


def test_floor_counts_the_bytes_of_one_token() -> None:
    """research: 6.41 GB a token and rank under TP4 without keys and values, at 4.24 TB/s."""
    plan = make_plan("tp", world_size=4)
    config = release(layers=1).config
    with torch.device("meta"):
        model = random_model(config, plan, OneRankCommunicator(plan), LoadOptions(), device=torch.device("meta"), fill=False)
    head = config.vocab_size // 4 * config.hidden_size * 2
    per_layer = decode_floor_ms(model, 0) / 1e3 * 4.24e12 - head
    assert 32 * per_layer + head == pytest.approx(6.41e9, rel=0.01)


def test_a_backend_that_cannot_run_here_costs_no_memory(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phase_parallel.bench.ar_table.random_model", lambda *arguments, **options: pytest.fail("a model was made"))
    assert main([*SMALL, "--moe-backend", "flashinfer"]) == 1
    assert "moe_backend flashinfer cannot run here: no CUDA device; or choose moe_backend auto." in capfd.readouterr().err


def test_on_the_cpu_only_the_small_scale() -> None:
    assert main(["bench", "ar", "--device", "cpu"]) == 1


def test_spread_is_median_with_both_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    calls = []
    wall_milliseconds(lambda: calls.append(1), torch.device("cpu"), repeats=3)
    assert len(calls) == 5, "two warm-up calls and three measured ones"
