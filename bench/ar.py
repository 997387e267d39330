"""``phase-parallel bench ar``: prefill and decode of the 80B sizes with random weights, for every way of decoding that can run here.

Fixed traces: each run reads the same row and writes the same number of tokens, whatever the tokens are. The slowest rank counts.
"""

from __future__ import annotations

import hashlib
import random
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..kernels.next_token import Draw, RuleTable
from ..models.hunyuan_image_3.model import HunyuanImage3Model
from ..models.hunyuan_image_3.sequence import build_text_row
from ..models.hunyuan_image_3.token_loop import DeviceLoop, HostLoop, TextJob
from ..models.hunyuan_image_3.token_row import TokenRow
from ..models.reduction import GroupReduction, PeerReduction, Reduction, ReductionChoice, choose_reduction, peer_block_bytes
from ..parallel.abort_word import AbortWord
from ..parallel.collectives import Communicator
from ..parallel.peer_memory import PeerMemory, PeerMemoryError
from .pictures import cond_images, features_of
from .release import Release
from .timing import WARM_UP, Spread, kernel_split, synchronize, wall_milliseconds

LETTERS = random.Random(0).choices(string.ascii_letters + string.digits, k=16384)
# As the release samples.
DRAW = Draw(True, 0.6, 1024, 0.95)
OTHER_REDUCTIONS: tuple[tuple[ReductionChoice, str], ...] = (("peer", "peer memory"), ("flashinfer", "FlashInfer"))
COPY_BANDWIDTH = 4.24e12
"""Bytes per second, read and written, of a device copy on an H200."""


@dataclass(frozen=True)
class Task:
    """``tokens`` of the prompt, of which each picture brings its share."""

    name: str
    pictures: int
    tokens: int


TASKS = (Task("t2i", 0, 1251), Task("ti2i", 1, 6290))


def choose_tasks(names: Sequence[str] = (), *, small: bool) -> list[Task]:
    """Those of ``names``, all without any; ``small`` ones have an eighth of the tokens."""
    chosen = [task for task in TASKS if task.name in names or not names]
    return [replace(task, tokens=task.tokens // 8) for task in chosen] if small else chosen


@dataclass(frozen=True)
class ArRow:
    """One line of the table. Times in ms; ``floor`` from the bytes that a token or the row must move; NaN where it was not run."""

    task: str
    decode: str
    reduction: str
    ms_per_token: Spread
    floor_ms_per_token: float
    moe_backend: str
    """Who computed the routed experts: eager, triton or flashinfer."""
    split_us: dict[str, float]
    tokens_digest: str
    """Of all tokens that were written; equal on all ranks."""


@dataclass(frozen=True)
class PrefillRow:
    task: str
    tokens: int
    ms_prefill: Spread
    ms_device: float
    moe_backend: str
    split_us: dict[str, float]


def prompt_row(built: Release, task: Task) -> TokenRow:
    """A row of exactly ``task.tokens`` tokens: one letter of text is one token of the toy tokenizer. Mixed letters, so that experts share the work."""
    return _row(built, task, prompt_text(built, task))


def prompt_text(built: Release, task: Task) -> str:
    """The prompt of that row."""
    shortest = len(_row(built, task, LETTERS[0]))
    return "".join(LETTERS[: max(1, task.tokens - shortest + 1)])


def _row(built: Release, task: Task, prompt: str) -> TokenRow:
    pictures = cond_images(built.config, task.pictures)
    return build_text_row(built.tokenizer, built.config, prompt=prompt, system_prompt=None, cot_text=None, cond_images=pictures, task="think")


def measure_prefill(model: HunyuanImage3Model, row: TokenRow, task: Task, *, repeats: int, barrier: Callable[[], None]) -> PrefillRow:
    """Row in, logits of the next token out, launched from the host as in use."""
    cache = model.new_cache(len(row), "prefill")
    features = features_of(model, task.pictures)

    def run() -> None:
        hidden = model.prefill(row, 0, len(row), cache, features)
        model.next_logits(hidden[-1:], "prefill")

    spread = wall_milliseconds(run, model.device, repeats=repeats, barrier=barrier)
    split = kernel_split(run, model.device)
    return PrefillRow(task.name, len(row), spread, sum(split.values()) / 1e3, moe_backend(model), split)


def moe_backend(model: HunyuanImage3Model) -> str:
    return model.weights["prefill"].kernels.moe


def reductions(model: HunyuanImage3Model, *, alone: bool) -> list[tuple[Reduction, str]]:
    """Every reduction of the device loop that works here, none on a CPU. ``alone``: one rank without peers sends to itself."""
    if model.device.type != "cuda":
        return []
    comm: Communicator = model.comm
    hidden, vocab, dtype, device = model.config.hidden_size, model.config.vocab_size, model.dtype, model.device
    if alone:
        mailbox, whole = peer_block_bytes(1, hidden, vocab, dtype.itemsize)
        block = torch.zeros(whole, dtype=torch.uint8, device=device)
        memory = PeerMemory(torch.tensor([block.data_ptr()], device=device), block, None)
        return [(PeerReduction(memory, 0, mailbox, timeout_s=60.0, abort=AbortWord(pinned=True)), "own memory (no peers)")]
    if comm.plan.ar_tp == 1:
        return [(GroupReduction(), "none")]
    found: list[tuple[Reduction, str]] = [(GroupReduction(), "process group")]
    for choice, name in OTHER_REDUCTIONS:
        try:
            found.append((choose_reduction(comm, hidden, vocab, dtype, device, choice)[0], name))
        except PeerMemoryError as error:
            if comm.plan.rank == 0:
                print(f"no row with {name}: {error}")
    return found


def measure_decode(
    model: HunyuanImage3Model,
    row: TokenRow,
    task: Task,
    reduction: Reduction,
    name: str,
    *,
    tokens: int,
    repeats: int,
    barrier: Callable[[], None],
) -> ArRow:
    """The device loop as it is used: ``tokens`` steps under way while the host waits for those before them."""
    limit = tokens * (repeats + WARM_UP + 2) + 16
    cache = model.new_cache(len(row) + limit, "prefill")
    cache.k.normal_()
    cache.v.normal_()
    job = TextJob(row.tokens, limit, NoRules(), DRAW, torch.Generator().manual_seed(0))
    loop = DeviceLoop(model, cache, job, reduction)
    loop.start(torch.zeros(model.config.vocab_size, device=model.device))
    loop.advance(tokens)
    spread = wall_milliseconds(lambda: loop.advance(tokens), model.device, repeats=repeats, barrier=barrier, wait=False)
    synchronize(model.device)
    split = kernel_split(loop.step, model.device)
    digest = hashlib.sha256(repr(list(loop.tokens)).encode()).hexdigest()[:16]
    floor = decode_floor_ms(model, len(row))
    return ArRow(task.name, loop.name, name, spread.scaled(1 / tokens), floor, _step_backend(model), split, digest)


def measure_eager_decode(model: HunyuanImage3Model, row: TokenRow, task: Task, *, tokens: int, barrier: Callable[[], None]) -> ArRow:
    """The same tokens one at a time through the host."""
    cache = model.new_cache(len(row) + tokens + 4, "prefill")
    cache.k.normal_()
    cache.v.normal_()
    job = TextJob(row.tokens, tokens + 4, NoRules(), Draw(False), torch.Generator())
    loop = HostLoop(model, cache, job)
    loop.start(torch.zeros(model.config.vocab_size, device=model.device))
    loop.advance(2)
    barrier()
    began = time.perf_counter()
    loop.advance(tokens)
    synchronize(model.device)
    each = (time.perf_counter() - began) * 1e3 / tokens
    return ArRow(task.name, "eager", "process group", Spread(each, each, each), decode_floor_ms(model, len(row)), moe_backend(model), {}, "")


def _step_backend(model: HunyuanImage3Model) -> str:
    """A step on the device is Triton's, also where other work is eager, unless FlashInfer was chosen."""
    return "flashinfer" if moe_backend(model) == "flashinfer" else "triton"


class NoRules:
    """Stage rules of a text that never ends by itself."""

    def table(self) -> RuleTable:
        return RuleTable(transitions=(), ratio_after=-1, ratio_tokens=(), stops=(), single=False)

    def process(self, logits: torch.Tensor, last_token: int) -> torch.Tensor:
        return logits

    def is_stop(self, token: int) -> bool:
        return False


def decode_floor_ms(model: HunyuanImage3Model, position: int) -> float:
    """Time for reading each weight that one token touches on this rank, its keys and values once, at the speed of a device copy."""
    weights, total = model.weights["decode"], 0
    for layer in weights.layers:
        block = layer.experts[0]
        per_expert = (block.w1[0].numel() + block.w2[0].numel()) * block.w1.element_size()
        total += layer.topk * per_expert + layer.router.numel() * 4
        for weight in (layer.qkv_proj, layer.o_proj, layer.shared_gate_and_up, layer.shared_down):
            total += weight.tensor.numel() * weight.tensor.element_size()
    total += weights.lm_head.tensor.numel() * weights.lm_head.tensor.element_size()
    heads = model.config.num_key_value_heads // model.plan.ar_tp
    total += 2 * model.config.num_hidden_layers * position * heads * model.config.head_dim * weights.lm_head.tensor.element_size()
    return total / COPY_BANDWIDTH * 1e3
