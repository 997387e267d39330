"""The learning rate's course, the mean of the weights, a clipped step and the log of losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from phase_parallel.train.errors import MiniError
from phase_parallel.train.loop import Average, LossLog, Stepper, rate_at, read_log, seeded


def test_the_rate_rises_and_falls_to_a_small_rest() -> None:
    rates = [rate_at(step, 100, highest=2.0, warm_up=0.1, last=0.05) for step in range(100)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert max(rates) == rates[9] == rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_run_of_one_step_has_the_full_rate() -> None:
    assert rate_at(0, 1, highest=1.0) == 1.0


def weight_of(value: float) -> nn.Linear:
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, value)
    return network


def test_the_mean_of_the_weights_starts_quickly_and_then_follows_slowly() -> None:
    network = weight_of(0.0)
    average = Average(network, decay=0.5)
    nn.init.constant_(network.weight, 1.0)
    average.update(network)  # keeps 1 / 11 of what was
    assert average.weights()["weight"].item() == pytest.approx(10 / 11)
    for _ in range(40):
        average.update(network)
    nn.init.constant_(network.weight, 3.0)
    average.update(network)
    assert average.weights()["weight"].item() == pytest.approx(2.0, abs=1e-4)


def test_weights_are_copies() -> None:
    average = Average(weight_of(1.0), decay=0.9)
    average.weights()["weight"].zero_()
    assert average.weights()["weight"].item() == 1.0


def test_a_step_goes_down_and_tells_the_norm_before_clipping() -> None:
    network = weight_of(1.0)
    stepper = Stepper(network.parameters(), steps=10, highest=0.1, clip=0.5)
    norm = stepper.descend(8.0 * network.weight.sum())
    assert norm.item() == pytest.approx(8.0)
    assert network.weight.grad.item() == pytest.approx(0.5, rel=1e-3)
    assert network.weight.item() == pytest.approx(0.9, abs=1e-3) and stepper.step == 1


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    network = weight_of(1.0)
    with pytest.raises(MiniError, match="step 0 are not finite"):
        Stepper(network.parameters(), steps=10, highest=0.1).descend(network.weight.sum() * float("nan"))
    assert network.weight.item() == 1.0


def test_the_log_holds_means_between_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    log = LossLog(path, every=2)
    for step, value in enumerate((1.0, 3.0, 5.0, 5.0, 9.0), start=1):
        log.add("one", step, loss=value)
    log.write("two", 7, share=0.5)
    lines = read_log(path)
    assert [(line["stage"], line["step"], line.get("loss", line.get("share"))) for line in lines] == [("one", 2, 2.0), ("one", 4, 5.0), ("two", 7, 0.5)]
    assert all(line["seconds"] >= 0 for line in lines)


def test_a_seed_does_not_move_the_generator_outside() -> None:
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with seeded(3):
            drawn.append(torch.rand(2))
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), before)
