"""One rank of test_section.py and test_cluster.py: SPMD sections with deliberate mistakes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from rank_pool import serve

from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.faults import RankFault
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.section import SectionKey, digest_of, open_section
from phase_parallel.parallel.store import JsonStore

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ["STORE"].split(":")
TIMEOUT_S = 4.0

cluster = Cluster(
    JsonStore.tcp(HOST, int(PORT), "test"),
    rank=RANK,
    world_size=WORLD_SIZE,
    device=torch.device("cpu"),
    timeout_s=TIMEOUT_S,
)
cluster.start()
calls = 0


def steps(
    *,
    count: int = 3,
    fail: dict[str, int] | None = None,
    cancel_at: int | None = None,
    tokens: tuple[int, ...] = (1, 2, 3),
    odd_token: int | None = None,
    odd_call: int | None = None,
    odd_site: int | None = None,
    odd_result: int | None = None,
    sleeps: int | None = None,
    interrupts: int | None = None,
    stops: int | None = None,
    killed: int | None = None,
    plan: str = "hybrid",
    denoise: str = "sp",
    odd_plan: int | None = None,
) -> dict[str, Any]:
    """A section of ``count`` steps with one collective each. Arguments name the rank that makes a mistake,
    and where.
    """
    global calls
    calls += 1
    inputs = list(tokens)
    if odd_token == RANK:
        inputs[-1] += 1
    key = SectionKey("prompt", "7", calls + 100 * (odd_call == RANK), digest_of(inputs, {}))
    if odd_plan == RANK:
        plan, denoise = "tp", "tp"
    own = make_plan(plan, world_size=WORLD_SIZE, rank=RANK, denoise=denoise)
    done = -1
    with open_section(cluster, key, own, phase="denoise", cancelled=lambda: done == cancel_at) as section:
        total = torch.zeros(2)
        for done in range(count):
            section.check(done, count)
            if fail and fail["rank"] == RANK and fail["step"] == done:
                raise ValueError("the toy network broke")
            if interrupts == RANK:
                raise KeyboardInterrupt
            if stops == RANK:
                raise StopIteration
            if killed == RANK:
                os.kill(os.getpid(), signal.SIGKILL)
            if sleeps == RANK:
                time.sleep(TIMEOUT_S + 2.0)
            site = "elsewhere" if odd_site == RANK and done == 1 else "x"
            total += section.communicator.broadcast(
                torch.full((2,), float(RANK + done)), f"step{done}.{site}"
            )
        section.exit(digest_of({"odd": odd_result == RANK}, {"total": total}))
    return {"total": total.tolist(), "generation": cluster.generation, "rank": RANK}


def apart(
    *, rank: int, seconds: float | None = None, limit_s: float = 60.0, plan: str = "tp", denoise: str = "tp"
) -> dict[str, Any]:
    """A section with new groups, where ``rank`` fails between the handshake and the making of them, or comes ``seconds`` late to it."""
    assert cluster.communicator is not None, "former groups are closed at that point"

    def interfere() -> None:
        if seconds is None:
            raise RuntimeError("the former groups do not close")
        time.sleep(seconds)

    if rank == RANK:
        cluster.communicator.destroy = interfere
    cluster.timeout_s = limit_s
    try:
        return steps(plan=plan, denoise=denoise)
    finally:
        cluster.timeout_s = TIMEOUT_S


def inside(rank: int) -> dict[str, Any]:
    """A section with new groups, and ``rank`` fails while they are made: what the others have begun there ends with gloo's limit."""
    original = dist.init_process_group

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no socket is left")

    if rank == RANK:
        dist.init_process_group = broken
    try:
        return steps(plan="tp", denoise="tp")
    finally:
        dist.init_process_group = original


def between(rank: int) -> dict[str, Any]:
    """``rank`` fails behind the last section, where only rank 0 looks before it announces the next one; the others hear of the next one alone."""
    if rank == RANK:
        cluster.fail(cluster.fault("failed", (RANK,), "the disk is full"))
    time.sleep(1.0)
    if RANK == 0:
        with suppress(RankFault):
            cluster.lead_generation(cluster.plan)
        cluster.store.set(f"announced/{calls}", cluster.lead_generation(cluster.plan))
    cluster.adopt_generation(cluster.store.wait(f"announced/{calls}", 10.0, lambda: None), cluster.plan)
    return steps()


def late(seconds: float, rank: int) -> dict[str, Any]:
    """``rank`` comes to the section only after the others have given up."""
    if rank == RANK:
        time.sleep(seconds)
    return steps()


def records() -> list[dict[str, Any] | None]:
    return cluster.records()


if __name__ == "__main__":
    serve({"steps": steps, "apart": apart, "inside": inside, "between": between, "late": late, "records": records})
