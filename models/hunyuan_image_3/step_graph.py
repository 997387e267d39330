"""Denoise steps as CUDA graphs: the second step of the same rows is recorded, and every one after it replayed.

A recorded step reads the latents and the step's numbers from buffers of its own; weights, K/V caches, rotary tables, attention schedules and peers' memory
it finds where they lay when it was recorded. A graph does not keep them alive, so this module does: the caches as long as the prefixes are kept, the
others always.

Two ranks that add up through each other's memory need not both replay: what a rank launches and what it replays exchange the same in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...kernels.row_schedule import Schedule, collect_schedules
from ...parallel.ledger import Ledger
from ..graph_recording import record_graph
from ..row_reduction import RowReduction
from .model import BlockRow, HunyuanImage3Model, StepInputs, StepTensors
from .prefix import MAX_ROWS, PrefixStore
from .transformer import Slot

Launch = Callable[[Sequence[tuple[Slot, int]], torch.Tensor, StepTensors], torch.Tensor]


def why_not_recorded(model: HunyuanImage3Model, *, alone: bool = False) -> str | None:
    """None when steps of ``model`` are recorded, else the reason. ``alone``: collectives do nothing, for measuring one rank."""
    if model.device.type != "cuda":
        return "no CUDA device"
    if model.weights["denoise"].kernels.name != "fused":
        return "eager kernels wait for the device"
    # Groups cannot end before a graph that holds their collectives. What the ranks of the guidance branches exchange comes behind a recorded step.
    topology = model.plan.topology("denoise")
    if not alone and topology.sp_size > 1:
        return "the process group exchanges the tokens of a step inside it"
    if not alone and topology.tp_size > 1 and not model.row_reduction().recordable:
        return "the process group adds up the summands of a step inside it"
    return None


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    latents: torch.Tensor
    step: StepTensors
    velocity: torch.Tensor
    collectives: Sequence[str]
    held: tuple[Sequence[tuple[Slot, int]], Sequence[Schedule], RowReduction]

    def replay(self, latents: torch.Tensor, step: StepInputs, ledger: Ledger) -> torch.Tensor:
        self.latents.copy_(latents)
        self.step.set(step)
        self.graph.replay()
        ledger.repeat(self.collectives)
        return self.velocity.clone()


class StepGraphs:
    """Recorded steps of one model, not more of them than prefixes are kept."""

    def __init__(self, model: HunyuanImage3Model, prefixes: PrefixStore):
        self._model, self._prefixes = model, prefixes
        # What is recorded, and None for what was computed once.
        self._steps: OrderedDict[tuple[object, ...], tuple[Sequence[BlockRow], _Recorded | None]] = OrderedDict()
        self._pool: tuple[int, int] | None = None

    @property
    def holds_memory(self) -> bool:
        return any(recorded is not None for _, recorded in self._steps.values())

    def release(self) -> None:
        """Gives back the memory of all steps."""
        self._steps.clear()
        self._pool = None

    @torch.inference_mode()
    def replay(self, blocks: Sequence[BlockRow], latents: torch.Tensor, step: StepInputs, launch: Launch) -> torch.Tensor | None:
        """The velocities, or None for a step that nobody has computed yet: the caller does, which compiles and plans what is recorded next time.
        ``launch`` launches a step and returns its velocities."""
        places = tuple((block.row, id(block.cache), block.latent) for block in blocks)
        key = (places, latents.shape, step.timestep_r is None, step.guidance is None)
        known = self._steps.get(key)
        if known is None or known[1] is None:
            self._forget()
            recorded = None if known is None else self._record(blocks, latents, step, launch)
            self._steps[key] = (blocks, recorded)
        else:
            recorded = known[1]
        self._steps.move_to_end(key)
        return None if recorded is None else recorded.replay(latents, step, self._model.comm.ledger)

    def _forget(self) -> None:
        """Steps whose prefixes are kept no more, and those too many."""
        for key, (blocks, _) in list(self._steps.items()):
            if not all(self._prefixes.keeps(block.cache) for block in blocks):
                del self._steps[key]
        while len(self._steps) > MAX_ROWS:
            self._steps.popitem(last=False)
        if not self.holds_memory:
            self._pool = None  # PyTorch takes no graphs into a pool whose last one has ended

    def _record(self, blocks: Sequence[BlockRow], latents: torch.Tensor, step: StepInputs, launch: Launch) -> _Recorded:
        model = self._model
        model.comm.await_device("a step of the picture")
        slots = [(model.block_slot(block), block.latent) for block in blocks]
        own, numbers = latents.clone(), StepTensors.of(step, model.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # What is recorded has not run: it counts with every replay, so that a rank that replays has made the same as one that launches.
        with collect_schedules() as schedules, model.comm.ledger.apart() as collectives:
            graph, velocity = record_graph(lambda: launch(slots, own, numbers), self._pool)
        held = (slots, tuple({id(schedule): schedule for schedule in schedules}.values()), model.row_reduction())
        return _Recorded(graph, own, numbers, velocity, tuple(collectives), held)
