"""`phase-parallel check`: what counts as ok, what fails, and that nothing is passed over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from phase_parallel.launch.check import main
from phase_parallel.launch.errors import LaunchError

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CASE = "base_auto_ratio"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A golden folder with one good case, whose checkpoint is linked and not copied."""
    (tmp_path / "checkpoints").symlink_to(GOLDEN / "checkpoints")
    shutil.copytree(GOLDEN / "cases" / CASE, tmp_path / "cases" / CASE)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "cases" / CASE / "case.json"
    spec = json.loads(path.read_text())
    for name, value in changes.items():
        spec[name] = value
    path.write_text(json.dumps(spec))


def run(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    code = main([str(folder), *words])
    return code, capsys.readouterr().out.splitlines()


def test_a_good_folder_is_ok_tensor_by_tensor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(folder, capsys)
    assert code == 0
    assert any(line.split()[0] == "ar.logits" and line.endswith("ok") for line in lines if line.startswith("    "))
    assert lines[-1].startswith("cases 1 of 1, tensors 9, worst error ") and lines[-1].endswith(": ok")


def perturb(folder: Path) -> None:
    path = folder / "cases" / CASE / "expected.safetensors"
    tensors = load_file(path)
    tensors["ar.logits"] *= 1.01
    save_file(tensors, path)


def drop_everything(folder: Path) -> None:
    save_file({}, folder / "cases" / CASE / "expected.safetensors")


def demand_more(folder: Path) -> None:
    path = folder / "cases" / CASE / "expected.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "nobody.computes": tensors["ar.logits"].clone()}, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (perturb, "ar.logits"),
        (drop_everything, "expects no tensor at all"),
        (demand_more, "not computed"),
        (lambda f: edit(f, expected={"height": 99, "width": 160, "ratio_index": 22}), "352 instead of 99"),
        (lambda f: edit(f, task="dance"), "task 'dance' is unknown"),
        (lambda f: edit(f, prompt=7), "prompt is 7"),
        (lambda f: edit(f, checkpoint="absent"), "is not a folder"),
        (lambda f: edit(f, image_size="huge"), "cannot be read"),
        (lambda f: edit(f, tolerances=[1]), "tolerances must map"),
        (lambda f: edit(f, input_images=["gone.png"]), "gone.png"),
        (lambda f: (f / "cases" / CASE / "case.json").unlink(), "it needs case.json"),
        (lambda f: (f / "cases" / CASE / "case.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "cases" / CASE / "expected.safetensors").write_bytes(b"\x00" * 20), "cannot be read"),
        (lambda f: (f / "cases" / "empty").mkdir(), "case empty cannot be read"),
    ],
)
def test_what_is_wrong_fails_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], words: str
) -> None:
    damage(folder)
    code, lines = run(folder, capsys, "--brief")
    assert code == 1
    assert any(words in line for line in lines), lines
    assert lines[-1].endswith(": FAIL")


def test_a_plan_that_does_not_fit_starts_no_rank(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phase_parallel.launch.check.run_on_ranks", lambda run: pytest.fail("ranks were started"))
    code, lines = run(folder, capsys, "--plan", "tp", "--ranks", "3", "--brief")
    assert code == 1 and "num_key_value_heads 4 cannot be split over tensor_parallel 3" in lines[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks 0 is not possible"),
        (["--plan", "quick"], "Plan 'quick' is unknown"),
        (["--plan", "hybrid", "--ranks", "3"], "needs an even number of ranks"),
        (["--case", "nothing_*"], "No case of"),
        (["--moe-layout", "expert_major", "--moe-path", "two_dispatch"], "MoE path two_dispatch runs one dispatch per micro shard"),
        (["--reduction", "peer"], r"^reduction peer is for tokens that are written on the device, .*; choose reduction auto\.$"),
        (["--moe-backend", "triton"], r"^moe_backend triton cannot run here: kernels are eager: no CUDA device; choose moe_backend auto\.$"),
    ],
)
def test_impossible_wishes(folder: Path, words: list[str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        main([str(folder), *words])


def test_a_folder_without_cases(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="holds no cases"):
        main([str(tmp_path)])
