"""How rank 0 makes all ranks work: the nodes call :meth:`Driver.call`, and nothing else of the control plane.

A *session* joins the workers to one prompt. It opens at the prompt's first call, when the prompt is valid and
really runs, and closes when the prompt is over. Each call is one section. In a world of one there is no
session and the call runs here.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..parallel.cluster import Cluster
from ..parallel.environment import LaunchEnvironment
from ..parallel.faults import SectionCancelled, SectionError, name_ranks
from ..parallel.operations import OperationCall, Tensors, describe_tensors, run_call
from ..parallel.plan import ParallelPlan
from ..parallel.process_cluster import process_cluster
from ..parallel.section import Report, SectionKey, digest_of, never_cancelled
from ..parallel.store import StoreTimeout
from .comfy_host import ComfyHost, Host
from .fan_out import RankUnavailable, ask_followers
from .follower import call_key, joined_key
from .queue_keeper import freeze_queue
from .silent_ranks import OUTLOOK, SilentRanks

_log = logging.getLogger(__name__)
_WATCH_S = 0.2


@dataclass
class _Session:
    number: int
    prompt_id: str
    told: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    closed: threading.Event = field(default_factory=threading.Event)


class Driver:
    """One per process, on rank 0 (or alone). Calls come from ComfyUI's executor thread, one at a time."""

    def __init__(
        self,
        cluster: Cluster,
        host: Host,
        environment: LaunchEnvironment | None,
        *,
        rank_lost: Callable[[], None] = lambda: None,
        rank_silent: Callable[[], bool] = lambda: False,
    ):
        """Before an error is raised, ``rank_lost`` is called when the process of a rank has ended, and else ``rank_silent``: has a rank stopped answering
        that will be ended?
        """
        self._rank_lost, self._rank_silent = rank_lost, rank_silent
        self.cluster = cluster
        self._host = host
        self._environment = environment
        self._lock = threading.RLock()
        self._session: _Session | None = None
        self._sessions = 0
        self._read_keys: list[str] = []

    def call(
        self,
        op: str,
        args: dict[str, Any],
        tensors: Tensors | None = None,
        *,
        node_id: str,
        plan: ParallelPlan | None = None,
        report: Report | None = None,
    ) -> tuple[dict[str, Any], Tensors]:
        """Run operation ``op`` on all ranks; returns rank 0's result. ``plan`` None: that of the last call.

        Raises:
            the host's interruption: the user cancelled, and all ranks have stopped.
            RankUnavailable: a rank does not take part; nothing has been started.
            SectionError: a rank failed; one sentence. In a world of one the operation's own exception.
        """
        tensors = tensors or {}
        with self._lock:
            running = self._host.running_prompt()
            # Between prompts the flag is one that nobody has read, and not meant for this call.
            if running is not None and self._host.cancelled():
                raise self._interrupt()
            try:
                session = self._session_of(running)
                announced = self._announce(session, op, args, tensors, node_id, plan or self.cluster.plan)
                reporting, cancelled = (report, never_cancelled) if running is None else self._watch_cancel(report)
                return run_call(self.cluster, announced, tensors, cancelled=cancelled, report=reporting)
            except SectionCancelled:
                raise self._interrupt() from None
            except (SectionError, RankUnavailable) as error:
                if self._tell_of_lost_ranks():
                    raise RankUnavailable(f"{error}; {OUTLOOK}") from error
                raise
            finally:
                if running is None:
                    self._close("the call is over")

    def _tell_of_lost_ranks(self) -> bool:
        """True when a rank hangs."""
        try:
            if not self.cluster.lost_ranks():
                return self._rank_silent()
            self._rank_lost()
        except RuntimeError as error:
            # The launcher's store has gone too; the user must read the cause, not this.
            _log.warning("the queue was not kept for a restart: %s", error)
        return False

    @property
    def is_running(self) -> bool:
        """Does ComfyUI execute a prompt, which can show an error?"""
        return self._host.running_prompt() is not None

    def _announce(
        self,
        session: _Session,
        op: str,
        args: dict[str, Any],
        tensors: Tensors,
        node_id: str,
        plan: ParallelPlan,
    ) -> OperationCall:
        """Tell the followers what comes next."""
        cluster = self.cluster
        session.calls[node_id] += 1
        key = SectionKey(session.prompt_id, node_id, session.calls[node_id], digest_of(args, tensors))
        try:
            generation = cluster.lead_generation(plan)
        except SectionError:
            # A worker has failed between sections, so it no longer follows; the next call asks anew.
            self._close("a rank has failed")
            raise
        number = cluster.next_section()
        call = OperationCall(number, generation, op, args, describe_tensors(tensors), key, asdict(plan))
        if cluster.world_size > 1:
            self._tell(session, call.to_json())
        return call

    def _watch_cancel(self, report: Report | None) -> tuple[Report | None, Callable[[], bool]]:
        """``report``, and a predicate that also remembers a cancel which ComfyUI raised inside ``report``.

        Its progress hook raises when the user has cancelled, on this rank alone and in the middle of a step;
        the ranks stop at the next check instead, together.
        """
        raised = threading.Event()

        def reporting(event: dict[str, Any]) -> None:
            try:
                report(event)
            except self._host.interruption:
                raised.set()

        return (reporting if report else None), (lambda: raised.is_set() or self._host.cancelled())

    def _interrupt(self) -> BaseException:
        self._host.clear_cancel()
        return self._host.interruption()

    # Sessions

    def _session_of(self, running: str | None) -> _Session:
        """``running`` None: a call between prompts, for example to free memory, gets a session of its own."""
        session = self._session
        if session is not None and session.prompt_id == running and not session.closed.is_set():
            return session
        self._close("another prompt runs")
        self._sessions += 1
        session = _Session(self._sessions, running or str(uuid.uuid4()))
        self._session = session
        if self.cluster.world_size > 1:
            self._gather_followers(session, never_cancelled if running is None else self._host.cancelled)
            if running is not None:
                watch = threading.Thread(
                    target=self._watch_prompt, args=(session,), name="phase-parallel-session", daemon=True
                )
                watch.start()
        return session

    def _gather_followers(self, session: _Session, cancelled: Callable[[], bool]) -> None:
        """Every worker follows, or nothing starts."""
        cluster, environment = self.cluster, self._environment
        assert environment is not None, "several ranks come from a launch"
        keys = [joined_key(session.number, rank) for rank in range(1, cluster.world_size)]
        try:
            ask_followers(environment, session.number, session.prompt_id)
            cluster.store.collect(keys, cluster.timeout_s, lambda: self._check_joining(cancelled))
        except StoreTimeout as error:
            self._close("not all ranks joined")
            silent = tuple(int(key.rpartition("/")[2]) for key in error.missing)
            raise RankUnavailable(
                f"{name_ranks(silent)} accepted this prompt but did not join it in {cluster.timeout_s:g} s; "
                "an earlier section may still run there, see the log of that rank or restart the launch"
            ) from error
        except BaseException:
            self._close("not all ranks joined")
            raise
        # Whoever has joined this session has read all of those before.
        for key in self._read_keys:
            cluster.store.delete(key)
        self._read_keys = []

    def _check_joining(self, cancelled: Callable[[], bool]) -> None:
        self.cluster.store_check()
        if cancelled():
            raise self._interrupt()

    def _tell(self, session: _Session, announcement: dict[str, Any]) -> None:
        self.cluster.store.set(call_key(session.number, session.told), announcement)
        session.told += 1

    def _watch_prompt(self, session: _Session) -> None:
        """Frees the workers soon after the prompt has ended, however it ended."""
        while not session.closed.wait(_WATCH_S):
            if self._host.running_prompt() != session.prompt_id and self._lock.acquire(blocking=False):
                try:
                    if self._session is session:
                        self._close("the prompt is over")
                finally:
                    self._lock.release()

    def _close(self, reason: str) -> None:
        session, self._session = self._session, None
        if session is None or session.closed.is_set():
            return
        session.closed.set()
        if self.cluster.world_size > 1:
            self._tell(session, {"end": reason})
            joined = [joined_key(session.number, rank) for rank in range(1, self.cluster.world_size)]
            told = [call_key(session.number, index) for index in range(session.told)]
            self._read_keys += joined + told
            _log.info("session %d ends: %s", session.number, reason)


_process_lock = threading.Lock()
_process_driver: Driver | None = None


def process_driver() -> Driver:
    """The driver of this process, made at the first node that works."""
    global _process_driver
    with _process_lock:
        if _process_driver is None:
            host = ComfyHost()
            environment = LaunchEnvironment.from_environ(os.environ)
            cluster = process_cluster(host.device())
            if environment is None or environment.machine_ranks:
                # On several machines nobody is started again.
                _process_driver = Driver(cluster, host, environment, rank_lost=freeze_queue)
            else:
                silent = SilentRanks.of_launch(cluster, environment)
                _process_driver = Driver(cluster, host, environment, rank_lost=freeze_queue, rank_silent=silent.suspect)
        return _process_driver
