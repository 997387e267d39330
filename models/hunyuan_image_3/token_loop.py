"""Two ways to write the tokens of a text after its prompt: one at a time from the host, or on the device with the host looking on.

Both choose the same tokens for the same logits. The host uses the pauses between two calls of ``advance`` for progress, cancelling and the agreement
of the ranks, so every rank must call it equally often.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from ...kernels.kernel_set import KernelChoice
from ...kernels.next_token import COUNT, DONE, NOT_A_NUMBER, STATE_SIZE, Draw, TokenChooser
from ...kernels.triton_support import why_not
from ..graph_recording import record_graph
from ..reduction import Reduction
from .decode_step import DecodeStep
from .kv_cache import KVCache
from .model import HunyuanImage3Model
from .text_rules import StageRules, TextStageError, check_draw, draw_uniform, nan_error, sample_token

Trace = Callable[[torch.Tensor], None]
DecodeChoice = Literal["auto", "eager", "graph"]
DECODE_CHOICES: tuple[DecodeChoice, ...] = get_args(DecodeChoice)


def choose_decode(device: torch.device, choice: DecodeChoice = "auto", kernels: KernelChoice = "auto") -> tuple[bool, str]:
    """Whether tokens are written on the device, and how or why not in words. ``auto``: where Triton runs, unless eager ``kernels`` were chosen.

    Raises:
        TextStageError: ``graph`` was asked for and cannot run here.
    """
    reason = why_not(device)
    if choice == "eager":
        return False, "eager: chosen"
    if choice == "graph" and reason is not None:
        raise TextStageError(f"decode graph cannot run here: {reason}; choose decode auto or eager")
    if choice == "auto" and kernels == "eager":
        return False, "eager: eager kernels were chosen"
    if choice == "auto" and (reason is not None or device.type != "cuda"):
        return False, f"eager: {reason or 'no CUDA device'}"
    return True, "one CUDA graph a token" if device.type == "cuda" else "steps on the device"


@dataclass(frozen=True)
class TextJob:
    """What a loop needs: the prompt whose K/V fill the first positions of ``cache``, at most ``limit`` tokens, rules, and a seeded CPU generator."""

    prompt: tuple[int, ...]
    limit: int
    rules: StageRules
    draw: Draw
    generator: torch.Generator


class TokenLoop(Protocol):
    tokens: Sequence[int]
    """All tokens known so far."""
    done: bool

    def start(self, logits: torch.Tensor) -> None:
        """``logits [V]`` fp32 of the prompt's last token; chooses the first token."""
        ...

    def advance(self, count: int) -> None:
        """Writes about ``count`` more tokens, fewer at the end."""
        ...

    def finish(self) -> None:
        """Waits for what is still under way. Not after a fault: peers may never come."""
        ...

    def release(self) -> None:
        """Gives back what the device keeps for this text; always the last call."""
        ...


class HostLoop:
    """Every token passes through the host: the reference, and the way on a CPU."""

    name = "eager"

    def __init__(self, model: HunyuanImage3Model, cache: KVCache, job: TextJob, trace: Trace | None = None):
        check_draw(job.draw)
        self._model, self._cache, self._job, self._trace = model, cache, job, trace
        self.tokens: list[int] = []
        self.done = False

    def start(self, logits: torch.Tensor) -> None:
        self._choose(logits)

    def advance(self, count: int) -> None:
        while count > 0 and not self.done:
            position = len(self._job.prompt) + len(self.tokens) - 1
            self._choose(self._model.decode(self.tokens[-1], position, self._cache))
            count -= 1

    def finish(self) -> None:
        """Nothing is ever under way."""

    def release(self) -> None:
        """Nothing is kept."""

    def _choose(self, logits: torch.Tensor) -> None:
        job, draw = self._job, self._job.draw
        if self._trace is not None:
            self._trace(logits)
        token = sample_token(
            logits,
            [*job.prompt, *self.tokens],
            rules=job.rules,
            do_sample=draw.do_sample,
            temperature=draw.temperature,
            top_k=draw.top_k,
            top_p=draw.top_p,
            repetition_penalty=draw.repetition_penalty,
            generator=job.generator,
        )
        self.tokens.append(token)
        self.done = job.rules.is_stop(token) or len(self.tokens) == job.limit


class DeviceLoop:
    """Steps run on the device without the host; on CUDA as replays of one graph, one group of steps ahead of what the host has seen.

    A step after the end of the text changes nothing, so the group that is under way when the end is seen does no harm.
    """

    name = "graph"

    def __init__(self, model: HunyuanImage3Model, cache: KVCache, job: TextJob, reduction: Reduction, trace: Trace | None = None):
        check_draw(job.draw)
        self._job, self._reduction, self._trace = job, reduction, trace
        self._cuda = model.device.type == "cuda"
        self._comm = model.comm
        self._chooser = TokenChooser(
            job.draw, job.rules.table(), prompt=job.prompt, limit=job.limit, uniforms=draw_uniform(job.limit, job.generator),
            vocab=model.config.vocab_size, device=model.device,
        )  # fmt: skip
        self._step = DecodeStep(model, cache, self._chooser, reduction)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._seen: deque[_Snapshot] = deque()
        # Steps behind the last token that the limit allows would change nothing and delay what follows the text.
        self._left = job.limit - 1
        self.tokens: list[int] = []
        self.done = False

    @torch.inference_mode()
    def start(self, logits: torch.Tensor) -> None:
        if self._trace is not None:
            self._trace(logits)
        self._chooser.choose(logits.float().contiguous())
        self._look(_Snapshot(self._chooser, self._reduction.failed))

    @torch.inference_mode()
    def advance(self, count: int) -> None:
        if self.done:
            return
        if self._cuda and self._graph is None:
            self._capture()
        if self._trace is not None:
            self._advance_traced(count)
            return
        if not self._seen:
            self._launch(count)
        self._launch(count)
        self._look(self._seen.popleft())

    def finish(self) -> None:
        """All ranks have launched equally many steps, so none waits for a peer that has stopped."""
        while self._seen:
            self._seen.popleft().read(self._await)

    def release(self) -> None:
        """The graph holds on to the process group's collectives, whose groups cannot end before it."""
        self._graph = None
        self._seen.clear()

    def _advance_traced(self, count: int) -> None:
        """One step at a time, so that the host can read the logits of each."""
        while count > 0 and not self.done:
            self.step()
            self._trace(self._step.logits.clone())
            self._look(_Snapshot(self._chooser, self._reduction.failed))
            count -= 1

    def _launch(self, count: int) -> None:
        count = min(count, self._left)
        self._left -= count
        for _ in range(count):
            self.step()
        if count or not self._seen:
            self._seen.append(_Snapshot(self._chooser, self._reduction.failed))

    def step(self) -> None:
        """One more token, not awaited."""
        if self._graph is None:
            self._step.launch()
        else:
            self._graph.replay()

    def _capture(self) -> None:
        """Once eagerly, so that everything is compiled and connected, with the text marked as ended so that nothing changes; then into a graph."""
        done = self._chooser.state[DONE].clone()
        self._chooser.state[DONE] = 1
        self._step.launch()
        reached = torch.cuda.Event()
        reached.record()
        self._await(reached)
        graph, _ = record_graph(self._step.launch)
        self._chooser.state[DONE] = done
        self._graph = graph

    def _await(self, event: torch.cuda.Event) -> None:
        self._comm.await_event(event, "its steps of a text")

    def _look(self, snapshot: _Snapshot) -> None:
        state, tokens, failed = snapshot.read(self._await)
        count = int(state[COUNT])
        if failed:
            self._comm.fault_check()  # a peer's fault also ends reductions, and names the cause
        self._reduction.require(failed)
        self.tokens = tokens[:count].tolist()
        self.done = bool(state[DONE])
        if int(state[NOT_A_NUMBER]):
            raise nan_error(len(self._job.prompt) + count - 1)


class _Snapshot:
    """The chooser's state and tokens, and whether a reduction failed, as they are once the device has done everything launched so far."""

    def __init__(self, chooser: TokenChooser, failed: torch.Tensor | None):
        cuda = chooser.state.is_cuda
        self._host = torch.zeros(STATE_SIZE + 1 + chooser.tokens.numel(), dtype=torch.int32, pin_memory=cuda)
        self._host[:STATE_SIZE].copy_(chooser.state, non_blocking=True)
        if failed is not None:
            self._host[STATE_SIZE : STATE_SIZE + 1].copy_(failed, non_blocking=True)
        self._host[STATE_SIZE + 1 :].copy_(chooser.tokens, non_blocking=True)
        self._event = torch.cuda.Event() if cuda else None
        if self._event is not None:
            self._event.record()

    def read(self, wait: Callable[[torch.cuda.Event], None]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Waits for the device by ``wait``."""
        if self._event is not None:
            wait(self._event)
        return self._host[:STATE_SIZE], self._host[STATE_SIZE + 1 :], int(self._host[STATE_SIZE])
