"""The two trainings of the trunk: they learn, a seed repeats them, and the distilled step is the teacher's guided way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phase_parallel.train.distil_training import SUBSTEPS, train_distil, walk
from phase_parallel.train.examples import draw_example
from phase_parallel.train.loop import LossLog, read_log
from phase_parallel.train.mini import mini_config
from phase_parallel.train.objective import noise_levels
from phase_parallel.train.packing import Bucket, Form, pack_row, stack
from phase_parallel.train.training_run import Keeping, Pace
from phase_parallel.train.trunk import TrainingTrunk
from phase_parallel.train.trunk_training import train_trunk

SHARES = {(0, "nothing"): 1.0}


@pytest.fixture(scope="module")
def bucket() -> Bucket:
    config, tokenizer = mini_config("instruct", 0.5)
    examples = [e for seed in range(40) if (e := draw_example(seed, pictures=0, writing="nothing")).result.scene.aspect == "wide"][:4]
    latents = torch.randn(1, 16, 1, 1, generator=torch.Generator().manual_seed(0)).expand(4, 16, 12, 20).contiguous()
    return stack(Form((), "wide", "nothing"), [pack_row(example, tokenizer, config) for example in examples], latents, (), ())


def small(kind: str):
    """The mini model with one layer."""
    config, tokenizer = mini_config(kind, 0.5)
    return replace(config, num_hidden_layers=1), tokenizer


def test_training_lowers_both_losses_and_a_seed_repeats_it(tmp_path: Path, bucket: Bucket) -> None:
    config, _ = small("instruct")
    pace = Pace(steps=30, tokens=1300, rate=3e-3)
    made = [train_trunk(config, [bucket], pace, seed=1, log=LossLog(tmp_path / f"{run}.jsonl", every=5), shares=SHARES) for run in range(2)]
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])
    lines = read_log(tmp_path / "0.jsonl")
    assert lines[-1]["velocity"] < 0.8 * lines[0]["velocity"] and lines[-1]["text"] < 0.6 * lines[0]["text"]


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path, bucket: Bucket) -> None:
    config, _ = small("instruct")
    pace = Pace(steps=8, tokens=1300, rate=3e-3, kept_every=3)
    kept: list[dict] = []
    copied = Keeping(lambda state: kept.append({name: tensor.clone() for name, tensor in state.items()}))
    whole = train_trunk(config, [bucket], pace, seed=1, log=LossLog(tmp_path / "a.jsonl"), shares=SHARES, keeping=copied)
    assert len(kept) == 2
    later = train_trunk(config, [bucket], pace, seed=1, log=LossLog(tmp_path / "b.jsonl"), shares=SHARES, keeping=Keeping(begun=kept[1]))
    assert all(torch.equal(whole[key], later[key]) for key in whole)


def test_distilling_lowers_what_the_student_misses(tmp_path: Path, bucket: Bucket) -> None:
    teacher_config, _ = small("instruct")
    config, tokenizer = small("distil")
    teacher = TrainingTrunk(teacher_config)
    teacher.initialize(seed=2)
    with torch.no_grad():
        teacher.final_layer.model[1][-1].weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    weights = {name: tensor.detach() for name, tensor in teacher.state_dict().items()}
    pace = Pace(steps=25, tokens=1300, rate=2e-3)
    made = train_distil(config, tokenizer, teacher_config, weights, [bucket], pace, seed=1, log=LossLog(tmp_path / "log.jsonl", every=5), shares=SHARES)
    lines = read_log(tmp_path / "log.jsonl")
    assert lines[-1]["velocity"] < 0.8 * lines[0]["velocity"]
    assert set(made) == set(weights) | {key for key in made if key.startswith(("guidance_emb.", "timestep_r_emb."))}


def test_the_teacher_walks_with_guidance_from_level_to_level(bucket: Bucket) -> None:
    asked = []

    def teacher(batch: Bucket, latents: torch.Tensor, times, unconditional: torch.Tensor, text: bool):
        asked.append(times.t[0].item())
        return SimpleNamespace(velocity=torch.where(unconditional[:, None, None, None], 1.0, 3.0).expand_as(latents))

    start = torch.zeros(4, 16, 12, 20)
    end = walk(teacher, bucket, start, torch.full((4,), 0.9), torch.full((4,), 0.6), torch.full((4,), 2.5))
    assert torch.allclose(end, torch.full_like(end, -0.3 * (1 + 2.5 * 2)))
    assert asked == pytest.approx([900 - 100 * number for number in range(SUBSTEPS)])


def test_noise_levels_cover_the_schedule_evenly() -> None:
    levels = noise_levels(1000, torch.Generator().manual_seed(0), torch.device("cpu"))
    unshifted = levels / (3 - 2 * levels)
    assert float(levels.min()) > 0 and float(levels.max()) < 1
    assert torch.allclose(unshifted.sort().values, torch.arange(1000) / 1000, atol=1e-3 + 1e-4)
