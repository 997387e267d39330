"""``bench denoise --accuracy`` on the CPU with toy sizes, where the usual kernels are the eager ones, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phase_parallel.bench import denoise_accuracy
from phase_parallel.bench.denoise_accuracy import AccuracyOptions, error_of, measure, require_close
from phase_parallel.bench.errors import BenchError
from phase_parallel.kernels.kernel_set import EAGER
from phase_parallel.launch.cli import main

PROGRAM = ["bench", "denoise", "--device", "cpu", "--scale", "small", "--accuracy"]


def test_eager_bf16_is_near_fp32_and_the_measure_of_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accuracy.json"
    assert main([*PROGRAM, "--moe-backend", "auto", "--moe-backend", "grouped_mm", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    eager, same, other = result["rows"]
    assert 1e-3 < eager["error"] < 0.1 and eager["of_eager"] == 1.0
    assert same["error"] == eager["error"], "the usual kernels of a CPU are the eager ones"
    assert other["kernels"] == "eager bf16, experts grouped_mm" and 0.5 < other["of_eager"] < 1.5
    assert {"hardware", "commit", "layers", "prefix", "image_tokens", "allowed"} <= set(result)
    assert "velocity against fp32" in capfd.readouterr().out


def test_kernels_that_lose_digits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose sum loses 6 bits."""

    def coarse(kernels: object) -> object:
        def experts(*args: object) -> torch.Tensor:
            exact = EAGER.experts(*args)
            return exact + 0.2 * exact.float().abs().mean().to(exact.dtype) * torch.randn_like(exact)

        return replace(kernels, experts=experts, moe="coarse")

    def use(model: object) -> None:
        weights = model.weights["denoise"]
        model.weights = {**model.weights, "denoise": replace(weights, kernels=coarse(weights.kernels))}

    monkeypatch.setattr(denoise_accuracy, "use_grouped_mm", use)
    result = measure(AccuracyOptions(("grouped_mm",), 2, True), torch.device("cpu"))
    with pytest.raises(BenchError, match=r"the velocity of eager bf16, experts coarse is \d+\.\d+ times as far from fp32 as that of eager bf16, and 1.5"):
        require_close(result)


@pytest.mark.parametrize(("velocity", "reference"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, 0.0)])
def test_an_error_without_a_meaning_is_none(velocity: float, reference: float) -> None:
    with pytest.raises(BenchError, match="errors mean nothing"):
        error_of(torch.full((2, 2), velocity), torch.full((2, 2), reference))


def test_an_error_is_relative() -> None:
    assert error_of(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.08)


@pytest.mark.parametrize("chosen", [["--sizes"], ["--moe-table"], ["--scheme", "tp2"], ["--ranks", "2"]])
def test_choices_that_do_not_go_with_it(chosen: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*PROGRAM, *chosen]) == 1
    assert "--accuracy compares models on one rank" in capfd.readouterr().err


@pytest.mark.parametrize("chosen", [["--cfg", "serial"], ["--moe-layout", "expert_major"], ["--reduction", "group"], ["--task", "ti2i"]])
def test_choices_that_it_would_not_follow(chosen: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*PROGRAM, *chosen]) == 1
    assert "--accuracy takes one step of t2i as the loader has it" in capfd.readouterr().err
