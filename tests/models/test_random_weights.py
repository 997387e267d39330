"""Folders without weights: only a benchmark's ranks load them, and every rank draws the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.loading import LoadOptions, check_folder, load_model
from phase_parallel.models.hunyuan_image_3.random_weights import FILE_NAME, declare, declared
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint, write_settings
from phase_parallel.parallel.checkpoint import CheckpointError
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.environment import RANDOM_WEIGHTS
from phase_parallel.parallel.plan import ParallelPlan, make_plan

SPEC = replace(SyntheticSpec(kind="instruct"), layers=1)
PLAN = make_plan("single", world_size=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_settings(tmp_path / "random", SPEC)
    declare(tmp_path / "random", seed=5)
    return tmp_path / "random"


@pytest.mark.parametrize("value", [None, "", "0", "1", "yes"])
def test_nobody_gets_noise_by_accident(folder: Path, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANDOM_WEIGHTS, raising=False)
    if value is not None:
        monkeypatch.setenv(RANDOM_WEIGHTS, value)
    sentence = r"/random holds no weights, only the sizes for a benchmark; choose a downloaded checkpoint$"
    with pytest.raises(CheckpointError, match=sentence):
        check_folder(folder, PLAN, LoadOptions())
    with pytest.raises(CheckpointError, match=sentence):
        loaded(folder, "single", world_size=1)


def loaded(folder: Path, name: str, **plan: int) -> list[dict[str, torch.Tensor]]:
    """Some tensors of every rank's model."""

    def body(plan: ParallelPlan, comm: Communicator) -> dict[str, torch.Tensor]:
        seen: list[int] = []
        model = load_model(folder, plan, comm, LoadOptions(), device=torch.device("cpu"), progress=lambda done, total: seen.append(done * 100 // total))
        assert seen == sorted(seen) and seen[-1] == 100
        layer = model.weights["denoise"].layers[0]
        return {"router": layer.router, "qkv": layer.qkv_proj.tensor, "experts": layer.experts[0].w1, **dict(model.around.named_parameters())}

    return run_ranks(body, name, **plan)


def test_ranks_draw_one_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas and what is replicated are equal (loading compares them), shards are not; the seed decides."""
    monkeypatch.setenv(RANDOM_WEIGHTS, "allowed")
    check_folder(folder, PLAN, LoadOptions())
    ranks = loaded(folder, "hybrid", world_size=4)
    assert all(torch.equal(ranks[0][name], ranks[2][name]) for name in ranks[0])
    assert torch.equal(ranks[0]["router"], ranks[1]["router"]) and not torch.equal(ranks[0]["experts"], ranks[1]["experts"])
    declare(folder, seed=6)
    assert not torch.equal(loaded(folder, "single", world_size=1)[0]["router"], ranks[0]["router"])


def test_a_damaged_declaration_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANDOM_WEIGHTS, "allowed")
    (folder / FILE_NAME).write_text("[]")
    with pytest.raises(CheckpointError, match=r"random_weights.json in .* has no seed; write the folder again"):
        check_folder(folder, PLAN, LoadOptions())


def test_real_weights_are_read_wherever_random_ones_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "real", SPEC)
    assert not declared(tmp_path / "real")
    (before,) = loaded(tmp_path / "real", "single", world_size=1)
    monkeypatch.setenv(RANDOM_WEIGHTS, "allowed")
    (after,) = loaded(tmp_path / "real", "single", world_size=1)
    assert all(torch.equal(before[name], after[name]) for name in before)
