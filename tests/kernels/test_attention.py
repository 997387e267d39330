"""Runs against a dense mask, and the arithmetic of cutting them."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels.attention import AttentionRun, attend_eager, clip_runs, plan_runs


def dense_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """fp64, one head at a time; mask [T, K]."""
    heads, kv_heads = q.shape[1], k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(heads):
        source = head // (heads // kv_heads)
        scores = q[:, head].double() @ k[:, source].double().T / q.shape[-1] ** 0.5
        out[:, head] = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, source].double()
    return out


def dense_mask(start: int, stop: int, slices: list[tuple[int, int]]) -> torch.Tensor:
    mask = torch.ones(stop, stop, dtype=torch.bool).tril()
    for first, last in slices:
        mask[first:last, first:last] = True
    return mask[start:stop]


@pytest.mark.parametrize(
    ("start", "stop", "slices", "heads", "kv_heads"),
    [
        (0, 1, [], 4, 2),  # one token
        (7, 8, [], 4, 1),  # decode: one query, all keys
        (0, 37, [(5, 21)], 8, 4),  # text, picture, text; odd lengths
        (0, 40, [(3, 11), (20, 33)], 2, 2),  # two pictures do not see each other both ways
        (11, 30, [(12, 30)], 6, 2),  # a denoise block behind a prefix
        (4, 1100, [(1000, 1100)], 2, 1),  # longer than the rows of one causal mask
    ],
)
def test_runs_equal_the_dense_mask(start: int, stop: int, slices: list, heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(stop)
    q = torch.randn(stop - start, heads, 16, generator=generator)
    k, v = torch.randn(2, stop + 5, kv_heads, 16, generator=generator)  # capacity behind the keys is not read
    k[stop:], v[stop:] = float("nan"), float("nan")
    got = attend_eager(q, k, v, plan_runs(start, stop, slices))
    expected = dense_reference(q, k[:stop], v[:stop], dense_mask(start, stop, slices))
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_clipped_runs_are_the_rows_of_the_whole(ranks: int) -> None:
    """Sequence-parallel ranks that keep their queries compute the rows that one rank would."""
    start, stop, slices = 9, 41, [(12, 41)]
    runs, length = plan_runs(start, stop, slices), stop - start
    generator = torch.Generator().manual_seed(ranks)
    q = torch.randn(length, 4, 8, generator=generator)
    k, v = torch.randn(2, stop, 2, 8, generator=generator)
    share = -(-length // ranks)
    parts = [
        attend_eager(q[r * share : (r + 1) * share], k, v, clip_runs(runs, r * share, (r + 1) * share)) for r in range(ranks)
    ]
    assert torch.allclose(torch.cat(parts), attend_eager(q, k, v, runs), atol=1e-6)


def test_a_cut_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="cut the bidirectional slice 5…9"):
        plan_runs(7, 20, [(5, 9)])


def test_clipping_a_causal_run_moves_its_last_key() -> None:
    assert clip_runs([AttentionRun(0, 6, 16, causal=True)], 1, 4) == (AttentionRun(0, 3, 14, causal=True),)
    assert clip_runs([AttentionRun(0, 6, 16, causal=False)], 1, 4) == (AttentionRun(0, 3, 16, causal=False),)
    assert clip_runs([AttentionRun(0, 6, 16, causal=True)], 6, 9) == ()
