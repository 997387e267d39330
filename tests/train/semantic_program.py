"""One rank of the semantic tests: a suite through an engine that is loaded for it, in working order or with a fault planted in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rank_pool import serve

from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.resident import Weight
from phase_parallel.parallel.section import SectionKey, open_section
from phase_parallel.parallel.store import JsonStore
from phase_parallel.train.evaluation import evaluate
from phase_parallel.train.figures import MAIN, figures
from phase_parallel.train.painter import Painter, Steps
from phase_parallel.train.suites import Suite, suite_items

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ["STORE"].split(":")

torch.set_num_threads(1)
cluster = Cluster(JsonStore.tcp(HOST, int(PORT), "semantics"), rank=RANK, world_size=WORLD_SIZE, device=torch.device("cpu"), timeout_s=180.0)
cluster.start()
calls = 0


def skipped_reduction(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Every rank goes on with its own summand of an attention's output."""

    def sum_of(self: Communicator, summand: torch.Tensor, ranks: tuple[int, ...], site: str) -> torch.Tensor:
        return summand if site.endswith("attn.o_proj") else real(self, summand, ranks, site)

    return sum_of


def swapped_micros(real: Callable[..., Weight]) -> Callable[..., Weight]:
    """In prefill and decode each replica works with the micro shard of the other one."""

    def micro_of(self: Weight, micro: int | None, count: int) -> Weight:
        return real(self, None if micro is None else count - 1 - micro, count)

    return micro_of


def physical_order(real: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Chunks come by the numbers of the ranks, not by their places."""

    def gather(self: Communicator, tensor: torch.Tensor, ranks: tuple[int, ...], site: str) -> list[torch.Tensor]:
        return real(self, tensor, tuple(sorted(ranks)), site)

    return gather


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "skipped reduction": (Communicator, "sum", skipped_reduction),
    "swapped micros": (Weight, "micro", swapped_micros),
    "physical order": (Communicator, "gather", physical_order),
}


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    with ExitStack() as stack:
        if fault is not None:
            owner, name, spoil = FAULTS[fault]
            stack.enter_context(patch.object(owner, name, spoil(getattr(owner, name))))
        yield


def draw(*, folder: str, plan: dict[str, Any], suite: Suite, count: int, steps: int, pictures: str, fault: str | None = None) -> dict[str, Any]:
    """`pictures`: the .npz that rank 0 writes. Ranks with a fault draw different pictures, and only then do not compare them: rank 0's is judged."""
    global calls
    calls += 1
    own = make_plan(**plan, world_size=WORLD_SIZE, rank=RANK)
    with planted(fault), open_section(cluster, SectionKey("semantics", suite, calls, ""), own, phase="judge") as section:
        engine = Engine.load(Path(folder), own, section.communicator, LoadOptions("fp32"), device=torch.device("cpu"))
        painter = Painter(engine, Path(folder), Steps.of(engine.config, steps=steps), check=section.check)
        outcome = evaluate(painter, suite_items(suite, count), judging=RANK == 0)
        section.exit("" if fault else outcome.digest)
    if RANK:
        return {"digest": outcome.digest}
    np.savez(pictures, *[pixels for pixels in outcome.pictures if pixels is not None])
    accuracy = figures(outcome.rows)[MAIN[suite]]
    return {"digest": outcome.digest, "accuracy": accuracy / 100, "sentences": [row.sentence for row in outcome.rows]}


serve({"draw": draw})
