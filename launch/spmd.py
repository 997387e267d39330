"""Programs whose ranks run without ComfyUI: one process per rank, all with the same options, ended with their parent."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..parallel.cluster import Cluster
from ..parallel.store import JsonStore
from .agent import LaunchStore
from .errors import LaunchError
from .gpus import see_one_gpu
from .paths import PACK_ROOT
from .rank import die_with, write_stacks_on_request

AS_RANK = "--as-rank"


def start_ranks(command: Sequence[str], options: dict[str, Any]) -> None:
    """Run ``phase-parallel COMMAND --as-rank FILE`` on ``options["ranks"]`` processes and return when they have ended. FILE holds the options."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    store = LaunchStore()
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
    agent = elastic_launch(config, sys.executable)
    # The agent takes the signals of this process for its ranks; afterwards they belong to whoever called.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    with tempfile.TemporaryDirectory(prefix="phase-parallel-ranks-") as folder:
        written = Path(folder) / "options.json"
        written.write_text(json.dumps({**options, "store_port": store.port, "agent_pid": os.getpid()}))
        try:
            agent("-u", str(PACK_ROOT), *command, AS_RANK, str(written))
        except SignalException as stop:
            raise KeyboardInterrupt from stop
        except ChildFailedError as error:
            rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
            raise LaunchError(f"Rank {rank} of the {command[0]} ended with exit code {failure.exitcode}; its own message is above.") from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def joined(options: dict[str, Any], *, name: str, timeout_s: float) -> Iterator[Cluster]:
    """In one of those processes: its place in the cluster. On CUDA it sees one device, its own, as a rank of a launch does."""
    die_with(options["agent_pid"])
    write_stacks_on_request()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options["device"] == "cuda":
        see_one_gpu(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda:0")
        torch.cuda.set_device(device)
    cluster = Cluster(
        JsonStore.tcp("127.0.0.1", options["store_port"], name),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device=device,
        timeout_s=timeout_s,
    )
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.close()

