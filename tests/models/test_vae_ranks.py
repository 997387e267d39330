"""The VAE on several ranks: the picture of one rank, to the last row of every seam, and the same bits on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small_vae import seeded, small_vae
from thread_world import run_ranks
from torch import Tensor

from phase_parallel.models.hunyuan_image_3.vae import Vae
from phase_parallel.models.hunyuan_image_3.vae_rows import PictureRows
from phase_parallel.models.hunyuan_image_3.vae_split import RowSplit
from phase_parallel.parallel.collectives import CollectiveError, Communicator
from phase_parallel.parallel.picture_view import PictureView
from phase_parallel.parallel.plan import ParallelPlan

WIDTH = 2
TOLERANCE = 1e-5
SPLITS = [(7, 2), (5, 3), (9, 4), (2, 4), (1, 3), (9, 8)]
"""Latent rows and ranks: uneven pieces, pieces of one row, fewer rows than ranks."""


@pytest.fixture(scope="module")
def vae() -> Vae:
    return small_vae()


def on_ranks(ranks: int, work: Callable[[PictureView], Tensor], plan: str = "tp", **more: object) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Results and ledger digests by rank."""

    def body(plan: ParallelPlan, comm: Communicator) -> tuple[Tensor, tuple[int, int]]:
        return work(PictureView(comm)), comm.ledger.digest()

    results = run_ranks(body, plan, world_size=ranks, **more)
    return [result[0] for result in results], [result[1] for result in results]


def require_equal(results: list[Tensor], digests: list[tuple[int, int]], alone: Tensor) -> None:
    """Every row by itself, since an error of a seam would hide among the others."""
    assert len(set(digests)) == 1
    assert all(torch.equal(result, results[0]) for result in results)
    rows = (results[0] - alone).abs().amax(dim=(0, 1, 3))
    assert rows.max() <= TOLERANCE * alone.abs().max(), f"rows {rows.topk(min(4, len(rows))).indices.tolist()} differ most"


@pytest.mark.parametrize(("height", "ranks"), SPLITS)
def test_ranks_decode_the_picture_of_one(vae: Vae, height: int, ranks: int) -> None:
    z = seeded(1, 8, height, WIDTH)
    require_equal(*on_ranks(ranks, lambda view: vae.decode(z, view=view)), vae.decode(z))


@pytest.mark.parametrize(("height", "ranks"), SPLITS)
def test_ranks_encode_the_picture_as_one(vae: Vae, height: int, ranks: int) -> None:
    pixels = seeded(1, 3, 16 * height, 16 * WIDTH).clamp(-1, 1)
    require_equal(*on_ranks(ranks, lambda view: torch.cat(vae.encode(pixels, view), dim=1)), torch.cat(vae.encode(pixels), dim=1))


@pytest.mark.parametrize(("plan", "more"), [("hybrid", {}), ("hybrid", {"denoise": "cfg"}), ("replicated", {})])
def test_every_plan_shares_the_picture_over_all_its_ranks(vae: Vae, plan: str, more: dict[str, object]) -> None:
    z = seeded(2, 8, 5, WIDTH)
    require_equal(*on_ranks(4, lambda view: vae.decode(z, view=view), plan, **more), vae.decode(z))


def test_half_precision_is_shared_too(vae: Vae) -> None:
    half = copy.deepcopy(vae).bfloat16()
    z = seeded(1, 8, 2, 1)
    results, digests = on_ranks(2, lambda view: half.decode(z, view=view))
    assert len(set(digests)) == 1 and results[0].dtype == torch.bfloat16
    assert torch.equal(*results)
    assert (results[0] - half.decode(z)).abs().max() < 0.02 * results[0].abs().max()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_bands_of_one_row_change_nothing(vae: Vae, direction: str, ranks: int) -> None:
    x, network = (seeded(1, 8, 1, 3, WIDTH), vae.decoder) if direction == "decode" else (seeded(1, 3, 4, 48, 32), vae.encoder)
    scale = x.shape[3] // 3
    alone = network(x.clone(), PictureRows.alone(3))

    def work(view: PictureView) -> Tensor:
        lay = PictureRows(RowSplit.of(3, ranks=ranks, rank=view.rank), view, band_bytes=1)
        return lay.whole(network(x[:, :, :, lay.split.rows(scale)], lay), "the picture")[:, :, -1]

    require_equal(*on_ranks(ranks, work, "tp" if ranks > 1 else "single"), alone[:, :, -1])


def test_a_norm_far_from_zero_keeps_its_precision() -> None:
    """Moments are joined, not sums of squares, which would cancel."""
    norm = torch.nn.GroupNorm(32, 64, eps=1e-6)
    x = seeded(1, 64, 1, 3, 40) + 1000
    want = torch.nn.functional.group_norm(x.double(), 32, eps=1e-6)

    def work(view: PictureView) -> Tensor:
        lay = PictureRows(RowSplit.of(3, ranks=2, rank=view.rank), view)
        return lay.whole(lay.normed(norm, x[:, :, :, lay.split.rows()]).detach(), "the picture")

    results, _ = on_ranks(2, work)
    assert torch.equal(*results)
    assert (results[0] - want).abs().max() < 1e-3, "fp32 holds 1000 to 6e-5"


def test_a_cancel_ends_all_ranks_at_the_same_block(vae: Vae) -> None:
    class Cancelled(Exception):
        pass

    def work(view: PictureView) -> Tensor:
        seen = []

        def check(done: int, total: int) -> None:
            seen.append((done, total))
            if done == 3:
                raise Cancelled

        with pytest.raises(Cancelled):
            vae.decode(seeded(1, 8, 3, WIDTH), check, view)
        return torch.tensor(seen)

    results, digests = on_ranks(2, work)
    assert torch.equal(*results) and len(set(digests)) == 1
    assert results[0][-1, 0] == 3


def test_the_host_reads_no_picture_before_the_device_has_it(vae: Vae, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading waits too, but deaf to the faults of peers."""
    waits: list[str] = []
    monkeypatch.setattr(PictureView, "await_device", lambda view, what: waits.append(f"{view.rank} {what}"))
    on_ranks(2, lambda view: vae.decode(seeded(2, 8, 2, 1), view=view))
    on_ranks(2, lambda view: vae.encode(seeded(1, 3, 32, 16), view)[0])
    decoded, encoded = ["0 the decoded picture", "1 the decoded picture"] * 2, ["0 the encoded picture", "1 the encoded picture"]
    assert sorted(waits) == sorted(decoded + encoded)


def test_a_collective_left_out_is_named(vae: Vae, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = copy.deepcopy(vae)
    monkeypatch.setattr(broken.decoder.mid.attn_1, "forward", lambda x, lay: x)
    with pytest.raises(CollectiveError, match="the VAE's decoder made a wrong number of collectives: kv_gather 0 instead of 1"):
        on_ranks(2, lambda view: broken.decode(seeded(1, 8, 2, WIDTH), view=view))
