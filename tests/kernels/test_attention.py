"""Runs against the dense mask they stand for, and attention over runs against a loop in fp64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from phase_parallel.kernels import attention
from phase_parallel.kernels.attention import attend_eager, attend_fused
from phase_parallel.kernels.attention_runs import AttentionRun, clip_runs, plan_runs


def dense(length: int, full_slices: list[tuple[int, int]]) -> torch.Tensor:
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for start, stop in full_slices:
        mask[start:stop, start:stop] = True
    return mask


def visible(runs: tuple[AttentionRun, ...], rows: int, keys: int) -> torch.Tensor:
    """The mask that runs describe, row by row."""
    mask = torch.zeros(rows, keys, dtype=torch.bool)
    for run in runs:
        for row in range(run.q_start, run.q_stop):
            mask[row, : run.k_stop - (run.q_stop - 1 - row if run.causal else 0)] = True
    return mask


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    tokens, heads, d = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(tokens, heads, d, dtype=torch.float64)
    for t in range(tokens):
        seen = mask[t].nonzero().flatten()
        for h in range(heads):
            if len(seen):
                keys, values = k[seen, h // group].double(), v[seen, h // group].double()
                out[t, h] = torch.softmax(keys @ q[t, h].double() / d**0.5, dim=0) @ values
    return out


ROWS = [
    # start, stop, full slices, what it is
    (0, 9, [], "text"),
    (0, 1, [], "one token"),
    (8, 9, [], "decode"),
    (0, 12, [(4, 12)], "a row that ends with its picture"),
    (0, 12, [(4, 10)], "text behind the picture"),
    (0, 12, [(0, 5)], "picture first"),
    (0, 20, [(2, 6), (9, 15)], "two pictures"),
    (0, 20, [(2, 6), (6, 15)], "two pictures without text between"),
    (5, 20, [(2, 5), (9, 15)], "a prefix with a picture is there already"),
    (3, 12, [(4, 12)], "a denoise block"),
    (0, 7, [(9, 15)], "the picture comes later"),
    (0, 37, [(5, 21)], "text, picture, text, odd lengths"),
]


@pytest.mark.parametrize(("start", "stop", "slices"), [row[:3] for row in ROWS], ids=[row[3] for row in ROWS])
def test_runs_say_the_same_as_the_dense_mask(start: int, stop: int, slices: list[tuple[int, int]]) -> None:
    length = max([stop, *(last for _, last in slices)])
    runs = plan_runs(start, stop, slices)
    assert torch.equal(visible(runs, stop - start, length), dense(length, slices)[start:stop])
    covered = [row for run in runs for row in range(run.q_start, run.q_stop)]
    assert covered == list(range(stop - start)), "every row belongs to one run, in order"
    assert plan_runs(start, stop, slices[::-1]) == runs


@pytest.mark.parametrize(("start", "stop"), [(5, 12), (0, 8), (5, 8)])
def test_picture_is_never_cut(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"positions {start}…{stop} cut the bidirectional slice 4…10; an image must be computed whole"):
        plan_runs(start, stop, [(4, 10)])


@pytest.mark.parametrize("cuts", [(0, 8, 16), (0, 5, 10, 15, 16), (0, 1, 2, 3, 16), (0, 16)])
def test_clipped_runs_keep_each_row_its_keys(cuts: tuple[int, ...]) -> None:
    runs = plan_runs(0, 16, [(3, 9)])
    whole = visible(runs, 16, 16)
    for first, last in pairwise(cuts):
        assert torch.equal(visible(clip_runs(runs, first, last), last - first, 16), whole[first:last])


def test_rank_with_padding_only_has_no_runs() -> None:
    assert clip_runs(plan_runs(0, 5, []), 6, 8) == ()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 2), (3, 3)], ids=["one each", "all share", "groups of four", "odd"])
@pytest.mark.parametrize(("start", "stop", "slices"), [row[:3] for row in ROWS], ids=[row[3] for row in ROWS])
def test_against_a_loop(start: int, stop: int, slices: list[tuple[int, int]], heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    capacity = max([stop, *(last for _, last in slices)]) + 3
    q = torch.randn(stop - start, heads, 8, generator=generator)
    k, v = (torch.randn(capacity, kv_heads, 8, generator=generator) for _ in range(2))
    # What lies behind the row in the cache is never looked at.
    k[stop:], v[stop:] = float("nan"), float("nan")
    got = attend_eager(q, k, v, plan_runs(start, stop, slices))
    mask = dense(capacity, slices)[start:stop, :capacity]
    mask[:, stop:] = False
    torch.testing.assert_close(got.double(), reference(q, k, v, mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_blocks_of_a_long_causal_run_change_nothing(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(17, 2, 8, generator=generator) for _ in range(3))
    monkeypatch.setattr(attention, "CAUSAL_ROWS", rows)
    got = attend_eager(q, k, v, plan_runs(0, 17, [(11, 14)]))
    torch.testing.assert_close(got.double(), reference(q, k, v, dense(17, [(11, 14)])), rtol=1e-5, atol=1e-6)


def test_run_longer_than_one_block_of_causal_rows() -> None:
    generator = torch.Generator().manual_seed(6)
    q, k, v = torch.randn(3, 2 * attention.CAUSAL_ROWS + 3, 1, 4, generator=generator)
    got = attend_eager(q, k, v, plan_runs(0, len(q), []))
    scores = (q[:, 0].double() @ k[:, 0].double().T / 2).masked_fill(~dense(len(q), []), float("-inf"))
    torch.testing.assert_close(got[:, 0].double(), scores.softmax(-1) @ v[:, 0].double(), rtol=1e-5, atol=1e-6)


def test_clipping_a_causal_run_moves_its_last_key() -> None:
    assert clip_runs([AttentionRun(0, 6, 16, causal=True)], 1, 4) == (AttentionRun(0, 3, 14, causal=True),)
    assert clip_runs([AttentionRun(0, 6, 16, causal=False)], 1, 4) == (AttentionRun(0, 3, 16, causal=False),)


def test_rows_without_a_run_stay_zero() -> None:
    q, k, v = (torch.randn(6, 2, 8) for _ in range(3))
    assert torch.equal(attend_eager(q, k, v, plan_runs(0, 4, []))[4:], torch.zeros(2, 2, 8))


@pytest.mark.parametrize("attend", [attend_eager, attend_fused])
@pytest.mark.parametrize("runs", [plan_runs(10, 16, [(12, 16)]), plan_runs(10, 16, [(12, 16)])[1:]], ids=["all rows", "rows without a run"])
def test_results_go_where_the_caller_wants(attend, runs: tuple[AttentionRun, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(rows, heads, 8, generator=generator) for rows, heads in ((6, 4), (16, 2), (16, 2)))
    whole = torch.full((2, 6, 4, 8), float("nan"))
    assert attend(q, k, v, runs, whole[1]).data_ptr() == whole[1].data_ptr()
    assert torch.equal(whole[1], attend(q, k, v, runs)) and whole[0].isnan().all()
