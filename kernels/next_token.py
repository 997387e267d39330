"""The next token of a text, chosen on the device: penalty, top-k, top-p, draw, then the rules that may overrule the draw.

The draw is defined by a uniform number u that the caller has drawn before: the kept tokens lie in falling order of their logits, and the first one
whose cumulative probability exceeds u times their sum is taken. So equal logits and equal u give the same token on every rank and every device.

Letters: V vocabulary rows, C candidates (the largest logits), T rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .triton_support import jit, next_power_of_2, tl, triton

# More candidates than top_k asks for, because logits equal to the last one are kept as well.
TIES = 64
# Places of the state vector, int32: where the last token sits, how many were written, the last token, the forced tokens that wait,
# which transitions were used (bits), whether the text has ended, whether a logit was NaN.
POSITION, COUNT, TOKEN, PENDING, PENDING_END, USED, DONE, NOT_A_NUMBER = range(8)
STATE_SIZE = 8


@dataclass(frozen=True)
class Draw:
    """How a token is drawn; greedy takes the largest logit, the lowest number among equal ones. ``top_k`` 0 and ``top_p`` 1 are off."""

    do_sample: bool
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def candidates(self, vocab: int) -> int:
        wanted = 1 if not self.do_sample else self.top_k or vocab
        return min(vocab, wanted + TIES)


@dataclass(frozen=True)
class RuleTable:
    """Stage rules as numbers. ``transitions``: after this token, once, these tokens are forced in turn. After ``ratio_after`` (-1: never) the likeliest
    of ``ratio_tokens`` is taken. ``stops`` end the text; ``single``: every token does."""

    transitions: tuple[tuple[int, tuple[int, ...]], ...]
    ratio_after: int
    ratio_tokens: tuple[int, ...]
    stops: tuple[int, ...]
    single: bool


def penalize_eager(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """``logits [V]``; those of ``seen [V]`` bool tokens are made smaller: divided by ``penalty``, or multiplied when negative."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def draw_eager(logits: torch.Tensor, draw: Draw, uniform: float) -> int:
    """Token for penalised ``logits [V]`` fp32 and ``uniform`` in [0, 1)."""
    values, ids = torch.sort(logits, descending=True, stable=True)
    if not draw.do_sample:
        return int(ids[0])
    if 0 < draw.top_k < values.numel():
        kept = int((values >= values[draw.top_k - 1]).sum())
        values, ids = values[:kept], ids[:kept]
    p = torch.softmax(values / draw.temperature, dim=-1)
    before = p.cumsum(0) - p
    p = torch.where(before < draw.top_p, p, 0.0) if draw.top_p < 1 else p
    p[0] = torch.softmax(values / draw.temperature, dim=-1)[0]
    kept = int((p > 0).sum())
    place = int((p.cumsum(0) <= uniform * p.sum()).sum())
    return int(ids[min(place, kept - 1)])


@jit
def _penalize(logits, seen, out, penalty, vocab, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    value = tl.load(logits + token, mask=inside)
    was_seen = tl.load(seen + token, mask=inside, other=0) != 0
    smaller = tl.where(value < 0, value * penalty, value / penalty)
    tl.store(out + token, tl.where(was_seen, smaller, value), mask=inside)


@jit
def _next_token(
    logits, values, ids, uniforms, triggers, starts, forced, ratio_tokens, stops, state, tokens, seen,
    candidates, top_k, temperature, top_p, limit, transitions, ratio_after, ratios, stop_count, single,
    DO_SAMPLE: tl.constexpr, C: tl.constexpr, RATIOS: tl.constexpr, STOPS: tl.constexpr,
    POSITION: tl.constexpr, COUNT: tl.constexpr, TOKEN: tl.constexpr, PENDING: tl.constexpr, PENDING_END: tl.constexpr,
    USED: tl.constexpr, DONE: tl.constexpr, NOT_A_NUMBER: tl.constexpr,
):  # fmt: skip
    if tl.load(state + DONE) == 0:
        count, last = tl.load(state + COUNT), tl.load(state + TOKEN)
        place = tl.arange(0, C)
        inside = place < candidates
        value = tl.load(values + place, mask=inside, other=float("-inf"))
        best = tl.load(values)
        bad = best != best  # NaN sorts first
        if DO_SAMPLE:
            inside = inside & (value >= tl.load(values + top_k - 1))
            p = tl.where(inside, tl.exp((value - best) / temperature), 0.0)
            p = p / tl.sum(p, axis=0)
            before = tl.cumsum(p, axis=0) - p
            kept = inside & ((before < top_p) | (place == 0))
            p = tl.where(kept, p, 0.0)
            below = kept & (tl.cumsum(p, axis=0) <= tl.load(uniforms + count) * tl.sum(p, axis=0))
            at = tl.minimum(tl.sum(below.to(tl.int32), axis=0), tl.sum(kept.to(tl.int32), axis=0) - 1)
            token = tl.load(ids + tl.maximum(at, 0)).to(tl.int32)
        else:
            number = tl.load(ids + place, mask=inside, other=0).to(tl.int32)
            token = tl.min(tl.where(inside & (value == best), number, 2147483647), axis=0)
        token = tl.where(bad, 0, token)
        # Stage rules, in the order of StageRules.process.
        pending, end, used = tl.load(state + PENDING), tl.load(state + PENDING_END), tl.load(state + USED)
        if pending < end:  # noqa: SIM102, behind the last forced token there is nothing to load
            if tl.load(forced + pending) == last:
                pending += 1
        if pending == end:
            for rule in range(transitions):
                if (tl.load(triggers + rule) == last) & ((used & (1 << rule)) == 0):
                    pending = tl.load(starts + rule)
                    end = tl.load(starts + rule + 1)
                    used = used | (1 << rule)
        if pending < end:
            token = tl.load(forced + pending)
        elif ratio_after == last:
            ratio = tl.arange(0, RATIOS)
            ratio_number = tl.load(ratio_tokens + ratio, mask=ratio < ratios, other=0)
            ratio_logit = tl.load(logits + ratio_number, mask=ratio < ratios, other=float("-inf"))
            first = tl.min(tl.where(ratio_logit == tl.max(ratio_logit, axis=0), ratio, RATIOS), axis=0)
            token = tl.load(ratio_tokens + first)
        stop = tl.arange(0, STOPS)
        stopped = tl.sum((tl.load(stops + stop, mask=stop < stop_count, other=-1) == token).to(tl.int32), axis=0) > 0
        tl.store(tokens + count, token)
        tl.store(seen + token, 1)
        tl.store(state + POSITION, tl.load(state + POSITION) + 1)
        tl.store(state + COUNT, count + 1)
        tl.store(state + TOKEN, token)
        tl.store(state + PENDING, pending)
        tl.store(state + PENDING_END, end)
        tl.store(state + USED, used)
        tl.store(state + NOT_A_NUMBER, bad.to(tl.int32))
        ended = stopped | (single != 0) | (count + 1 == limit) | bad
        tl.store(state + DONE, ended.to(tl.int32))


class TokenChooser:
    """Draws and rules of one text on the device. ``state`` and ``tokens`` are the only things that a step leaves for the next."""

    def __init__(self, draw: Draw, rules: RuleTable, *, prompt: tuple[int, ...], limit: int, uniforms: torch.Tensor, vocab: int, device: torch.device):
        """``prompt``: tokens before the text, at least one. ``uniforms [limit]``: one number in [0, 1) for each token, drawn by the caller."""
        self._draw, self._rules, self._limit, self._vocab = draw, rules, limit, vocab

        def integers(values: list[int] | tuple[int, ...]) -> torch.Tensor:
            return torch.tensor([*values, 0], dtype=torch.int32, device=device)  # never empty

        starts = [0]
        for _, forced in rules.transitions:
            starts.append(starts[-1] + len(forced))
        self._triggers = integers([trigger for trigger, _ in rules.transitions])
        self._starts = integers(starts)
        self._forced = integers([token for _, forced in rules.transitions for token in forced])
        self._ratio_tokens, self._stops = integers(rules.ratio_tokens), integers(rules.stops)
        self._uniforms = uniforms.to(device, torch.float32)
        self._penalized = torch.empty(vocab if draw.repetition_penalty != 1.0 else 0, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(limit, dtype=torch.int32, device=device)
        self.seen = torch.zeros(vocab, dtype=torch.uint8, device=device)
        self.seen[torch.tensor(sorted(set(prompt)), device=device)] = 1
        state = [0] * STATE_SIZE
        state[POSITION], state[TOKEN] = len(prompt) - 1, prompt[-1]
        self.state = torch.tensor(state, dtype=torch.int32, device=device)

    @property
    def position(self) -> torch.Tensor:
        """Position of the last token, int32 ``[1]``, a view of the state."""
        return self.state[POSITION : POSITION + 1]

    @property
    def token(self) -> torch.Tensor:
        return self.state[TOKEN : TOKEN + 1]

    def choose(self, logits: torch.Tensor) -> None:
        """``logits [V]`` fp32, left as they are. Nothing happens once the text has ended."""
        draw, rules = self._draw, self._rules
        if draw.repetition_penalty != 1.0:
            _penalize[(triton.cdiv(self._vocab, 1024),)](logits, self.seen, self._penalized, draw.repetition_penalty, self._vocab, BLOCK=1024)
            logits = self._penalized
        candidates = draw.candidates(self._vocab)
        values, ids = torch.topk(logits, candidates, sorted=True)
        top_k = draw.top_k if 0 < draw.top_k < self._vocab else candidates
        _next_token[(1,)](
            logits, values, ids, self._uniforms, self._triggers, self._starts, self._forced, self._ratio_tokens, self._stops, self.state, self.tokens,
            self.seen, candidates, top_k, draw.temperature, draw.top_p, self._limit, len(rules.transitions), rules.ratio_after, len(rules.ratio_tokens),
            len(rules.stops), int(rules.single),
            DO_SAMPLE=draw.do_sample, C=next_power_of_2(candidates), RATIOS=next_power_of_2(max(len(rules.ratio_tokens), 1)),
            STOPS=next_power_of_2(max(len(rules.stops), 1)), POSITION=POSITION, COUNT=COUNT, TOKEN=TOKEN, PENDING=PENDING, PENDING_END=PENDING_END,
            USED=USED, DONE=DONE, NOT_A_NUMBER=NOT_A_NUMBER, num_warps=8,
        )  # fmt: skip
