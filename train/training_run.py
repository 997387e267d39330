"""The loop that both trainings of the trunk share: batches in, a running mean of the weights out, and everything kept that a stopped run needs.

Imports torch and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .batches import Batches
from .gradients import Gradients, Told
from .loop import Average, LossLog, Stepper
from .packing import Bucket

Tensors = dict[str, Tensor]
LEAST_TOKENS = 1500
LossOf = Callable[[Bucket, torch.Generator], tuple[Tensor, Told]]
"""What to descend, and what to write down; see `gradients.Compute`."""


@dataclass(frozen=True)
class Pace:
    """``steps`` batches of about ``tokens`` tokens, padding counted; ``rate``: the highest learning rate; ``kept_every``: steps between two copies."""

    steps: int
    tokens: int
    rate: float
    kept_every: int = 1000

    def scaled(self, share: float) -> Pace:
        """A shorter run, of smaller batches, to try the program."""
        steps = max(1, math.ceil(self.steps * share))
        return replace(self, steps=steps, tokens=max(LEAST_TOKENS, math.ceil(self.tokens * share)), kept_every=max(1, math.ceil(self.kept_every * share)))


@dataclass(frozen=True)
class Keeping:
    """``keep`` gets the state of the run now and then; ``begun`` is what it got last before a run was stopped."""

    keep: Callable[[Tensors], None] = lambda state: None
    begun: Mapping[str, Tensor] | None = None


NOT_KEPT = Keeping()


def train_network(
    stage: str, network: nn.Module, batches: Batches, pace: Pace, loss_of: LossOf, *, seed: int, log: LossLog, keeping: Keeping, decay: float = 0.0
) -> Tensors:
    """The mean of the network's weights, fp32, on its device. A run that goes on has the batches and random numbers of one that was not stopped, and on a
    CPU gives the same bits."""
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    stepper = Stepper(network.parameters(), steps=pace.steps, highest=pace.rate, betas=(0.9, 0.95), decay=decay)
    # The mean reaches back over about a thirtieth of the run.
    average = Average(network, decay=max(0.9, 1 - 30 / pace.steps))
    run = {"stepper": stepper, "average": average, "batches": batches}
    if keeping.begun is not None:
        _restore(network, run, generator, keeping.begun)

    def step_of(number: int, index: Tensor) -> tuple[Tensor, Told]:
        with _autocast(device):
            return loss_of(batches.chosen(number, index), generator)

    gradients = Gradients(network.parameters(), step_of, generator, record=device.type == "cuda")
    while stepper.step < pace.steps:
        told = gradients.of(*batches.draw())
        gradient = stepper.follow()
        average.update(network)
        log.add(stage, stepper.step, **told, gradient=gradient)
        if stepper.step % pace.kept_every == 0 and stepper.step < pace.steps:
            keeping.keep(_state(network, run, generator))
    stepper.check()
    return average.weights()


def _state(network: nn.Module, run: Mapping[str, Stepper | Average | Batches], generator: torch.Generator) -> Tensors:
    state = {f"network/{name}": tensor.detach() for name, tensor in network.state_dict().items()}
    for part, holder in run.items():
        state |= {f"{part}/{name}": tensor for name, tensor in holder.state().items()}
    return state | {"generator": generator.get_state()}


def _restore(network: nn.Module, run: Mapping[str, Stepper | Average | Batches], generator: torch.Generator, state: Mapping[str, Tensor]) -> None:
    def part(prefix: str) -> Tensors:
        return {name.removeprefix(f"{prefix}/"): tensor for name, tensor in state.items() if name.startswith(f"{prefix}/")}

    network.load_state_dict(part("network"))
    for name, holder in run.items():
        holder.restore(part(name))
    generator.set_state(state["generator"].cpu())


@contextmanager
def _autocast(device: torch.device) -> Iterator[None]:
    """bf16 products on a GPU; a CPU computes in fp32. Without the cache of casts, as PyTorch asks for in what is recorded."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
        yield
