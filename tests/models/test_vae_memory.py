"""How much fits: the whole picture where it can, else the largest tile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engines import engine_of
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3 import engine as engine_module
from phase_parallel.models.hunyuan_image_3.config import VaeConfig
from phase_parallel.models.hunyuan_image_3.vae_memory import SMALLEST_TILE, VaeRoom, free_bytes, peak_bytes
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

RELEASE = VaeConfig((128, 256, 512, 1024, 1024), 3, 3, 32, 2, 16, 4, 0.562679178327931, None)
GIB = 1 << 30


def room(height: int, width: int, free: int | None, ranks: int = 1) -> VaeRoom:
    return VaeRoom.of(RELEASE, height=height, width=width, ranks=ranks, free=free)


def test_without_a_limit_everything_fits() -> None:
    assert room(1024, 1024, None).fits


def test_more_ranks_make_room() -> None:
    need = [peak_bytes(RELEASE, height=128, width=128, ranks=ranks) for ranks in (1, 2, 4, 8)]
    assert need == sorted(need, reverse=True) and need[0] > 16 * GIB
    assert not room(128, 128, 8 * GIB).fits and room(128, 128, 8 * GIB, ranks=4).fits


@pytest.mark.parametrize("free", [GIB // 2, GIB, 3 * GIB, 6 * GIB, 17 * GIB])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (128, 72), (33, 256)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_tile_fits_and_is_no_smaller_than_needed(height: int, width: int, free: int, ranks: int) -> None:
    found = room(height, width, free, ranks)
    tile_height, tile_width = found.tile
    assert peak_bytes(RELEASE, height=tile_height, width=tile_width, ranks=ranks) <= free
    if not found.fits:
        assert peak_bytes(RELEASE, height=2 * tile_height, width=2 * tile_width, ranks=ranks) > free
        assert tile_height <= height and tile_width <= width


def test_the_smallest_tile_is_tried_whatever_is_free() -> None:
    assert room(64, 100, 0).tile == (SMALLEST_TILE, SMALLEST_TILE)
    assert room(4, 4, 0).fits


def test_the_user_reads_sizes_in_pixels_and_why() -> None:
    assert room(64, 64, 4 * GIB).words() == (
        "VAE in overlapping tiles of 1024x512 (height x width), which differ slightly at their borders: the whole picture needs 5.6 GB on each rank "
        "and 4.3 GB are free"
    )


def test_a_cpu_has_no_such_limit() -> None:
    assert free_bytes(torch.device("cpu")) is None


@pytest.mark.parametrize(("backend", "graphs"), [("native", 15), ("cudaMallocAsync", 0)])
def test_what_graphs_keep_for_replays_is_not_free(backend: str, graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocator counts it as reserved and not allocated, as blocks that anybody may have; CUDA's can be asked for no list."""

    def segment(pool: tuple[int, int], total: int, allocated: int, device: int = 1) -> dict[str, object]:
        return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}

    snapshot = [segment((0, 0), 50, 30), segment((0, 4), 20, 5), segment((0, 5), 8, 8), segment((0, 4), 1000, 0, device=0)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 500))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 78)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 43)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", (lambda: snapshot) if backend == "native" else None)
    assert free_bytes(torch.device("cuda", 1)) == 100 + (78 - 43) - graphs


@pytest.mark.parametrize(
    ("kept", "released", "releases", "fits"),
    [
        (0, 0, 0, True),  # it fits beside recorded steps: they are replayed for the next picture
        (-1, 0, 1, True),
        (-2, -1, 1, False),
    ],
)
def test_recorded_steps_give_way_only_where_the_picture_would_not_fit(
    eight_ways: Path, monkeypatch: pytest.MonkeyPatch, kept: int, released: int, releases: int, fits: bool
) -> None:
    """``kept`` and ``released``: free bytes of rank 1 with and without its recorded steps, less what the picture needs; rank 0 has room."""
    rank = threading.local()
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: rank.free)

    def body(plan: ParallelPlan, comm: Communicator) -> tuple[int, bool, int]:
        engine, made = engine_of(eight_ways, plan, comm), []
        need = peak_bytes(engine.config.vae, height=16, width=16, ranks=2)
        rank.free = need + (kept if plan.rank == 1 else GIB)

        def release() -> None:
            made.append(1)
            rank.free = need + (released if plan.rank == 1 else GIB)

        monkeypatch.setattr(engine.denoiser, "release", release)
        found = engine.vae_room(16, 16)
        return len(made), found.fits, found.free - need

    assert run_ranks(body, "tp", world_size=2) == [(releases, fits, released)] * 2


@pytest.mark.parametrize(("free", "want"), [((3 << 20, 1 << 20), 1 << 20), ((None, None), None), ((None, 1 << 20), None)])
def test_the_fullest_rank_decides_for_all(
    eight_ways: Path, monkeypatch: pytest.MonkeyPatch, free: Sequence[int | None], want: int | None
) -> None:
    rank = threading.local()
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: free[rank.number])

    def body(plan: ParallelPlan, comm: Communicator) -> VaeRoom:
        rank.number = plan.rank
        return engine_of(eight_ways, plan, comm).vae_room(8, 8)

    rooms = run_ranks(body, "tp", world_size=2)
    assert rooms[0] == rooms[1]
    assert rooms[0].free == want
