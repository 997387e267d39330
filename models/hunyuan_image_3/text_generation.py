"""Autoregressive text on all ranks: prefill, then one token at a time under the stage rules (spec 5.7, 5.10, 5.11).

Every rank computes the same logits and draws with an equally seeded CPU generator, so all ranks write the same text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .config import HunyuanImage3Config
from .model import HunyuanImage3Model, ReferenceFeatures
from .prefix import PrefixStore
from .resolution import ResolutionTable
from .seeds import seeded_generator
from .sequence import CondImage, build_text_row
from .text_rules import COT_TASKS, BotTask, LegalCot, StageRules, TextStageError, cot_from_tokens, legal_cot, sample_token
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

    def __init__(self, model: HunyuanImage3Model, tokenizer: HunyuanTokenizer, table: ResolutionTable, prefixes: PrefixStore):
        self._model = model
        self._tokenizer = tokenizer
        self._table = table
        self._prefixes = prefixes

    def generate(
        self,
        request: TextRequest,
        *,
        features: Sequence[ReferenceFeatures] = (),
        cond_images: Sequence[CondImage] = (),
        check: Callable[[int, int], None] = lambda done, total: None,
        report: Callable[[dict[str, Any]], None] = lambda event: None,
        trace: Callable[[torch.Tensor], None] | None = None,
    ) -> TextResult:
        """``trace`` sees the raw logits ``[vocab]`` that lead to each token, before any rule."""
        rules = StageRules(self._tokenizer, self._model.config, request.task, need_ratio=request.need_ratio)
        row = prefill_row(self._tokenizer, self._model.config, request, cond_images)
        limit = self._token_limit(request, len(row))
        sampling = request.sampling
        generator = seeded_generator(sampling.seed)
        cache = self._model.new_cache(len(row) + limit + self._picture_room(), "prefill")
        ledger = self._model.comm.ledger
        ledger.note("prefill", row.name())
        check(0, limit)
        began = time.perf_counter()
        hidden = self._model.prefill(row, 0, len(row), cache, features)
        logits = self._model.next_logits(hidden[-1:], "prefill")[0]
        prefilled = time.perf_counter()
        tokens: list[int] = []
        while True:
            if trace is not None:
                trace(logits)
            token = sample_token(
                logits,
                [*row.tokens, *tokens],
                rules=rules,
                do_sample=sampling.do_sample,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                repetition_penalty=sampling.repetition_penalty,
                generator=generator,
            )
            tokens.append(token)
            ledger.note("decode", f"token {token}")
            done = rules.is_stop(token) or len(tokens) == limit
            if done or len(tokens) % TOKENS_PER_CHECK == 0:
                check(len(tokens), limit)
                report({"kind": "tokens", "done": len(tokens), "total": limit, "text": self._tokenizer.decode(tokens)})
            if done:
                break
            logits = self._model.decode(token, len(row) + len(tokens) - 1, cache)
        self._prefixes.remember_text([*row.tokens, *tokens[:-1]], features, cache)
        return self._result(request, rules, row, tokens, prefilled - began, time.perf_counter() - prefilled)

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
        self, request: TextRequest, rules: StageRules, row: TokenRow, tokens: list[int], prefill: float, decode: float
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
            prefill_seconds=prefill,
            decode_seconds=decode,
        )
