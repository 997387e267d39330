"""Gradients of a training step. Recorded, a step of each shape is a CUDA graph that is made once and then replayed: a small network's step is many small
kernels, and starting them one by one takes longer than running them, the more so on a slow CPU. Imports torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WARM_UPS = 2
"""Runs of a step before it is recorded: compilers and libraries choose their kernels then, which a recording forbids."""
Told = Mapping[str, Tensor]
Compute = Callable[..., tuple[Tensor, Told]]
"""From the shape and the inputs of a step to the loss and what to write down. What Python decides may depend on the shape only, and a recorded step may
neither wait for the device nor move anything to it."""


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    told: Told


class Gradients:
    """Fills the ``grad`` of parameters, step by step. The tensors there stay the same ones, so a step in which a parameter takes no part leaves it a
    gradient of 0: an optimizer moves it on all the same, by momentum and decay."""

    def __init__(self, parameters: Iterable[nn.Parameter], compute: Compute, generator: torch.Generator, *, record: bool) -> None:
        """All parameters are on one device, for ``record`` a CUDA device, where ``generator``, the only one that the steps use, draws too."""
        self._parameters = list(parameters)
        self._compute, self._generator = compute, generator
        self._recorded: dict[Hashable, _Recorded] | None = {} if record else None
        self._device = self._parameters[0].device
        if record:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def of(self, shape: Hashable, *inputs: Tensor) -> Told:
        """The step of ``shape`` with these inputs, from any device. What comes back is valid until the next step: recordings share their memory."""
        if self._recorded is None:
            return self._run(shape, tuple(given.to(self._device) for given in inputs))
        recorded = self._recorded.get(shape)
        if recorded is None:
            recorded = self._recorded[shape] = self._record(shape, inputs)
        for kept, given in zip(recorded.inputs, inputs, strict=True):
            kept.copy_(given, non_blocking=True)
        recorded.graph.replay()
        return recorded.told

    def _run(self, shape: Hashable, inputs: tuple[Tensor, ...]) -> Told:
        torch._foreach_zero_([parameter.grad for parameter in self._parameters])
        loss, told = self._compute(shape, *inputs)
        loss.backward()
        return {name: value.detach() for name, value in told.items()}

    def _record(self, shape: Hashable, inputs: tuple[Tensor, ...]) -> _Recorded:
        kept = tuple(given.to(self._device, copy=True) for given in inputs)
        drawn = self._generator.get_state()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                self._run(shape, kept)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._generator.set_state(drawn)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            told = self._run(shape, kept)
        return _Recorded(graph, kept, told)
