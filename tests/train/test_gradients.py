"""Gradients of a step, run or recorded, in a training: those of a plain backward pass, with the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from phase_parallel.train.gradients import Gradients
from phase_parallel.train.loop import Stepper

CPU = torch.device("cpu")
SHAPES = (3, 5, 3, 3, 5, 5)


class Training:
    """Two layers, of which the second has a part in steps of more than 3 rows only; the weights change after every step."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).to(device)
        self.device, self.generator = device, torch.Generator(device).manual_seed(1)
        self.stepper = Stepper(self.layers.parameters(), steps=len(SHAPES), highest=0.1)

    def compute(self, rows: int, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False):
            hidden = self.layers[0](x + torch.randn(x.shape, generator=self.generator, device=self.device))
            loss = (self.layers[1](hidden) if rows > 3 else hidden).float().square().mean()
        return loss, {"loss": loss}

    def run(self, of: Callable[[int, Tensor], Tensor]) -> Iterator[list[Tensor]]:
        """Of every step what it told, and the gradients."""
        for number, rows in enumerate(SHAPES):
            told = of(rows, torch.arange(rows * 4.0).reshape(rows, 4) / 10 + number)
            yield [told.detach().clone(), *(parameter.grad.clone() for parameter in self.layers.parameters())]
            self.stepper.follow()


def trained(device: torch.device, *, record: bool) -> list[list[Tensor]]:
    training = Training(device)
    gradients = Gradients(training.layers.parameters(), training.compute, training.generator, record=record)
    places = [parameter.grad.data_ptr() for parameter in training.layers.parameters()]
    made = list(training.run(lambda rows, x: gradients.of(rows, x)["loss"]))
    assert places == [parameter.grad.data_ptr() for parameter in training.layers.parameters()]
    return made


def trained_plainly(device: torch.device) -> list[list[Tensor]]:
    training = Training(device)

    def of(rows: int, x: Tensor) -> Tensor:
        for parameter in training.layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        loss, _ = training.compute(rows, x.to(device))
        loss.backward()
        return loss

    return list(training.run(of))


def assert_alike(one: list[list[Tensor]], other: list[list[Tensor]]) -> None:
    for got, want in zip(one, other, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(got, want, strict=True))


def test_gradients_are_those_of_a_plain_pass() -> None:
    assert_alike(trained(CPU, record=False), trained_plainly(CPU))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a CUDA device")
def test_recorded_gradients_are_those_of_a_plain_pass() -> None:
    device = torch.device("cuda")
    assert_alike(trained(device, record=True), trained_plainly(device))


def test_a_layer_that_takes_no_part_gets_zeros() -> None:
    short, long = trained(CPU, record=False)[:2]
    assert not short[3].any() and not short[4].any() and bool(long[3].any())
