"""Choosing a token on the device against the eager definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phase_parallel.kernels.embedding import embed_row_eager, embed_row_triton
from phase_parallel.kernels.next_token import COUNT, DONE, NOT_A_NUMBER, Draw, RuleTable, TokenChooser, draw_eager, penalize_eager

FREE = RuleTable(transitions=(), ratio_after=-1, ratio_tokens=(), stops=(), single=False)
VOCAB = 300
DRAWS = {
    "greedy": Draw(False),
    "plain": Draw(True),
    "official": Draw(True, 0.6, 100, 0.95),
    "top_k 1": Draw(True, 1.0, 1, 1.0),
    "top_k beyond the vocabulary": Draw(True, 1.3, 1024, 0.8),
    "penalty": Draw(True, 0.9, 20, 0.9, 1.2),
    "greedy with penalty": Draw(False, repetition_penalty=1.5),
    "tiny top_p": Draw(True, 1.0, 0, 1e-6),
}


def chooser(draw: Draw, rules: RuleTable, device: torch.device, *, limit: int = 40, prompt: tuple[int, ...] = (7, 3)) -> TokenChooser:
    uniforms = torch.rand(limit, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return TokenChooser(draw, rules, prompt=prompt, limit=limit, uniforms=uniforms, vocab=VOCAB, device=device)


def written(chosen: TokenChooser) -> list[int]:
    return chosen.tokens[: int(chosen.state[COUNT])].tolist()


@pytest.mark.parametrize("name", DRAWS)
def test_draws_as_defined(triton_device: torch.device, name: str) -> None:
    draw = DRAWS[name]
    chosen = chooser(draw, FREE, triton_device)
    uniforms = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).float()
    generator = torch.Generator().manual_seed(1)
    seen, want = torch.zeros(VOCAB, dtype=torch.bool), []
    seen[[7, 3]] = True
    for step in range(40):
        logits = torch.randn(VOCAB, generator=generator) * 3
        chosen.choose(logits.clone().to(triton_device))
        want.append(draw_eager(penalize_eager(logits, seen, draw.repetition_penalty), draw, float(uniforms[step])))
        seen[want[-1]] = True
    assert written(chosen) == want
    assert int(chosen.state[DONE]) == 1 and int(chosen.position) == 1 + 40 and int(chosen.token) == want[-1]


def test_logits_equal_to_the_last_kept_one_are_kept(triton_device: torch.device) -> None:
    """Five equal logits and top_k 2: each of the five is drawn."""
    logits = torch.full((VOCAB,), -10.0)
    logits[10:15] = 2.0
    chosen = chooser(Draw(True, 1.0, 2, 1.0), FREE, triton_device)
    for _ in range(40):
        chosen.choose(logits.clone().to(triton_device))
    assert set(written(chosen)) == {10, 11, 12, 13, 14}


def test_equal_logits_take_the_lowest_number(triton_device: torch.device) -> None:
    chosen = chooser(Draw(False), FREE, triton_device)
    logits = torch.zeros(VOCAB)
    logits[[250, 31, 99]] = 1.0
    chosen.choose(logits.to(triton_device))
    assert written(chosen) == [31]


def test_rules_overrule_the_draw(triton_device: torch.device) -> None:
    """After 50: 60, 61, then the ratio among 200…202; 202 ends the text."""
    rules = RuleTable(((50, (60, 61)),), ratio_after=61, ratio_tokens=(200, 201, 202), stops=(202, 299), single=False)
    chosen = chooser(Draw(False), rules, triton_device)

    def likeliest(*tokens: int) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        for rank, token in enumerate(tokens):
            logits[token] = 5.0 - rank
        return logits.to(triton_device)

    for tokens in ((9,), (50,), (9,), (9,), (9, 202), (8,), (8,)):
        chosen.choose(likeliest(*tokens))
    assert written(chosen) == [9, 50, 60, 61, 202], "and nothing after the end"
    assert int(chosen.state[DONE]) == 1


def test_a_transition_happens_once(triton_device: torch.device) -> None:
    rules = replace(FREE, transitions=((50, (60,)),))
    chosen = chooser(Draw(False), rules, triton_device)
    logits = torch.zeros(VOCAB)
    logits[50] = 1.0
    for _ in range(5):
        chosen.choose(logits.clone().to(triton_device))
    assert written(chosen) == [50, 60, 50, 50, 50]


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_ends_the_text(triton_device: torch.device, do_sample: bool) -> None:
    chosen = chooser(Draw(do_sample), FREE, triton_device)
    logits = torch.zeros(VOCAB, device=triton_device)
    logits[4] = float("nan")
    chosen.choose(logits)
    assert int(chosen.state[NOT_A_NUMBER]) == 1 and int(chosen.state[DONE]) == 1


@pytest.mark.parametrize("token", [0, 9, 10, 19, 20])
def test_embedding_row(triton_device: torch.device, token: int) -> None:
    table = torch.randn(10, 1500, device=triton_device)
    out = torch.full((1500,), float("nan"), device=triton_device)
    embed_row_triton(torch.tensor([token], dtype=torch.int32, device=triton_device), table, 10, out)
    assert torch.equal(out, embed_row_eager(token, table, 10))
