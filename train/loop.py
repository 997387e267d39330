"""What every training here does a step at a time: the learning rate of the step, clipped gradients, a running mean of the weights, and a log of losses.

Imports torch and its neighbours.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from .errors import MiniError

WARM_UP = 0.04
"""Share of the steps in which the learning rate rises from 0."""
LAST_RATE = 0.02
"""Share of the highest learning rate that is left at the end."""
EMA_START = 10.0
"""The mean of the weights forgets faster at first: after n steps it reaches back no more than about n / 10."""
CHECKED_EVERY = 20
"""Steps between two looks at the gradients on a GPU: a look waits until the device has done everything."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """For making networks: torch's generator of the CPU starts from ``seed``, and goes on afterwards as if nothing had been."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def rate_at(step: int, steps: int, *, highest: float, warm_up: float = WARM_UP, last: float = LAST_RATE) -> float:
    """The learning rate of step 0..steps-1: a straight rise, then half a cosine down to ``last`` of the highest."""
    rising = max(round(warm_up * steps), 1)
    if step < rising:
        return highest * (step + 1) / rising
    done = (step - rising) / max(steps - 1 - rising, 1)
    return highest * (last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


class Average:
    """Exponential mean of a network's weights, in fp32: what is kept in the end."""

    def __init__(self, network: nn.Module, *, decay: float) -> None:
        self._decay = decay
        self._updates = 0
        self._mean = {name: tensor.detach().float().clone() for name, tensor in network.named_parameters()}

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Once after each step."""
        self._updates += 1
        decay = min(self._decay, self._updates / (self._updates + EMA_START))
        torch._foreach_lerp_(list(self._mean.values()), [tensor.float() for tensor in network.parameters()], 1 - decay)

    def weights(self) -> dict[str, Tensor]:
        """Copies by parameter name, fp32, on the network's device."""
        return {name: tensor.clone() for name, tensor in self._mean.items()}

    def state(self) -> dict[str, Tensor]:
        """Everything that `restore` needs."""
        return {"updates": torch.tensor(self._updates), **{f"mean/{name}": tensor for name, tensor in self._mean.items()}}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """To what ``state`` gave."""
        self._updates = int(state["updates"])
        for name, tensor in self._mean.items():
            tensor.copy_(state[f"mean/{name}"])


class Stepper:
    """An optimizer with its schedule: one call a step.

    ``highest`` is the learning rate after warm-up, ``clip`` the largest norm of all gradients together, ``decay`` AdamW's of the weights.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        steps: int,
        highest: float,
        clip: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.99),
        decay: float = 0.0,
    ) -> None:
        self._parameters = list(parameters)
        self._steps, self._highest, self._clip = steps, highest, clip
        self._optimizer = torch.optim.AdamW(self._parameters, lr=highest, betas=betas, weight_decay=decay, fused=self._parameters[0].is_cuda)
        self._norms: Tensor | float = 0.0
        self.step = 0

    def descend(self, loss: Tensor) -> Tensor:
        """Backward, then as `follow`. Makes new gradients, so not beside `Gradients`."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return self.follow()

    def follow(self) -> Tensor:
        """Clips the gradients that are there, and steps. Returns their norm before clipping, on the device.

        Raises MiniError when it is not finite: on a CPU before the weights change, on a GPU some steps later, but before anything is kept.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate_at(self.step, self._steps, highest=self._highest)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._norms = self._norms + norm
        if not norm.is_cuda or (self.step + 1) % CHECKED_EVERY == 0:
            self.check()
        self._optimizer.step()
        self.step += 1
        return norm

    def check(self) -> None:
        """Raises MiniError when a gradient since the last check was not finite."""
        norms, self._norms = float(self._norms), 0.0
        if not math.isfinite(norms):
            raise MiniError(f"The gradients up to step {self.step} are not finite; give this stage of the recipe a lower rate than {self._highest}.")

    def state(self) -> dict[str, Tensor]:
        """Everything that `restore` needs, also after a trip through a file of tensors."""
        self.check()
        moments = self._optimizer.state_dict()["state"]
        return {"step": torch.tensor(self.step), **{f"{number}/{name}": tensor for number, own in moments.items() for name, tensor in own.items()}}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """To what ``state`` gave, before the first step."""
        self.step = int(state["step"])
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            if key != "step":
                number, name = key.split("/")
                moments.setdefault(int(number), {})[name] = tensor
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})


class LossLog:
    """Losses of all stages in one file of JSON lines: {"stage", "step", "seconds", and by name the mean values since the line before}."""

    def __init__(self, path: Path, *, every: int = 20) -> None:
        """A line after ``every`` steps of a stage; what a file of this name holds already stays."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._every = path, every
        self._begun = time.monotonic()
        self._sums: dict[str, float | Tensor] = {}
        self._count = 0
        self._stage, self._step = "", 0

    def add(self, stage: str, step: int, **values: float | Tensor) -> None:
        """Once after each step, with the same names throughout a stage. Values on a device are added up there until a line is written."""
        if stage != self._stage:
            self.flush()
        self._stage, self._step = stage, step
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in values.items()}
        self._count += 1
        if step % self._every == 0:
            self.flush()

    def flush(self) -> None:
        """Writes the mean of the steps since the last line, if there were any; at the end of all stages."""
        if self._count:
            self.write(self._stage, self._step, **{name: float(total) / self._count for name, total in self._sums.items()})
        self._sums, self._count = {}, 0

    def write(self, stage: str, step: int, **values: float) -> None:
        """One line at once; ``seconds`` count from the making of the log."""
        rounded = {name: float(f"{value:.5g}") for name, value in values.items()}
        line = {"stage": stage, "step": step, "seconds": round(time.monotonic() - self._begun, 1), **rounded}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, float | str]]:
    """The lines of a LossLog, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
