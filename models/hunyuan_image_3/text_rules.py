"""What the text stage may write next: forced transitions, the restricted ratio token, stopping, sampling.

`StageRules` is a state machine over single tokens; it holds no tensors, so every rank that feeds it the same
tokens is in the same state. Imports torch and its neighbours only.

Legend: V vocabulary rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...kernels.next_token import Draw, RuleTable, draw_eager, penalize_eager
from ...parallel.faults import SharedSymptom
from .config import HunyuanImage3Config
from .resolution import BASE_ROWS, SQUARE_INDEX
from .tokenizer import HunyuanTokenizer

BotTask = Literal["image", "auto", "think", "recaption", "think_recaption", "img_ratio"]
COT_TASKS = ("think", "recaption", "think_recaption")
RATIO_TASKS = ("image", "img_ratio")
COT_TAGS = ("<think>", "</think>", "<recaption>", "</recaption>")


class TextStageError(ValueError):
    """The text stage was asked for something the checkpoint or the sampler does not have."""


class NotANumberError(TextStageError, SharedSymptom):
    """NaN where the next token should be chosen; all ranks see the same logits."""


class StageRules:
    """Rules of one text generation; a fresh object for each, `process` called once per token, in order."""

    def __init__(
        self, tokenizer: HunyuanTokenizer, config: HunyuanImage3Config, task: BotTask, *, need_ratio: bool
    ) -> None:
        """`need_ratio`: the size is "auto", so the text ends with a ratio token.

        Raises TextStageError for an unknown task, for a think or recaption task on a checkpoint without the
        instruct template, and for a picture task that has nothing to write.
        """
        instruct = config.generation.sequence_template == "instruct"
        self._check(task, instruct, need_ratio)
        special = tokenizer.special
        self._ratio_ids = tokenizer.ratio_ids
        self._base_ratio = not instruct
        self._pending: deque[int] = deque()
        self._transitions: dict[int, tuple[int, ...]] = {}
        self._img_size = special.img_size
        self._single = task in RATIO_TASKS
        self._restrict = instruct and (task in RATIO_TASKS or (task in COT_TASKS and need_ratio))
        if task == "think_recaption":
            self._transitions[special.think_end] = (special.recaption,)
        if task in COT_TASKS and need_ratio:
            last = special.think_end if task == "think" else special.recaption_end
            self._transitions[last] = (special.answer, special.boi, special.img_size)
        self._stop = self._stop_set(tokenizer, config, task, need_ratio)

    @staticmethod
    def _check(task: str, instruct: bool, need_ratio: bool) -> None:
        known = ("auto", *RATIO_TASKS, *COT_TASKS)
        if task not in known:
            raise TextStageError(f'The task "{task}" is unknown; choose one of {", ".join(known)}.')
        if task in COT_TASKS and not instruct:
            raise TextStageError(
                f'The task "{task}" needs an Instruct checkpoint; the base one writes no text; choose image.'
            )
        if task == "image" and not need_ratio:
            raise TextStageError(
                'The task "image" with a given size has no text stage; set the size to auto, or another task.'
            )

    @staticmethod
    def _stop_set(
        tokenizer: HunyuanTokenizer, config: HunyuanImage3Config, task: str, need_ratio: bool
    ) -> frozenset[int]:
        special = tokenizer.special
        if task in COT_TASKS and need_ratio:
            return frozenset(tokenizer.ratio_ids)
        if task == "think":
            return frozenset((special.think_end, special.recaption_end))
        if task in COT_TASKS:
            return frozenset((special.recaption_end,))
        return frozenset(config.generation.eos_token_ids or (special.eos,))

    def process(self, logits: torch.Tensor, last_token: int) -> torch.Tensor:
        """Logits `[V]` after forcing or restriction; the same tensor when the choice is free.

        `last_token` is the token before the one being chosen: at first the last token of the prompt row.
        A forced token gets 0 and every other the dtype's minimum.
        """
        if self._pending and self._pending[0] == last_token:
            self._pending.popleft()
        if not self._pending:
            self._pending.extend(self._transitions.pop(last_token, ()))
        if self._pending:
            return _only(logits, self._pending[0])
        if self._restrict and last_token == self._img_size:
            ratio_logits = logits[torch.tensor(self._ratio_ids, device=logits.device)]
            return _only(logits, self._ratio_ids[int(ratio_logits.argmax())])
        return logits

    def table(self) -> RuleTable:
        """The same rules as numbers, for choosing tokens on the device; before the first `process`."""
        return RuleTable(
            transitions=tuple(self._transitions.items()),
            ratio_after=self._img_size if self._restrict else -1,
            ratio_tokens=tuple(self._ratio_ids),
            stops=tuple(sorted(self._stop)),
            single=self._single,
        )

    def is_stop(self, token: int) -> bool:
        """Whether the text ends with this token, which belongs to it; ratio tasks have only one."""
        return self._single or token in self._stop

    def ratio_index(self, token: int) -> int | None:
        """Row of the size table that a chosen token stands for; None when it is no ratio token.

        The base release takes any other token as the square. With a cut-off text (no ratio token came), the
        caller runs the one-token img_ratio task or takes the square.
        """
        ratios = self._ratio_ids[:BASE_ROWS] if self._base_ratio else self._ratio_ids
        if token in ratios:
            return ratios.index(token)
        return SQUARE_INDEX if self._base_ratio else None


def _only(logits: torch.Tensor, token: int) -> torch.Tensor:
    forced = torch.full_like(logits, torch.finfo(logits.dtype).min)
    forced[token] = 0
    return forced


def draw_uniform(count: int, generator: torch.Generator | None) -> torch.Tensor:
    """`[count]` fp32 numbers in [0, 1], one for each token; drawn together or one by one they are the same."""
    return torch.rand(count, dtype=torch.float64, generator=generator).float()


def check_draw(draw: Draw) -> None:
    """Raises TextStageError when a setting lies outside its range."""
    if draw.repetition_penalty <= 0:
        raise TextStageError(f"repetition_penalty is {draw.repetition_penalty}; it must be above 0, 1 switches it off.")
    if not draw.do_sample:
        return
    if draw.temperature <= 0:
        raise TextStageError(f"temperature is {draw.temperature}; it must be above 0, or switch sampling off.")
    if draw.top_k < 0:
        raise TextStageError(f"top_k is {draw.top_k}; it must be 0 (off) or more.")
    if not 0 < draw.top_p <= 1:
        raise TextStageError(f"top_p is {draw.top_p}; it must be above 0 and at most 1 (off).")


def sample_token(
    logits: torch.Tensor,
    tokens: Sequence[int],
    *,
    rules: StageRules | None = None,
    do_sample: bool,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    generator: torch.Generator | None = None,
) -> int:
    """Choose the next token from raw logits `[V]`, fp32: penalty, rules, temperature, top-k, top-p, draw.

    `tokens` are the prompt and everything generated so far. `do_sample` false takes the largest logit and
    ignores temperature, top_k (0 = off) and top_p (1 = off). Takes one number from a CPU generator for each
    token, forced or not, so that every rank draws the same. Raises TextStageError on NaN logits or a setting
    outside its range.
    """
    draw = Draw(do_sample, temperature, top_k, top_p, repetition_penalty)
    check_draw(draw)
    if bool(torch.isnan(logits).any()):
        raise nan_error(len(tokens))
    if repetition_penalty != 1.0:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[torch.tensor(sorted(set(tokens)), device=logits.device)] = True
        logits = penalize_eager(logits, seen, repetition_penalty)
    if rules is not None:
        logits = rules.process(logits, tokens[-1])
    uniform = float(draw_uniform(1, generator)) if do_sample else 0.0
    return draw_eager(logits, draw, uniform)


def nan_error(token: int) -> NotANumberError:
    return NotANumberError(f"The logits of token {token} contain NaN; the weights or a kernel are broken, run doctor.")


@dataclass(frozen=True)
class CotText:
    """Assistant text for the image stage, the recaption alone (or None), and whether it was cut off."""

    cot_text: str
    recaption: str | None
    truncated: bool


def cot_from_tokens(tokenizer: HunyuanTokenizer, task: BotTask, generated: Sequence[int]) -> CotText:
    """The assistant text that a run wrote: opening tag and everything up to the first closing tag.

    If the closing tag never came, everything generated belongs to the text and `truncated` is set.
    """
    if task not in COT_TASKS:
        raise TextStageError(
            f'The task "{task}" writes no assistant text; choose think, recaption or think_recaption.'
        )
    special = tokenizer.special
    closing = special.think_end if task == "think" else special.recaption_end
    generated = list(generated)
    truncated = closing not in generated
    body = generated if truncated else generated[: generated.index(closing) + 1]
    opening = "<recaption>" if task == "recaption" else "<think>"
    text = opening + tokenizer.decode(body)
    recaption = None
    if "<recaption>" in text:
        recaption = text.split("<recaption>", 1)[1].split("</recaption>", 1)[0]
    return CotText(text, recaption, truncated)


def keep_recaption(cot_text: str) -> str:
    """What drop_think leaves: the text from the recaption's opening tag on, or all of it without one."""
    start = cot_text.find("<recaption>")
    return cot_text if start < 0 else cot_text[start:]


@dataclass(frozen=True)
class LegalCot:
    """A text that the image stage can read; `recaption` is its readable part or None. `removed` are the control tokens that were inside,
    `added` the tags that it lacked; both empty where nothing changed.
    """

    cot_text: str
    recaption: str | None
    removed: tuple[str, ...]
    added: tuple[str, ...]


def legal_cot(tokenizer: HunyuanTokenizer, task: BotTask, cot_text: str) -> LegalCot:
    """What a model wrote for a writing task, with the structure that it should have: a think pair, then a recaption pair, as far as the task
    has them and the text goes, and no other control token. A legal text comes back as it is.

    A sampled text may hold any token, and a cut one lacks its end.
    """
    parts = {"recaption" if task == "recaption" else "think": cot_text}
    if task == "think_recaption":
        # A <recaption> inside the thinking is a slip, unless the thinking was never closed.
        start = cot_text.find("<recaption>", max(cot_text.find("</think>"), 0))
        if start >= 0:
            parts = {"think": cot_text[:start], "recaption": cot_text[start:]}
    text, recaption = "", None
    removed: list[str] = []
    added: list[str] = []
    for stage, part in parts.items():
        opening, closing = f"<{stage}>", f"</{stage}>"
        inside, closed, after = part.rpartition(closing)
        if not closed or after.strip():
            inside, after = part, ""
            added.append(closing)
        if not inside.startswith(opening):
            added.append(opening)
        body, found = _without_control_tokens(tokenizer, inside.removeprefix(opening))
        removed += found
        text += opening + body + closing + after
        if stage == "recaption":
            recaption = body
    return LegalCot(text, recaption, tuple(dict.fromkeys(removed)), tuple(added))


def _without_control_tokens(tokenizer: HunyuanTokenizer, text: str) -> tuple[str, list[str]]:
    """The text without them, and their names. Taking one out may bring the parts of another together."""
    names: list[str] = []
    while found := [name for name in (*tokenizer.find_special_tokens(text), *COT_TAGS) if name in text]:
        names += found
        for name in found:
            text = text.replace(name, "")
    return text, names
