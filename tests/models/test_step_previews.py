"""Previews of a picture's steps: their values and order, and that a device does not rest for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phase_parallel.models.hunyuan_image_3.denoise import StepTrace
from phase_parallel.models.hunyuan_image_3.step_previews import StepPreviews

SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.0])


def traces(device: str) -> list[StepTrace]:
    latents = [torch.full((1, 2, 3, 3), float(number), device=device) for number in range(3)]
    return [StepTrace(latent, latent, None, latent + 1) for latent in latents]


def told_by(device: str, settle: Any) -> list[tuple[int, dict[str, Any]]]:
    """(steps that had been launched, what was told), in order."""
    told, launched = [], [0]
    show = StepPreviews(SIGMAS, lambda report: told.append((launched[0], report)), settle)
    for index, trace in enumerate(traces(device)):
        launched[0] = index + 1
        show(index, trace)
    return told


def check_values(reports: list[dict[str, Any]]) -> None:
    assert [(report["kind"], report["done"], report["total"]) for report in reports] == [("steps", done, 3) for done in (1, 2, 3)]
    for number, report in enumerate(reports):
        assert report["latents"].device.type == "cpu"
        assert torch.equal(report["latents"], torch.full((1, 2, 3, 3), number - float(SIGMAS[number]) * (number + 1)))


def test_without_a_device_every_step_is_told_at_once() -> None:
    events: list[object] = []
    told = told_by("cpu", events.append)
    assert [launched for launched, _ in told] == [1, 2, 3] and events == [None] * 3
    check_values([report for _, report in told])


@pytest.mark.gpu
def test_a_step_is_told_once_the_next_one_is_launched() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    told = told_by("cuda", lambda reached: reached.synchronize())
    assert [launched for launched, _ in told] == [2, 3, 3], "the last one waits for nothing"
    check_values([report for _, report in told])


def test_what_may_not_be_seen_is_not_told() -> None:
    def refuse(reached: object) -> None:
        raise RuntimeError("a peer stayed away")

    told: list[object] = []
    show = StepPreviews(SIGMAS, told.append, refuse)
    with pytest.raises(RuntimeError, match="stayed away"):
        show(0, traces("cpu")[0])
    assert not told
