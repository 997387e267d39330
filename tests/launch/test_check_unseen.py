"""`phase-parallel check` on a folder that it has never seen: other layers, heads, experts, vocabulary, channels, seeds and names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import engine_of
from safetensors.torch import save_file
from thread_world import run_ranks

from phase_parallel.launch import cli
from phase_parallel.launch.check import PRESETS
from phase_parallel.launch.golden import GoldenCase, run_case
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint

SUMMARY = re.compile(r"cases (\d+) of (\d+), tensors (\d+), worst error (\d\.\d\de[-+]\d\d|inf): (ok|FAIL)")
# Two KV heads, so that two ranks work and four do not.
UNSEEN = SyntheticSpec(
    layers=3, hidden=96, heads=6, kv_heads=2, head_dim=8, experts=5, topk=2, expert_width=20, shared_experts=2, vocab=210,
    latent_channels=8, auto_ratio=5, seed=23, vit_layers=1,
)  # fmt: skip
BLANK = {
    "system_prompt": None, "cot_text": None, "bot_task": "image", "image_size": "128x128", "input_images": [], "denoise": True, "steps": 2,
    "guidance": 3.0, "flow_shift": 3.0, "do_sample": False, "max_new_tokens": None, "tolerances": {"default": 1e-4},
}  # fmt: skip
CASES = {
    "any-1": {"checkpoint": "a", "kind": "base", "task": "t2i", "prompt": "two pears", "seed": 91},
    "any-2": {
        "checkpoint": "a", "kind": "base", "task": "auto_ratio", "prompt": "x", "bot_task": "img_ratio", "image_size": "auto", "seed": 3,
        "denoise": False, "max_new_tokens": 1,
    },
    "any-3": {
        "checkpoint": "b", "kind": "instruct", "task": "ar_text", "prompt": "turn it", "bot_task": "think_recaption", "seed": 5, "denoise": False,
        "max_new_tokens": 50,
    },
    "any-4": {"checkpoint": "c", "kind": "distil", "task": "t2i", "prompt": "sea", "seed": 6, "guidance": 2.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made with this pack on one rank; the comparison is with two ranks, in other processes and another summation order."""
    folder = tmp_path_factory.mktemp("unseen")
    for name, kind in (("a", "base"), ("b", "instruct"), ("c", "distil")):
        write_checkpoint(folder / "checkpoints" / name, replace(UNSEEN, kind=kind))
    for name, values in CASES.items():
        case = folder / "cases" / name
        case.mkdir(parents=True)
        spec = BLANK | values | {"name": name}
        (case / "case.json").write_text(json.dumps(spec))

        def body(plan: object, comm: object, case: Path = case, spec: dict = spec) -> dict[str, torch.Tensor]:
            engine = engine_of(folder / "checkpoints" / spec["checkpoint"], plan, comm)
            return run_case(GoldenCase(case, spec, {}), engine)

        (got,) = run_ranks(body, "single", world_size=1)
        save_file(
            {key: (value.byte() if value.dtype == torch.bool else value).contiguous().clone() for key, value in got.items()},
            case / "expected.safetensors",
        )
    return folder


def check(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.main(["check", *map(str, arguments)])
    return code, capsys.readouterr().out


@pytest.mark.ranks4
def test_two_ranks(unseen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = check(capsys, unseen, "--plan", "tp2")
    summary = SUMMARY.fullmatch(out.splitlines()[-1])
    assert code == 0 and summary, out
    cases, expected, tensors, worst, word = summary.groups()
    assert (cases, expected, word) == ("4", "4", "ok") and 0.0 < float(worst) < 1e-4
    lines = [line for line in out.splitlines() if line.startswith("    ")]
    assert all(re.fullmatch(r"    \S+ +\d\.\d\d\de[-+]\d\d  limit \de[-+]\d\d  ok", line) for line in lines)
    assert len(lines) == int(tensors) > 40


def test_plan_that_does_not_fit_fails_each_case(unseen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = check(capsys, unseen, "--plan", "tp4", "--brief")
    assert code == 1
    assert out.count("num_key_value_heads 2 cannot be split over tensor_parallel 4 (plan tp); choose 1 or 2 ranks") == 4
    assert out.splitlines()[-1] == "cases 4 of 4, tensors 0, worst error 0.00e+00: FAIL"


def test_presets_are_the_plans_that_all_checks_cover() -> None:
    hybrid = ["hybrid-sp-ulysses", "hybrid-sp-kv", "hybrid-cfg"]
    replicated = ["replicated-sp-ulysses", "replicated-sp-kv", "replicated-cfg"]
    assert list(PRESETS) == ["single", "tp2", "tp4", *hybrid, *replicated]
