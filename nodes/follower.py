"""The node that a worker runs while rank 0 executes a prompt: it does, section by section, what rank 0
announces.

A worker never sees the user's graph. What is cached, in which order nodes run and how conditions are batched
is decided once, on rank 0, so two ranks cannot decide differently.
"""

from __future__ import annotations

import logging
import os
import time

from ..parallel.cluster import Cluster
from ..parallel.environment import LaunchEnvironment
from ..parallel.faults import SectionCancelled, SectionError
from ..parallel.operations import OperationCall, run_call
from ..parallel.process_cluster import process_cluster
from .comfy_host import ComfyHost
from .fan_out import FOLLOWER_ID

_log = logging.getLogger(__name__)


def joined_key(session: int, rank: int) -> str:
    return f"session/{session}/joined/{rank}"


def call_key(session: int, index: int) -> str:
    return f"session/{session}/call/{index}"


def follow_session(cluster: Cluster, session: int) -> int:
    """Take part in every section of ``session`` until rank 0 ends it; returns how many there were.

    A section that fails or is cancelled does not end the session: rank 0 raises the same error, its prompt
    ends, and it says so here. The local interrupt flag is not read, because cancelling is rank 0's decision
    and travels with the sections.

    Raises:
        RuntimeError: rank 0 or the launcher has vanished.
    """

    joined = time.monotonic()

    def check() -> None:
        cluster.store_check()
        # Rank 0 has just asked for this session, so it lives, whatever was heard of it before.
        if time.monotonic() - joined > cluster.timeout_s and 0 in cluster.stale_ranks(cluster.timeout_s):
            raise RuntimeError(
                f"rank 0 has not been heard of for {cluster.timeout_s:g} s; restart the launch"
            )

    cluster.store.set(joined_key(session, cluster.rank), True)
    index = 0
    while True:
        announced = cluster.store.wait(call_key(session, index), None, check)
        if "end" in announced:
            return index
        index += 1
        try:
            run_call(cluster, OperationCall.from_json(announced), None)
        except SectionCancelled as cancelled:
            _log.info("rank %d: %s", cluster.rank, cancelled)
        except SectionError as error:
            _log.error("rank %d: %s", cluster.rank, error)


class PhaseParallelFollower:
    """Posted by rank 0 to the other ranks; of no use in a graph."""

    CATEGORY = "HunyuanImage3/internal"
    DESCRIPTION = (
        "Runs on ranks other than 0 while rank 0 executes a prompt. Posted by rank 0, of no use in a graph."
    )
    RETURN_TYPES = ()
    FUNCTION = "follow"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {
            "required": {
                "session": (
                    "INT",
                    {"default": 0, "min": 0, "max": 2**53, "tooltip": "Number of rank 0's session."},
                ),
                "prompt_id": ("STRING", {"default": "", "tooltip": "Id of the prompt that rank 0 executes."}),
            }
        }

    @classmethod
    def IS_CHANGED(cls, **_: object) -> float:
        return float("nan")

    def follow(self, session: int, prompt_id: str) -> tuple:
        cluster = process_cluster(ComfyHost().device())
        if cluster.rank == 0:
            raise RuntimeError(f"{FOLLOWER_ID} runs on ranks other than 0; remove it from the graph")
        sections = follow_session(cluster, session)
        _log.info("rank %d followed prompt %s through %d sections", cluster.rank, prompt_id, sections)
        return ()


def follower_nodes() -> dict[str, type]:
    """For NODE_CLASS_MAPPINGS: the follower exists on the ranks that follow and is not offered to users
    anywhere else.
    """
    environment = LaunchEnvironment.from_environ(os.environ)
    return {} if environment is None or environment.rank == 0 else {FOLLOWER_ID: PhaseParallelFollower}
