"""One rank of test_fault_in_text.py: text on two ranks, one of which fails or stands still in the middle."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from rank_pool import serve

from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.text_generation import TextRequest
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.faults import SectionError
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.section import SectionKey, open_section
from phase_parallel.parallel.store import JsonStore

RANK = int(os.environ["RANK"])
HOST, PORT = os.environ["STORE"].split(":")
DEVICE = torch.device(os.environ["DEVICE"])
REQUEST = TextRequest("a red kite", None, None, "auto", need_ratio=False, max_new_tokens=400)

torch.set_num_threads(1)
cluster = Cluster(JsonStore.tcp(HOST, int(PORT), "fault"), rank=RANK, world_size=2, device=DEVICE, timeout_s=120.0)
cluster.start()
engines: list[Engine] = []
calls = 0


def text(*, folder: str, failing: int | None = None, standing: int | None = None) -> dict[str, Any]:
    """``at``: when this rank raised or was told, by the machine's clock."""
    global calls
    calls += 1
    result: dict[str, Any] = {}
    try:
        with open_section(cluster, SectionKey("prompt", "7", calls, ""), make_plan("tp", world_size=2, rank=RANK), phase="AR") as section:
            if not engines:
                comm = section.communicator
                engines.append(Engine.load(Path(folder), comm.plan, comm, LoadOptions(), device=DEVICE))
            elif engines[0].model.comm is not section.communicator:
                engines[0].connect(section.communicator)

            def check(done: int, total: int) -> None:
                section.check(done, total)
                if done >= 20 and failing == RANK:
                    result["at"] = time.monotonic()
                    raise OSError("the disk is full")
                if done >= 20 and standing == RANK:
                    print("@@reply " + '{"result": "standing", "error_type": "", "error": "", "seconds": 0}', flush=True)
                    time.sleep(600)

            written = engines[0].generate_text(REQUEST, check=check)
            result |= {"tokens": list(written.tokens), "reduction": written.reduction}
    except SectionError as error:
        result = {"at": time.monotonic()} | result | {"error": str(error)}
    return result


serve({"text": text})
