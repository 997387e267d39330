"""Every fault, in every phase, on the first, a middle and the last rank: one sentence in time, and the next prompt is bit-identical.

The ranks are real processes with the real control plane, engine and a small checkpoint. Every run takes each fault and phase on one rank;
``FAULTS=all`` takes them on all three, as ``make faults`` does. On GPUs where there are four, or where one may be shared.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cell import Cell
from injector import KINDS, PHASES
from rank_gpus import have_gpus, on_gpu
from rank_pool import RankPool, Reply

from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint
from phase_parallel.parallel.environment import LaunchEnvironment

pytestmark = [pytest.mark.ranks4, pytest.mark.timeout(1800)]
RANKS = (0, 1, 3)
GPUS = have_gpus(4)
# Ranks that share a GPU wait for one another's turn, and compile kernels at the first prompt.
TIMEOUT_S = 15.0 if GPUS else 5.0
LIMIT_S = 15.0
PROMPT_S = 90.0 if GPUS else 60.0
AT = {"load": 25, "AR prefill": 0, "AR decode": 1, "denoise": 1, "VAE decode": 3}
"""After how many checks of its phase a rank fails."""

WEIGHT = {
    "load": "",
    "AR prefill": "layers.1.o_proj",
    "AR decode": "layers.1.o_proj",
    "denoise": "layers.1.o_proj",
    "VAE decode": "vae.decoder.conv_out.weight",
}
"""What NaN is written into; the empty text is every weight."""

CAUSE = {
    "exception": "the test broke this rank",
    "out of memory": "out of memory (",
    "NaN": "NaN",
    "SIGSTOP": f"did not answer within {TIMEOUT_S:.0f} s",
    "file removed": "download it again",
    "SIGKILL": "the process has ended",
}


def matrix() -> list[tuple[str, str, int]]:
    """(fault, phase, rank). Kills come last, because each needs new processes. A file is read while loading only."""
    cells = []
    for kind in KINDS:
        for number, phase in enumerate(PHASES):
            if kind == "file removed" and phase != "load":
                continue
            first = (KINDS.index(kind) + number) % len(RANKS)
            cells += [(kind, phase, rank) for rank in (RANKS if os.environ.get("FAULTS") == "all" else RANKS[first : first + 1])]
    return cells


class Ranks:
    """Four ranks that can be started again."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "checkpoint"
        self.orders = folder / "orders.json"
        self.spare = folder / "spare"
        write_checkpoint(self.checkpoint, SyntheticSpec(kind="instruct", latent_channels=4, vit_layers=1, layers=2))
        shutil.copytree(self.checkpoint, self.spare)
        self.pool: RankPool | None = None
        self.expected: dict[str, str] = {}

    def start(self) -> None:
        ports = _free_ports(4)

        def environment(rank: int, store: str) -> dict[str, str]:
            host, port = store.split(":")
            own = {"TEST_CHECKPOINT": str(self.checkpoint), "TEST_ORDERS": str(self.orders)}
            launch = LaunchEnvironment(rank, 4, rank, host, int(port), "a secret of one launch", "test", ports, TIMEOUT_S, "cuda" if GPUS else "cpu", (), 0)
            return launch.to_environ() | own | (on_gpu(rank) if GPUS else {})

        self.pool = RankPool(Path(__file__).parent / "rank_program.py", 4, environment)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def ask(self, scenario: str, *, rank: int = 0, limit_s: float = PROMPT_S, **arguments: object) -> Reply:
        return self.pool.collect(self.pool.start(scenario, ranks=[rank], **arguments), limit_s)[rank]

    def prompt(self, **arguments: object) -> Reply:
        return self.ask("prompt", prompt_id=str(uuid.uuid4()), **arguments)

    def order(self, kind: str, phase: str, rank: int) -> None:
        order = {"id": uuid.uuid4().hex, "rank": rank, "phase": phase, "at": AT[phase], "kind": kind, "weight": WEIGHT[phase]}
        self.orders.write_text(json.dumps(order | {"folder": str(self.checkpoint)}))


def _free_ports(count: int) -> tuple[int, ...]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = tuple(one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("faults"))
    found.start()
    reply = found.prompt()
    assert reply.error == "", reply.error
    found.expected = reply.result
    yield found
    found.close()


def run_with_fault(ranks: Ranks, kind: str, phase: str, rank: int) -> tuple[str, float]:
    """The sentence and the seconds from the fault to it."""
    ranks.order(kind, phase, rank)
    pid, ordered_at = ranks.pool.processes[rank].pid, time.time()
    asked = ranks.pool.start("prompt", ranks=[0], prompt_id=str(uuid.uuid4()))
    if rank != 0 or kind not in ("SIGSTOP", "SIGKILL"):
        reply = ranks.pool.collect(asked, PROMPT_S)[0]
        if kind == "SIGSTOP":
            os.kill(pid, signal.SIGCONT)
        return f"{reply.error_type}: {reply.error}", reply.seconds
    # Nobody is left to tell on rank 0; the others must not wait for it.
    start = time.monotonic()
    while not (said := ranks.ask("error_since", rank=1, moment=ordered_at).result):
        assert time.monotonic() - start < TIMEOUT_S + 2 * LIMIT_S, "rank 1 still waits for rank 0"
        time.sleep(0.2)
    seconds = time.monotonic() - start
    if kind == "SIGSTOP":
        os.kill(pid, signal.SIGCONT)
        reply = ranks.pool.collect(asked, 30.0)[0]
        assert reply.error == said
    return said, seconds


@pytest.mark.parametrize(("kind", "phase", "rank"), matrix(), ids=lambda value: str(value).replace(" ", "-"))
def test_fault(ranks: Ranks, cells: list[Cell], kind: str, phase: str, rank: int) -> None:
    cell = Cell(kind, phase, rank)
    cells.append(cell)
    if phase == "load":
        assert ranks.ask("unload").error == ""
    said, cell.seconds = run_with_fault(ranks, kind, phase, rank)
    cell.sentence = said
    ranks.orders.unlink()
    if kind == "file removed":
        shutil.copytree(ranks.spare, ranks.checkpoint, dirs_exist_ok=True)
    if kind == "SIGKILL":
        ranks.close()
        ranks.start()
    after = ranks.prompt()
    cell.next_prompt = "identical" if after.result == ranks.expected else "WRONG"
    assert after.error == ""
    assert after.result == ranks.expected
    assert "\n" not in said and CAUSE[kind] in said and phase in said, said
    if kind != "file removed":  # every rank reads the file, so any may miss it first
        assert f"rank {rank} " in said, said
    # "failed" is told at once, a rank that hangs after the timeout.
    assert cell.seconds < LIMIT_S + (TIMEOUT_S if kind == "SIGSTOP" else 0.0)


@pytest.mark.parametrize("phase", PHASES)
def test_cancel(ranks: Ranks, phase: str) -> None:
    """In every phase, the decoding of the picture too."""
    if phase == "load":
        assert ranks.ask("unload").error == ""
    assert ranks.prompt(cancel_in=phase).error_type == "Interrupted"
    assert ranks.prompt().result == ranks.expected
