"""The head's rows of all ranks in every rank's memory, between several blocks of one GPU: one stream plays one rank."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels.peer_gather import gather_bytes, gathered, gemv_gather, gemv_gather_eager
from phase_parallel.kernels.peer_reduce import Mailboxes
from phase_parallel.parallel.abort_word import AbortWord

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="peers' memory needs a CUDA device")


def make(ranks: int, values: int) -> tuple[list[Mailboxes], list[torch.Tensor]]:
    blocks = [torch.zeros(gather_bytes(values), dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    addresses = torch.tensor([block.data_ptr() for block in blocks], dtype=torch.int64, device="cuda")

    def zero() -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device="cuda")

    return [Mailboxes(addresses, rank, zero(), zero(), AbortWord(pinned=True).tensor) for rank in range(ranks)], [gathered(block) for block in blocks]


def compile_for_all(ranks: int, parts: list[torch.Tensor]) -> None:
    """One at a time and waiting for nobody: a kernel that is loaded waits for the device, on which another rank of this process may wait for it."""
    boxes, _ = make(ranks, ranks * parts[0].shape[0])
    for rank in range(ranks):
        gemv_gather(boxes[rank], torch.zeros_like(parts[rank][0]), parts[rank], rank * parts[rank].shape[0], timeout_s=0)
        torch.cuda.synchronize()


@pytest.mark.parametrize(("ranks", "rows", "columns"), [(1, 5, 64), (2, 333, 100), (3, 64, 4096), (4, 1000, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_rank_holds_all_rows(ranks: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    boxes, logits = make(ranks, ranks * rows)
    parts = [torch.randn(rows, columns, device="cuda").to(dtype) * columns**-0.5 for _ in range(ranks)]
    compile_for_all(ranks, parts)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    for _ in range(20):
        x = torch.randn(columns, device="cuda").to(dtype)
        for values in logits:
            values.fill_(float("nan"))
        torch.cuda.synchronize()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                gemv_gather(boxes[rank], x, parts[rank], rank * rows, timeout_s=20)
        torch.cuda.synchronize()
        want = gemv_gather_eager(x, parts)
        for rank in range(ranks):
            torch.testing.assert_close(logits[rank], want, rtol=1e-4, atol=1e-4)
            assert torch.equal(logits[rank], logits[0]), "all ranks hold the same bits"
    assert all(int(box.failed) == 0 for box in boxes)


def test_a_peer_that_does_not_come_is_told() -> None:
    boxes, _ = make(2, 8)
    gemv_gather(boxes[0], torch.ones(16, device="cuda"), torch.ones(4, 16, device="cuda"), 0, timeout_s=0.2)
    torch.cuda.synchronize()
    assert int(boxes[0].failed) == 1
