"""The schedule: golden noise levels bit for bit, the published timesteps, the Euler step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phase_parallel.models.hunyuan_image_3.schedule import (
    ScheduleError,
    euler_step,
    flow_sigmas,
    flow_timesteps,
    guidance_embedding_input,
)


def test_golden_schedules_and_steps(golden_dir: Path) -> None:
    seen = 0
    for folder in sorted((golden_dir / "cases").iterdir()):
        spec = json.loads((folder / "case.json").read_text())
        if not spec.get("denoise"):
            continue
        seen += 1
        tensors = load_file(folder / "expected.safetensors")
        sigmas = flow_sigmas(spec["steps"], spec["flow_shift"])
        assert torch.equal(sigmas, tensors["sigmas"]), folder.name
        assert torch.equal(flow_timesteps(sigmas)[:-1], tensors["timesteps"]), folder.name
        for i in range(spec["steps"]):
            after = tensors.get(f"step{i + 1}.latent_in", tensors["latent.final"])
            latent, velocity = tensors[f"step{i}.latent_in"], tensors[f"step{i}.pred"]
            step = euler_step(latent, velocity, float(sigmas[i]), float(sigmas[i + 1]))
            torch.testing.assert_close(step, after, rtol=0, atol=1e-6)
    assert seen


def test_published_timesteps() -> None:
    eight = [1000, 954.5454, 900, 833.3333, 750, 642.8571, 500, 300, 0]
    torch.testing.assert_close(flow_timesteps(flow_sigmas(8, 3.0)), torch.tensor(eight), rtol=1e-6, atol=0)
    fifty = flow_timesteps(flow_sigmas(50, 3.0))
    torch.testing.assert_close(fifty[1:3], torch.tensor([993.2432, 986.3014]), rtol=1e-6, atol=0)
    assert torch.equal(flow_sigmas(4, 1.0), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]))


def test_euler_step_is_fp32_even_from_bf16() -> None:
    latent = torch.ones(1, 2, 3, dtype=torch.bfloat16)
    moved = euler_step(latent, torch.full((1, 2, 3), 0.5), 1.0, 0.999)
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, torch.full((1, 2, 3), 0.9995))


def test_guidance_is_rounded_to_bf16() -> None:
    assert guidance_embedding_input(2.5) == 2496
    assert guidance_embedding_input(5.0) == 4992


@pytest.mark.parametrize(
    ("steps", "shift", "sentence"),
    [
        (0, 3.0, "steps is 0"),
        (-2, 3.0, "at least 1"),
        (4, 0.0, "flow_shift is 0"),
        (4, float("nan"), "above 0"),
    ],
)
def test_wrong_settings(steps, shift, sentence) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        flow_sigmas(steps, shift)
