"""Autoregressive text on all ranks: prefill, then one token at a time under the stage rules (spec 5.7, 5.10, 5.11).

Every rank computes the same logits and draws with an equally seeded CPU generator, so all ranks write the same text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...kernels.kernel_set import KernelChoice
from ...kernels.next_token import Draw
from ...parallel.collectives import Communicator
from ...parallel.faults import SectionCancelled
from ..reduction import Reduction, ReductionChoice, choose_reduction
from .config import HunyuanImage3Config
from .kv_cache import KVCache
from .model import HunyuanImage3Model, ReferenceFeatures
from .prefix import PrefixStore
from .resolution import ResolutionTable
from .seeds import seeded_generator
from .sequence import CondImage, build_text_row
from .text_rules import COT_TASKS, BotTask, LegalCot, StageRules, TextStageError, cot_from_tokens, legal_cot
from .token_loop import DecodeChoice, DeviceLoop, HostLoop, TextJob, TokenLoop, Trace, choose_decode
from .token_row import TokenRow
from .tokenizer import HunyuanTokenizer

# Ranks agree on the stop word, and the user sees new text, every so many tokens.
TOKENS_PER_CHECK = 4
# Special tokens of a picture section around its <img> tokens, at most; room so that denoise can go on in the text's cache.
PICTURE_SPECIALS = 16


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; greedy unless ``do_sample``."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class TextRequest:
    """One text run. ``need_ratio``: the size is automatic, so the text ends with a ratio token."""

    prompt: str
    system_prompt: str | None
    cot_text: str | None
    task: BotTask
    need_ratio: bool
    max_new_tokens: int
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class TextResult:
    """``tokens`` as generated, forced ones included. ``cot_text`` None for tasks that write none; ``ratio_index`` None when no size was asked for
    or the text was cut before it. ``cot_text`` is as written, ``legal`` as the image stage may read it, with the ``recaption`` of that."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    answer: str
    """The text without the token that ended it."""
    cot_text: str | None
    recaption: str | None
    ratio_index: int | None
    truncated: bool
    """The text lacks its own end: a limit cut it, or the model ended it with the end of another part."""
    end: Literal["stop", "max_new_tokens", "positions"]
    """Why no more was written: a token that ends texts, or which limit."""
    legal: LegalCot | None
    prefill_seconds: float
    decode_seconds: float
    close_seconds: float
    """From the last token until the device has ended the steps that were under way and the recorded one is let go."""
    decode: str
    """How the tokens were written, as :func:`~.token_loop.choose_decode` words it."""
    reduction: str
    """How a decode step added up the ranks' summands, and why; ranks may have other reasons."""


def prefill_row(
    tokenizer: HunyuanTokenizer, config: HunyuanImage3Config, request: TextRequest, cond_images: Sequence[CondImage] = ()
) -> TokenRow:
    """The row that a request starts from; raises SequenceError when it is too long, so that rank 0 can ask before any collective."""
    opening = {"think_recaption": "think", "image": "img_ratio"}.get(request.task, request.task)
    return build_text_row(
        tokenizer,
        config,
        prompt=request.prompt,
        system_prompt=request.system_prompt,
        cot_text=request.cot_text,
        cond_images=tuple(cond_images),
        task=opening,
    )


class TextGenerator:
    """Runs text requests against one model and leaves their K/V in ``prefixes``."""

    def __init__(
        self,
        model: HunyuanImage3Model,
        tokenizer: HunyuanTokenizer,
        table: ResolutionTable,
        prefixes: PrefixStore,
        *,
        decode: DecodeChoice = "auto",
        reduction: ReductionChoice = "auto",
        kernels: KernelChoice = "auto",
    ):
        """``decode``: tokens through the host (eager) or on the device (graph); auto takes the device where it can. Raises as choose_decode."""
        self._model = model
        self._tokenizer = tokenizer
        self._table = table
        self._prefixes = prefixes
        self._on_device, self.decode_reason = choose_decode(model.device, decode, kernels)
        self._reduce = reduction
        self._connected: Communicator | None = None
        self._reduction: Reduction | None = None
        self.reduction_reason = ""

    def generate(
        self,
        request: TextRequest,
        *,
        features: Sequence[ReferenceFeatures] = (),
        cond_images: Sequence[CondImage] = (),
        check: Callable[[int, int], None] = lambda done, total: None,
        report: Callable[[dict[str, Any]], None] = lambda event: None,
        trace: Callable[[torch.Tensor], None] | None = None,
        rules: StageRules | None = None,
    ) -> TextResult:
        """``trace`` sees the raw logits ``[vocab]`` that lead to each token, before any rule. ``rules``: instead of the task's own, for a text whose
        length is given."""
        if rules is None:
            rules = StageRules(self._tokenizer, self._model.config, request.task, need_ratio=request.need_ratio)
        row = prefill_row(self._tokenizer, self._model.config, request, cond_images)
        limit = self._token_limit(request, len(row))
        sampling = request.sampling
        cache = self._model.new_cache(len(row) + limit + self._picture_room(), "prefill")
        draw = Draw(sampling.do_sample, sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty)
        loop = self._loop(cache, TextJob(row.tokens, limit, rules, draw, seeded_generator(sampling.seed)), trace)
        self._model.comm.ledger.note("prefill", row.name())
        try:
            check(0, limit)
            began = time.perf_counter()
            hidden = self._model.prefill(row, 0, len(row), cache, features)
            loop.start(self._model.next_logits(hidden[-1:], "prefill")[0])
            prefilled = time.perf_counter()
            self._follow(loop, limit, check, report)
            written = time.perf_counter()
            loop.finish()
        except SectionCancelled:
            loop.finish()
            raise
        finally:
            loop.release()
        tokens = list(loop.tokens)
        self._prefixes.remember_text([*row.tokens, *tokens[:-1]], features, cache)
        seconds = (prefilled - began, written - prefilled, time.perf_counter() - written)
        return self._result(request, rules, row, tokens, seconds)

    def _follow(self, loop: TokenLoop, limit: int, check: Callable[[int, int], None], report: Callable[[dict[str, Any]], None]) -> None:
        """Until the text has ended."""
        ledger, noted = self._model.comm.ledger, 0
        while True:
            for token in loop.tokens[noted:]:
                ledger.note("decode", f"token {token}")
            noted = len(loop.tokens)
            check(noted, limit)
            report({"kind": "tokens", "done": noted, "total": limit, "text": self._tokenizer.decode(list(loop.tokens))})
            if loop.done:
                return
            loop.advance(TOKENS_PER_CHECK)

    def _loop(self, cache: KVCache, job: TextJob, trace: Trace | None) -> TokenLoop:
        model = self._model
        if not self._on_device:
            alone = model.plan.topology("decode").tp_size == 1
            self.reduction_reason = "one rank: nothing to reduce" if alone else "process group: decode is eager"
            return HostLoop(model, cache, job, trace)
        if self._connected is not model.comm:
            self._reduction, self.reduction_reason = choose_reduction(
                model.comm, model.config.hidden_size, model.config.vocab_size, model.dtype, model.device, self._reduce
            )
            self._connected = model.comm
        return DeviceLoop(model, cache, job, self._reduction, trace)

    def _token_limit(self, request: TextRequest, prompt: int) -> int:
        if request.task in ("img_ratio", "image"):
            return 1
        room = self._model.config.max_position_embeddings - prompt
        if request.max_new_tokens < 1 or room < 1:
            raise TextStageError(
                f"max_new_tokens {request.max_new_tokens} after a prompt of {prompt} tokens leaves no room in "
                f"{self._model.config.max_position_embeddings} positions; ask for at least 1 token and shorten the prompt"
            )
        return min(request.max_new_tokens, room)

    def _picture_room(self) -> int:
        factor = self._model.config.vae.ffactor_spatial
        return PICTURE_SPECIALS + max(h // factor * (w // factor) for h, w in self._table.rows)

    def _result(
        self, request: TextRequest, rules: StageRules, row: TokenRow, tokens: list[int], seconds: tuple[float, float, float]
    ) -> TextResult:
        cot = cot_from_tokens(self._tokenizer, request.task, tokens) if request.task in COT_TASKS else None
        legal = legal_cot(self._tokenizer, request.task, cot.cot_text) if cot else None
        stopped = rules.is_stop(tokens[-1])
        limit = "max_new_tokens" if len(tokens) >= request.max_new_tokens else "positions"
        wants_ratio = request.need_ratio or request.task in ("img_ratio", "image")
        return TextResult(
            prompt_tokens=row.tokens,
            tokens=tuple(tokens),
            text=self._tokenizer.decode(tokens),
            answer=self._tokenizer.decode(tokens[:-1] if stopped else tokens).strip(),
            cot_text=cot.cot_text if cot else None,
            recaption=legal.recaption if legal else None,
            ratio_index=rules.ratio_index(tokens[-1]) if wants_ratio else None,
            truncated=cot.truncated if cot else (request.task == "auto" and not stopped),
            end="stop" if stopped else limit,
            legal=legal,
            prefill_seconds=seconds[0],
            decode_seconds=seconds[1],
            close_seconds=seconds[2],
            decode=self.decode_reason,
            reduction=self.reduction_reason,
        )
