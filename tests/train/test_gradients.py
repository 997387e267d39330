"""Gradients of a step, run or recorded: those of a plain backward pass, with the same random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phase_parallel.train.gradients import Gradients

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
SHAPES = (3, 5, 3, 3, 5)


class Pair(nn.Module):
    """The second layer has a part in long steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


def run(device: torch.device, *, recorded: bool) -> list[list[Tensor]]:
    """Gradients of every step, with what it told at the end."""
    torch.manual_seed(0)
    network = Pair().to(device)
    generator = torch.Generator(device).manual_seed(1)

    def compute(shape: int):
        def step(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            hidden = network.first(x + torch.randn(x.shape, generator=generator, device=device))
            loss = (network.second(hidden) if shape > 3 else hidden).square().mean()
            return loss, {"loss": loss}

        return step

    gradients = Gradients(network.parameters(), compute, generator)
    made = []
    for number, shape in enumerate(SHAPES):
        x = torch.arange(shape * 4.0).reshape(shape, 4) + number
        if recorded:
            told = gradients.of(shape, x)["loss"]
        else:
            for parameter in network.parameters():
                parameter.grad = None
            told, _ = compute(shape)(x.to(device))
            told.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]
        made.append([*grads, told.detach().clone()])
    return made


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_a_plain_pass(device: str) -> None:
    for got, want in zip(run(torch.device(device), recorded=True), run(torch.device(device), recorded=False), strict=True):
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(got, want, strict=True))


def test_a_part_that_takes_no_part_gets_zeros() -> None:
    short, long = run(torch.device("cpu"), recorded=True)[:2]
    assert not short[2].any() and not short[3].any() and bool(long[2].any())
