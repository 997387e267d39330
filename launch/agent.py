"""Run the ranks under torchrun's elastic agent, in this process, with a store that only this machine
reaches.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ..parallel.hung_ranks import asked_to_end, forget_request
from ..parallel.rank_logs import last_lines
from ..parallel.store import JsonStore
from .records import parent_of, process_birth

RANK_SCRIPT = Path(__file__).resolve().parent / "rank.py"
MONITOR_INTERVAL_S = 0.25
TAIL_LINES = 30
TELLING_S = 4.0
"""How long the other ranks live on after one was lost: rank 0 notices within two seconds and tells its user, then all are ended."""


class LaunchStore:
    """The TCPStore of a launch. TCPStore listens everywhere, unless handed a listening socket."""

    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        """``port`` 0: any free one. Raises OSError when this machine has no such address, or the port is taken."""
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
        self.port: int = listener.getsockname()[1]
        # multi_tenant: the agent's own TCPStore on this port, in this process, then joins this server.
        self._store = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended: by a signal to the agent, or because `rank` failed (`cause` says how)."""

    signal: signal.Signals | None = None
    rank: int | None = None
    cause: str = ""
    log_tail: str = ""


class RanksAgent(LocalElasticAgent):
    """The elastic agent, with one rule more: ranks that never became ready are not started again."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: Path,
        *,
        holds_rank_0: bool,
        is_ready: Callable[[], bool],
        on_failure: Callable[[str], None],
        store: JsonStore,
    ) -> None:
        """``store``: the launch's, above its restarts."""
        logs_specs = DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL, tee=Std.ALL)
        super().__init__(spec, logs_specs, log_line_prefix_template="[rank ${rank}] ")
        self._holds_rank_0 = holds_rank_0
        self._is_ready = is_ready
        self._on_failure = on_failure
        self._requests: JsonStore | None = store
        self._lost_at: float | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._end_hung_ranks()
        if self._is_ready() and self._rank_0_is_telling():
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            if not self._is_ready():
                self._remaining_restarts = 0  # what failed at the start would fail again
            elif self._remaining_restarts:
                rank, failure = first_failure(result)
                self._on_failure(f"Rank {rank} {cause_of(failure)}: all ranks are started again.")
        return result

    def _end_hung_ranks(self) -> None:
        """Rank 0 asks for it. Whatever it names, only a process that is a rank of this agent is ended."""
        if self._requests is None:
            return
        try:
            hung = asked_to_end(self._requests)
            if hung:
                # Once only: a process may need long to end, and much later another one may have its number.
                forget_request(self._requests)
        except RuntimeError:  # the store is machine 0's, whose end is told elsewhere
            self._requests = None
            return
        own = {pid for pid in self._pcontext.pids().values() if parent_of(pid) == os.getpid()}
        for one in hung:
            if one.pid in own and process_birth(one.pid) is not None:
                self._on_failure(f"Rank {one.rank} did not answer for {one.silent_s:g} s: its process {one.pid} is ended.")
                os.kill(one.pid, signal.SIGKILL)

    def _rank_0_is_telling(self) -> bool:
        """Has a rank been lost a moment ago that was not rank 0?"""
        ended = [local for local, pid in self._pcontext.pids().items() if process_birth(pid) is None]
        if not ended or (self._holds_rank_0 and 0 in ended):
            self._lost_at = None
            return False
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        return time.monotonic() - self._lost_at < TELLING_S


def first_failure(result: RunResult) -> tuple[int, ProcessFailure]:
    """The rank that failed first and how (the others fail because of it)."""
    rank = min(result.failures, key=lambda failed: result.failures[failed].timestamp)
    return rank, result.failures[rank]


def cause_of(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"was killed by {failure.signal_name()}"
    return f"ended with exit code {failure.exitcode}"


@dataclass(frozen=True)
class AgentPlace:
    """Which machine of how many this agent is on, and where the launch's store is."""

    store_host: str
    store_port: int
    number: int = 0
    count: int = 1
    address: str = "127.0.0.1"


def run_ranks(
    *,
    ranks: int,
    launch_id: str,
    place: AgentPlace,
    plan: Path,
    logs: Path,
    restarts: int,
    is_ready: Callable[[], bool],
    on_failure: Callable[[str], None],
) -> Outcome:
    """Start this machine's ``ranks`` and stay until they end. Main thread only: the agent handles signals there."""
    # The agent warns of every stop, as if a stop were a fault. Each of its loggers has a level of its own.
    for module in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.ERROR)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=("-u", str(RANK_SCRIPT), str(plan)),
        rdzv_handler=StaticTCPRendezvous(place.store_host, place.store_port, place.number, place.count, launch_id, 60),
        max_restarts=restarts,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=place.address,
    )
    store = JsonStore.tcp(place.store_host, place.store_port, launch_id)
    agent = RanksAgent(spec, logs, holds_rank_0=place.number == 0, is_ready=is_ready, on_failure=on_failure, store=store)
    try:
        result = agent.run()
    except SignalException as stop:
        return Outcome(signal=stop.sigval)
    if not result.is_failed():
        return Outcome(cause="all ranks ended by themselves")
    rank, failure = first_failure(result)
    tail = last_lines(logs, rank - place.number * ranks, TAIL_LINES)
    return Outcome(rank=rank, cause=cause_of(failure), log_tail="\n".join(tail))
