"""The ranks of ``phase-parallel check``: an SPMD program without ComfyUI, one process per rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import torch

from ..models.hunyuan_image_3.engine import Engine
from ..models.hunyuan_image_3.loading import LoadOptions
from ..parallel.cluster import Cluster
from ..parallel.plan import make_plan
from ..parallel.section import SectionKey, digest_of, open_section
from ..parallel.store import JsonStore
from .agent import LoopbackStore
from .errors import LaunchError
from .golden import GoldenCase, compare, run_case
from .paths import PACK_ROOT
from .rank import die_with

TIMEOUT_S = 300.0


def start(options: dict[str, Any]) -> None:
    """Run all cases on ``options["ranks"]`` processes and return when they have ended."""
    if options["ranks"] == 1:
        device = torch.device("cuda:0" if options["device"] == "cuda" else "cpu")
        _run(options, Cluster.alone(device))
        return
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    store = LoopbackStore()
    written = Path(options["out"]).with_name("options.json")
    written.write_text(json.dumps({**options, "store_port": store.port, "agent_pid": os.getpid()}))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options["ranks"],
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{store.port}",
        rdzv_configs={"rank": 0, "timeout": 60},
        run_id=uuid.uuid4().hex,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    # By the pack's path, so that it works whether the pack is installed or not.
    command = elastic_launch(config, sys.executable)
    # The agent takes the signals of this process for its ranks; afterwards they belong to whoever called.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        command("-u", str(PACK_ROOT), "check", "--as-rank", str(written))
    except SignalException as stop:
        raise KeyboardInterrupt from stop
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        raise LaunchError(f"Rank {rank} of the check ended with exit code {failure.exitcode}; its own message is above.") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def rank(written: Path) -> None:
    """Entry of one process; the elastic agent has set its rank. ``written``: the options as JSON."""
    options = json.loads(written.read_text())
    die_with(options["agent_pid"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local}" if options["device"] == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cluster = Cluster(
        JsonStore.tcp("127.0.0.1", options["store_port"], "check"),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device=device,
        timeout_s=TIMEOUT_S,
    )
    cluster.start()
    try:
        _run(options, cluster)
    finally:
        cluster.close()


def _run(options: dict[str, Any], cluster: Cluster) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    engines: dict[Path, Engine] = {}
    for number, name in enumerate(options["cases"]):
        row = _run_case(options, cluster, engines, name, number)
        if cluster.rank == 0:
            with open(options["out"], "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")


def _run_case(options: dict[str, Any], cluster: Cluster, engines: dict[Path, Engine], name: str, number: int) -> dict[str, Any]:
    plan = make_plan(
        options["plan"],
        world_size=options["ranks"],
        rank=cluster.rank,
        denoise=options["denoise"],
        attention=options["attention"],
    )
    try:
        case = GoldenCase.read(Path(options["golden"]) / "cases" / name)
        with open_section(cluster, SectionKey("check", name, number, ""), plan, phase="check") as section:
            engine = engines.get(case.checkpoint)
            if engine is None:
                engines.clear()
                engine = engines[case.checkpoint] = _load(options, case, plan, section, cluster.device)
            elif engine.model.comm is not section.communicator:
                engine.connect(section.communicator)
            got = run_case(case, engine, section.check)
            digest = digest_of({}, got)
            section.exit(digest)
        rows = compare(case, got)
    except Exception as error:  # whatever a case does, it is a FAIL of that case, and the others still run
        sentence = str(error) if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
        return {"case": name, "error": sentence, "tensors": []}
    return {
        "case": name,
        "digest": digest,
        "tensors": [{"tensor": r.tensor, "error": r.error, "limit": r.limit, "note": r.note, "ok": r.ok} for r in rows],
    }


def _load(options: dict[str, Any], case: GoldenCase, plan: Any, section: Any, device: torch.device) -> Engine:
    return Engine.load(
        case.checkpoint,
        plan,
        section.communicator,
        LoadOptions("fp32", options["moe_layout"], options["moe_path"]),
        device=device,
        cfg_mode=options["cfg_mode"],
        reuse_text=options["reuse_text"],
    )
