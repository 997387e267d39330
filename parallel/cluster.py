"""This process as one of the ranks: its groups, its status, and the side channel that carries faults.

The side channel is the store, read by a monitor thread, so that a rank can learn of a fault while its main
thread waits in a collective. A *generation* is one life of the process groups: a fault ends it, and rank 0
opens the next one at the next section.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from .collectives import Communicator
from .devices import own_device
from .environment import DEFAULT_TIMEOUT_S, LaunchEnvironment
from .faults import Fault, FaultKind, SectionError
from .groups import ProcessGroups
from .heartbeat import BEAT_S, Hearts
from .plan import ParallelPlan, PlanName
from .plan_choice import plan_on_machines, usual_plan
from .rank_record import RankRecord, RecordKeeper
from .stacks import write_stacks
from .store import JsonStore, StoreUnreachable
from .waiting import CollectiveTimeout

_log = logging.getLogger(__name__)
_FAULT_POLL_S = 0.2
_LEAVING_S = 1.0
"""How soon after a fault the main thread has left the generation, unless it waits for its device."""


class Cluster:
    """One per process. World size 1 works the same way, without peers, monitor or torch.distributed."""

    def __init__(
        self,
        store: JsonStore,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        launch_id: str = "",
        url: str = "",
        asked_plan: PlanName | None = None,
        machine_ranks: int = 0,
    ):
        self.store, self.device = store, device
        self.rank, self.world_size = rank, world_size
        self.timeout_s, self.launch_id = timeout_s, launch_id
        self.asked_plan = asked_plan
        """What ``auto`` means, where the user of the launch said so."""
        self.machine_ranks = machine_ranks or world_size
        self.record = RecordKeeper(RankRecord(rank, os.getpid(), socket.gethostname(), url, str(device)))
        self.generation, self._sections = 0, 0
        self.communicator: Communicator | None = None
        self._lock = threading.Lock()
        self.plan = self._first_plan()
        """Plan of the latest generation."""
        self._open = False
        """A generation is open from the handshake of its first section until a fault."""
        self._connected = 0
        """Generation of ``communicator``."""
        self._fault: Fault | None = None
        self._fault_read_at, self._store_lost = 0.0, ""
        self._closing, self._hearts = threading.Event(), Hearts(store, rank, world_size)
        self._waited_at = 0.0
        """When ``fault_check`` was called last, which waits do four times a second."""
        self._monitor: threading.Thread | None = None

    @classmethod
    def from_environment(cls, environment: LaunchEnvironment) -> Cluster:
        """Connects to the launcher's store and starts the monitor."""
        cluster = cls(
            JsonStore.tcp(environment.store_host, environment.store_port, environment.store_prefix),
            rank=environment.rank,
            world_size=environment.world_size,
            device=own_device(environment),
            timeout_s=environment.timeout_s,
            launch_id=environment.launch_id,
            url=environment.url(environment.rank),
            asked_plan=environment.plan,
            machine_ranks=environment.machine_ranks,
        )
        cluster.start()
        return cluster

    @classmethod
    def alone(cls, device: torch.device) -> Cluster:
        """World of one: a ComfyUI that our launcher did not start."""
        return cls(JsonStore.in_process(), rank=0, world_size=1, device=device)

    def start(self) -> None:
        """Publish the first record and watch the other ranks."""
        self.publish_record()
        if self.world_size > 1 and self._monitor is None:
            self._monitor = threading.Thread(target=self._watch, name="phase-parallel-monitor", daemon=True)
            self._monitor.start()

    def close(self) -> None:
        self._closing.set()
        if self._monitor is not None:
            self._monitor.join()
        self.retire()

    def _first_plan(self) -> ParallelPlan:
        """Until a model chooses: what ``auto`` chooses where memory allows, so that the groups can stay."""
        name = self.asked_plan or usual_plan(self.world_size, self.machine_ranks)
        return plan_on_machines(name, world_size=self.world_size, machine_ranks=self.machine_ranks).on_rank(self.rank)

    # Sections: numbers and generations

    def next_section(self) -> int:
        self._sections += 1
        return self._sections

    def adopt_section(self, number: int) -> None:
        """A follower takes rank 0's count, so that a section it missed does not shift the later ones."""
        self._sections = number

    def lead_generation(self, plan: ParallelPlan) -> int:
        """Rank 0 only: the generation of the next section, a new one after a fault or for another plan.

        Raises SectionError when a rank has failed between sections; the generation is over then.
        """
        try:
            self.look_for_fault()
        except SectionError:
            self.retire()
            raise
        if self.gave_up:
            self.retire()
        if not self._open or self.plan != plan:
            self.adopt_generation(self.generation + 1, plan)
        return self.generation

    def adopt_generation(self, generation: int, plan: ParallelPlan) -> None:
        """The former groups stay until ``connect``: a slower peer may still be in their last collective."""
        with self._lock:
            if generation != self.generation:
                self._fault, self._fault_read_at = None, 0.0
            self.generation, self.plan, self._open = generation, plan, True

    def connect(self, meet: Callable[[], None], *, kept: bool) -> Communicator:
        """Groups of this generation, made when no rank can be inside a collective. All ranks call it, and ``meet`` returns once all are about to make them.
        ``kept``: every rank still has the same former ones."""
        communicator = self.communicator
        if communicator is not None and self._connected == self.generation:
            return communicator
        if kept and communicator is not None and communicator.plan.groups() == self.plan.groups():
            groups = communicator.groups
        else:
            if communicator is not None:
                (communicator.destroy if kept else communicator.abort)()
            store = self.store.connection() if self.world_size > 1 else None
            meet()
            groups = ProcessGroups.create(self.plan, store=store, generation=self.generation, device=self.device, timeout_s=self.timeout_s)
        communicator = Communicator(self.plan, groups, timeout_s=self.timeout_s, fault_check=self.fault_check)
        self.communicator, self._connected = communicator, self.generation
        self.record.take_place(self.plan, self.generation)
        return communicator

    # Faults

    def fault_check(self) -> None:
        """Raises the fault of this generation once a rank has published one; cheap, for use inside waits."""
        self._waited_at = time.monotonic()
        self._raise_fault()
        if self.gave_up:
            raise CollectiveTimeout(f"the device waited for a peer for {self.timeout_s:.0f} s")

    def _raise_fault(self) -> None:
        self.store_check()
        fault = self._fault
        if fault is not None:
            raise fault.error()

    @property
    def groups_from(self) -> int:
        """The generation that this rank's groups were made in, 0 without any that are of use."""
        return self.communicator.groups.generation if self.communicator is not None else 0

    @property
    def gave_up(self) -> bool:
        """The monitor has freed this rank's device, which waited for a peer that did not come."""
        return getattr(self.communicator, "gave_up", False)

    def store_check(self) -> None:
        """Raises StoreUnreachable once the monitor has lost the launcher's store."""
        if self._store_lost:
            raise StoreUnreachable(self._store_lost)

    def look_for_fault(self) -> None:
        """Asks the store now instead of relying on the monitor's last look. Raises SectionError."""
        self._read_fault(self.generation)
        self._raise_fault()

    def fault(self, kind: FaultKind, ranks: tuple[int, ...], message: str, *, site: str | None = None) -> Fault:
        """A fault at the place this rank has reached."""
        phase, reached = self.record.where()
        return Fault(kind, ranks, phase, reached if site is None else site, message)

    def fail(self, fault: Fault) -> SectionError:
        """Publish ``fault``, free the peers, and return what to raise: the generation's first fault, whoever saw it."""
        if not self._open:
            # Before the handshake there is no generation whose peers could be told.
            return fault.error()
        standing = Fault.from_json(self.store.set_first(f"fault/{self.generation}", fault.to_json()))
        self.retire()
        return standing.error()

    def retire(self) -> None:
        """End this generation on this rank. Destroying groups makes peers that wait in them fail within milliseconds."""
        with self._lock:
            self._open, self._fault, self._fault_read_at = False, None, 0.0
            communicator, self.communicator = self.communicator, None
        try:
            if communicator is not None:
                communicator.abort()
        except RuntimeError as error:
            # The connections are gone either way; the user must read the cause of the fault, not this.
            _log.warning("rank %d could not close its process groups cleanly: %s", self.rank, error)

    def _read_fault(self, generation: int) -> None:
        value = self.store.find(f"fault/{generation}")
        with self._lock:
            # A retired generation's fault has been raised here already.
            if value is not None and generation == self.generation and self._open:
                if self._fault is None:
                    self._fault, self._fault_read_at = Fault.from_json(value), time.monotonic()
                    if self._fault.kind == "timeout" and self.rank in (self._fault.ranks or range(self.world_size)):
                        write_stacks(self.rank)
                if self.communicator is not None:
                    self.communicator.abort_word.set()  # the main thread may itself be waiting for the device

    # Status and heartbeats

    def publish_record(self) -> None:
        self.store.set(f"record/{self.rank}", self.record.to_json())

    def records(self) -> list[dict[str, Any] | None]:
        """Latest record of every rank; None for one that has not started."""
        return [self.store.find(f"record/{rank}") for rank in range(self.world_size)]

    def stale_ranks(self, limit_s: float) -> tuple[int, ...]:
        """Other ranks whose heart has not beaten for ``limit_s``."""
        return self._hearts.stale(limit_s)

    def busy_ranks(self) -> tuple[int, ...]:
        """Other ranks that live but do not wait for anybody."""
        return self._hearts.busy()

    def lost_ranks(self) -> tuple[int, ...]:
        """Other ranks of this machine whose process has ended."""
        return self._hearts.lost()

    def _watch(self) -> None:
        """The monitor thread."""
        next_beat = 0.0
        while not self._closing.wait(_FAULT_POLL_S):
            try:
                self._report_lost_ranks()
                self._read_fault(self.generation)
                self._free_device()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    self._hearts.beat(waiting=time.monotonic() - self._waited_at < BEAT_S)
                    self.publish_record()
            except RuntimeError as error:
                self._store_lost = f"rank {self.rank} lost the launch's store ({error}); the launcher has ended"
                return

    def _free_device(self) -> None:
        """Where the main thread does not leave after a fault, it waits for a device that waits for a peer."""
        with self._lock:
            communicator, read_at = self.communicator, self._fault_read_at
        if communicator is None:
            return
        # Of a device that is broken the main thread will tell.
        with suppress(RuntimeError):
            communicator.free_overdue_device()
            if read_at and time.monotonic() - read_at > _LEAVING_S:
                communicator.free_device()

    def _report_lost_ranks(self) -> None:
        """A killed process tells nobody; its connections break, but one awaited in the store has none."""
        lost = self.lost_ranks()
        with self._lock:
            generation, due = self.generation, self._open and self._fault is None
        if lost and due:
            fault = self.fault("failed", lost, "the process has ended")
            self.store.set_first(f"fault/{generation}", fault.to_json())
