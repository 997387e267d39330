"""Whose fault was it? Turns an exception on one rank into the fault that all ranks report.

When a rank fails, its peers fail too, in the collectives that they shared; those secondary errors must not be
what the user reads.
"""

from __future__ import annotations

import logging
import socket
import time
import traceback

import torch.distributed as dist

from .cluster import Cluster
from .faults import Fault, SectionError, SharedSymptom, describe_cause
from .stacks import ask_ranks_for_stacks
from .waiting import CollectiveError, CollectiveTimeout

_log = logging.getLogger(__name__)
_CAUSE_PATIENCE_S = 2.0
"""How long a rank that sees only a consequence waits to learn the cause, before it blames what it sees itself."""

_SILENCE_S = 2.5
"""Two missed heartbeats and a half."""


def share_fault(cluster: Cluster, error: BaseException) -> SectionError:
    """The error of all ranks for ``error`` on this one: its own, or that of the peer which caused it. Ends
    the generation.
    """
    try:
        fault = _diagnose(cluster, error)
    except SectionError as known:
        let_go(error)
        cluster.retire()
        return known.with_traceback(None)
    _log.error("rank %d: %s", cluster.rank, fault.sentence(), exc_info=error)
    let_go(error)
    return cluster.fail(fault)


def timeout_of(cluster: Cluster, ranks: tuple[int, ...], *, site: str | None = None) -> Fault:
    """``ranks`` (unknown when empty) did not answer. They write to their logs where they are when they read this; those of this machine whose heart does
    not beat either are asked before anybody lets go of them, by the first of the ranks that wait.
    """
    key = f"stacks/{cluster.generation}/{socket.gethostname()}"
    if cluster.store.set_first(key, cluster.rank) == cluster.rank:
        ask_ranks_for_stacks(cluster.records(), cluster.stale_ranks(max(cluster.timeout_s / 2, _SILENCE_S)))
        _log.warning("rank %d waited for %g s; the logs of the other ranks say where they are", cluster.rank, cluster.timeout_s)
    return cluster.fault("timeout", ranks, f"{cluster.timeout_s:g} s", site=site)


def let_go(error: BaseException) -> None:
    """Forget the local variables behind ``error``, before the groups are destroyed.

    A collective that was waiting there keeps its connections open for as long as somebody holds the
    traceback, and then this rank's peers, and its own clean-up, wait for the collective's timeout.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _diagnose(cluster: Cluster, error: BaseException) -> Fault:
    """Raises SectionError when a peer has already published the cause."""
    # Once the device was freed, whatever follows is a consequence.
    if isinstance(error, CollectiveTimeout) or cluster.gave_up:
        cluster.look_for_fault()
        silent = cluster.lost_ranks() or cluster.stale_ranks(max(cluster.timeout_s / 2, _SILENCE_S))
        return timeout_of(cluster, silent or cluster.busy_ranks())
    if _lost_a_peer(error) or (isinstance(error, SharedSymptom) and cluster.world_size > 1):
        # A peer that fails publishes first and disconnects then; one that is killed publishes nothing.
        deadline = time.monotonic() + _CAUSE_PATIENCE_S
        while time.monotonic() < deadline:
            cluster.look_for_fault()
            lost = cluster.lost_ranks()
            if lost:
                return cluster.fault("failed", lost, "the process has ended")
            time.sleep(0.05)
    return cluster.fault("failed", (cluster.rank,), describe_cause(error))


def _lost_a_peer(error: BaseException) -> bool:
    """A broken connection, as the collectives report it (torch's error is the cause) or as torch does."""
    if isinstance(error, CollectiveError):
        return error.__cause__ is not None
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
