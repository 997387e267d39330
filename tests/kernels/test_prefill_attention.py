"""Our attention kernel against the eager attention, its work table, and the rule that gives it a run."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from phase_parallel.kernels import attention, prefill_attention
from phase_parallel.kernels.attention import attend_eager, attend_fused, takes_rows
from phase_parallel.kernels.attention_runs import AttentionRun, clip_runs, plan_runs
from phase_parallel.kernels.prefill_attention import AttentionTile, attend_rows_triton, choose_tile
from phase_parallel.kernels.row_schedule import WHOLE, collect_schedules, cut, plan_schedule, row_limits

pytestmark = pytest.mark.usefixtures("bf16_products")

CUDA = torch.cuda.is_available()
# runs, query heads, KV heads, d, what it is
CASES = [
    ((AttentionRun(0, 5, 40, True),), 4, 2, 64, "text behind a prefix"),
    ((AttentionRun(0, 1, 77, True),), 8, 2, 64, "one row, keys for several programs"),
    ((AttentionRun(0, 37, 201, True),), 6, 2, 64, "odd group, several tiles, cuts"),
    ((AttentionRun(0, 20, 20, True),), 2, 2, 64, "square"),
    ((AttentionRun(0, 33, 65, False),), 4, 1, 128, "full"),
    (plan_runs(7, 60, [(9, 33)]), 4, 2, 64, "text, picture, text in one call"),
    (clip_runs(plan_runs(0, 90, [(20, 50)]), 31, 70), 3, 3, 64, "a rank's rows"),
]
if CUDA:
    CASES += [
        ((AttentionRun(0, 1110, 6290, True),), 8, 2, 128, "TI2I's last text, TP4"),
        ((AttentionRun(0, 1110, 6290, True),), 16, 4, 128, "TI2I's last text, TP2"),
        ((AttentionRun(0, 3, 1254, True),), 8, 2, 128, "special tokens before a picture"),
        ((AttentionRun(0, 30, 6320, True),), 8, 2, 128, "a few new tokens behind a text"),
        (plan_runs(0, 6290, [(60, 5181)]), 8, 2, 128, "whole TI2I row"),
        (plan_runs(1251, 5357, [(1261, 5357)]), 8, 2, 128, "denoise"),
    ]


def draw(runs: tuple[AttentionRun, ...], heads: int, groups: int, d: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    keys = max(run.k_stop for run in runs)
    shapes = ((runs[-1].q_stop, heads, d), (keys + 9, groups, d), (keys + 9, groups, d))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    # What lies behind the row in the cache is never looked at.
    k[keys:], v[keys:] = float("nan"), float("nan")
    return [q, k, v]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("runs", "heads", "groups", "d"), [case[:4] for case in CASES], ids=[case[4] for case in CASES])
def test_against_the_eager_attention(triton_device: torch.device, runs: tuple[AttentionRun, ...], heads: int, groups: int, d: int, dtype: torch.dtype) -> None:
    q, k, v = draw(runs, heads, groups, d, dtype, triton_device)
    out = torch.full_like(q, float("nan"))
    attend_rows_triton(q, k, v, runs, out)
    rows = slice(runs[0].q_start, runs[-1].q_stop)
    want = attend_eager(q.double(), k.double(), v.double(), runs)[rows].float()
    limit = 1e-5 if dtype == torch.float32 else 1.5e-2
    torch.testing.assert_close(out[rows].float(), want, rtol=limit, atol=limit / 4)
    if dtype == torch.bfloat16:
        again = torch.empty_like(q)
        attend_rows_triton(q, k, v, runs, again)
        assert torch.equal(again[rows], out[rows]), "one order of every sum"


@pytest.mark.parametrize("tile", [AttentionTile(16, 16, 4, 2, 1), AttentionTile(32, 16, 4, 2, 2), AttentionTile(64, 64, 4, 2, 1)], ids=str)
def test_tiles_and_strides(triton_device: torch.device, tile: AttentionTile) -> None:
    """Keys and values as they lie in a cache of several heads, rows in the middle of a block."""
    runs = (AttentionRun(3, 50, 90, True),)
    q, k, v = draw(runs, 4, 2, 64, torch.float32, triton_device)
    cache = torch.stack((k, v), dim=1)
    out = torch.full_like(q, float("nan"))
    attend_rows_triton(q, cache[:, 0], cache[:, 1], runs, out, tile=tile)
    torch.testing.assert_close(out[3:50], attend_eager(q, k, v, runs)[3:50], rtol=1e-5, atol=2e-6)
    assert out[:3].isnan().all() and out[50:].isnan().all(), "rows of others stay"


def test_large_scores(triton_device: torch.device) -> None:
    runs = (AttentionRun(0, 6, 100, True),)
    q, k, v = draw(runs, 2, 1, 64, torch.float32, triton_device)
    out = torch.empty_like(q)
    attend_rows_triton(q * 100, k * 100, v, runs, out)
    torch.testing.assert_close(out, attend_eager(q * 100, k * 100, v, runs), rtol=1e-4, atol=1e-4)


def test_heads_must_be_contiguous(triton_device: torch.device) -> None:
    q = torch.zeros(4, 128, 2, device=triton_device).transpose(1, 2)
    k = torch.zeros(8, 2, 128, device=triton_device)
    with pytest.raises(ValueError, match="contiguous heads"):
        attend_rows_triton(q, k, k, (AttentionRun(0, 4, 8, True),), torch.empty_like(k[:4]))


class TestWorkTable:
    @pytest.mark.parametrize("programs", [1, 2, 7, 132])
    @pytest.mark.parametrize("longest", [[1], [100, 400, 1000], [30, 5181, 5181, 6000, 6290], [7] * 20])
    def test_every_key_of_every_tile_once_and_equal_shares(self, longest: list[int], programs: int) -> None:
        blocks = [-(-stop // 64) for stop in longest]
        ranges, segments, splits = cut(blocks, 2, programs, 64, longest)
        by_unit: dict[int, list[list[int]]] = {}
        for segment in segments:
            by_unit.setdefault(segment[0], []).append(segment)
        assert sorted(by_unit) == list(range(2 * len(longest)))
        for unit, pieces in by_unit.items():
            assert pieces[0][1] == 0 and pieces[-1][2] == longest[unit // 2]
            assert all(left[2] == right[1] for left, right in pairwise(pieces))
        assert ranges[0] == 0 and ranges[-1] == len(segments) and ranges == sorted(set(ranges))
        work = [sum(-(-(s[2] - s[1]) // 64) for s in segments[a:b]) for a, b in pairwise(ranges)]
        assert len(work) <= programs and max(work) - min(work) <= 1
        places = [segment[3] for segment in segments if segment[3] != WHOLE]
        assert sorted(places) == list(range(sum(split[2] for split in splits)))
        for unit, first, parts in splits:
            assert [piece[3] for piece in by_unit[unit]] == list(range(first, first + parts)) and parts > 1

    def test_rows_see_what_their_runs_say(self) -> None:
        assert row_limits(plan_runs(2, 9, [(4, 7)])).tolist() == [3, 4, 7, 7, 7, 8, 9]

    def test_one_table_for_all_layers(self) -> None:
        arguments = ((AttentionRun(0, 5, 40, True),), 4, 2, 16, 64, 8, torch.device("cpu"))
        assert plan_schedule(*arguments) is plan_schedule(*arguments)

    def test_who_records_a_graph_is_told_its_tables(self) -> None:
        arguments = ((AttentionRun(0, 5, 40, True),), 4, 2, 16, 64, 8, torch.device("cpu"))
        plan_schedule(*arguments)
        with collect_schedules() as found:
            kept = plan_schedule(*arguments)
        plan_schedule(*arguments)
        assert len(found) == 1 and found[0] is kept

    def test_tiles_follow_the_rows(self) -> None:
        assert [choose_tile(rows, 2).rows for rows in (4, 16, 120, 4400)] == [16, 16, 64, 128]


class TestRule:
    Q = torch.zeros(4, 4, 128, dtype=torch.bfloat16)

    @pytest.mark.parametrize(
        ("run", "ours"),
        [
            (AttentionRun(0, 1100, 6290, True), True),
            (AttentionRun(0, 1, 6290, True), True),
            (AttentionRun(0, 1251, 1251, True), False),
            (AttentionRun(0, 4096, 4106, False), False),
        ],
    )
    def test_text_behind_a_prefix_is_ours(self, triton_device: torch.device, run: AttentionRun, ours: bool) -> None:
        assert takes_rows(run, self.Q.to(triton_device)) is ours

    @pytest.mark.parametrize("q", [Q.float(), Q[..., :96]], ids=["fp32", "another head dim"])
    def test_what_the_kernel_does_not_know_is_not(self, triton_device: torch.device, q: torch.Tensor) -> None:
        assert not takes_rows(AttentionRun(0, 1, 6290, True), q.to(triton_device))

    @pytest.mark.parametrize("length", [60, 64], ids=["all rows have runs", "padding"])
    def test_both_backends_make_one_block(self, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
        calls = []
        kernel = prefill_attention.attend_rows_triton
        monkeypatch.setattr(attention, "attend_rows_triton", lambda q, k, v, runs, out: (calls.append(runs), kernel(q, k, v, runs, out)))
        runs = plan_runs(0, 60, [(9, 33)])
        q, k, v = draw(runs, 4, 2, 64, torch.bfloat16, triton_device)
        q = torch.cat((q, q[: length - 60]))
        got = attend_fused(q, k, v, runs)
        assert calls == [(runs[2],)]
        torch.testing.assert_close(got.float(), attend_eager(q.float(), k.float(), v.float(), runs), rtol=1.5e-2, atol=4e-3)


def test_few_processors_mean_few_programs(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's size decides about the cuts, never about the result beyond rounding."""
    runs = (AttentionRun(0, 9, 700, True),)
    q, k, v = draw(runs, 2, 1, 64, torch.float32, triton_device)
    for processors in (1, 3, 40):
        monkeypatch.setattr(prefill_attention, "_processors", lambda device, count=processors: count)
        out = torch.empty_like(q)
        attend_rows_triton(q, k, v, runs, out)
        torch.testing.assert_close(out, attend_eager(q, k, v, runs), rtol=1e-5, atol=2e-6)
