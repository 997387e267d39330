"""A section: a stretch of work that all ranks enter together, may stop together, and leave with the same
result.

Ranks agree on the key through the store before any collective, so a missing rank is named instead of waited
for. Inside, one small gather per step carries rank 0's wish to cancel and the ledger's digest; at the end the
digests of the results are compared. However it ends, it ends on all ranks alike. Needs no ComfyUI: in SPMD
programs (check, tests, bench) every rank opens the section.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .cluster import Cluster
from .collectives import Communicator
from .diagnosis import let_go, share_fault, timeout_of
from .faults import SectionCancelled, SectionError, describe_cause, name_ranks
from .ledger import first_difference
from .plan import ParallelPlan
from .store import StoreTimeout, StoreUnreachable

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class SectionKey:
    """What makes the sections of two ranks the same one."""

    prompt_id: str
    node_id: str
    call: int
    inputs_digest: str

    def difference(self, other: SectionKey) -> str:
        """What ``other`` does instead, empty when the keys are equal."""
        if (self.prompt_id, self.node_id, self.call) != (other.prompt_id, other.node_id, other.call):
            return (
                f"is at node {other.node_id}, call {other.call}, not at node {self.node_id}, call {self.call}"
            )
        return "" if self == other else "has other inputs than rank 0"


def digest_of(values: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """32 hex digits over JSON ``values`` and the names, dtypes, shapes and bytes of ``tensors``. SHA-256, which processors compute in hardware: a step
    of a stock sampler hashes its latents and velocities.
    """
    total = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        total.update(f"|{name} {tensor.dtype} {tuple(tensor.shape)}|".encode())
        total.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:32]


def _halves(digest: str) -> tuple[int, int]:
    """Two signed 64-bit numbers, ready for the control gather."""
    raw = bytes.fromhex(digest.ljust(32, "0"))
    return int.from_bytes(raw[:8], "big", signed=True), int.from_bytes(raw[8:16], "big", signed=True)


class Section:
    """What an operation receives on every rank. Made by :func:`open_section`."""

    def __init__(
        self,
        cluster: Cluster,
        key: SectionKey,
        plan: ParallelPlan,
        cancelled: Callable[[], bool],
        report: Report | None,
    ):
        self.key = key
        self._plan = plan
        self.number = 0
        self.result_digest: str | None = None
        self._cluster = cluster
        self._cancelled = cancelled
        self._report = report
        self._comparisons = 0

    @property
    def communicator(self) -> Communicator:
        communicator = self._cluster.communicator
        assert communicator is not None, "a section has a communicator from its start to its end"
        return communicator

    def start_phase(self, phase: str, unit: str = "step") -> None:
        """Name what follows, in messages and times. ``unit``: what ``check`` counts, as for :meth:`RecordKeeper.start_phase`."""
        self._cluster.record.start_phase(phase, unit)

    def report(self, event: dict[str, Any]) -> None:
        """Progress, text or a preview for the user; only rank 0 has somebody to tell."""
        if self._report is not None and self._cluster.rank == 0:
            self._report(event)

    def check(self, done: int, total: int) -> None:
        """Call after each step, and every few tokens, with the same numbers on all ranks.

        Raises, on every rank at the same call: SectionCancelled when rank 0 wants to stop,
        CollectiveDivergence when the ranks have communicated differently. RankFault when a peer has failed.
        """
        self._cluster.record.progress(done, total)
        self._cluster.fault_check()
        stop = int(self._cluster.rank == 0 and self._cancelled())
        rows = self.communicator.control_gather([stop, *self.communicator.ledger.digest()])
        self._require_equal_ledgers([row[1:] for row in rows])
        if any(row[0] for row in rows):
            raise SectionCancelled(f"cancelled after {done} of {total}")

    def agree(self, what: str, digest: str) -> None:
        """All ranks hold the same ``what``; else SectionMismatch on all of them, naming who differs from rank
        0.
        """
        self._require_equal(what, self.communicator.control_gather(_halves(digest)))

    def exit(self, digest: str) -> None:
        """End the section: ranks compare what they communicated and the digest of their results. Call last,
        once.
        """
        self._cluster.fault_check()
        rows = self.communicator.control_gather([*_halves(digest), *self.communicator.ledger.digest()])
        self._require_equal_ledgers([row[2:] for row in rows])
        self._require_equal("result", [row[:2] for row in rows])
        self.result_digest = digest

    def _require_equal(self, what: str, rows: Sequence[Sequence[int]]) -> None:
        odd = tuple(rank for rank, row in enumerate(rows) if row != rows[0])
        if odd:
            verb = "has" if len(odd) == 1 else "have"
            message = f"{name_ranks(odd)} {verb} another {what} than rank 0"
            raise self._cluster.fail(self._cluster.fault("mismatch", odd, message))

    def _require_equal_ledgers(self, rows: Sequence[Sequence[int]]) -> None:
        self._comparisons += 1
        if all(row == rows[0] for row in rows):
            return
        keys = [f"tail/{self.number}/{self._comparisons}/{r}" for r in range(self._cluster.world_size)]
        self._cluster.store.set(keys[self._cluster.rank], self.communicator.ledger.tail())
        tails = self._collect(keys, "comparing collectives")
        odd = tuple(rank for rank, row in enumerate(rows) if row != rows[0])
        raise self._cluster.fail(self._cluster.fault("divergence", odd, first_difference(tails)))

    def _collect(self, keys: Sequence[str], doing: str) -> list[Any]:
        """Values of ``keys``, which end in the ranks that set them; a missing rank is named in a fault."""
        cluster = self._cluster
        try:
            return cluster.store.collect(keys, cluster.timeout_s, cluster.fault_check)
        except StoreTimeout as error:
            missing = tuple(int(key.rpartition("/")[2]) for key in error.missing)
            raise cluster.fail(timeout_of(cluster, missing, site=doing)) from error

    def _enter(self, number: int | None, generation: int | None) -> None:
        """The handshake. ``number`` and ``generation`` come from rank 0's announcement, if there is one."""
        cluster = self._cluster
        if number is None:
            self.number = cluster.next_section()
        else:
            self.number = number
            cluster.adopt_section(number)
        if cluster.rank == 0:
            generation = cluster.lead_generation(self._plan)
        elif generation is not None:
            cluster.adopt_generation(generation, self._plan)
        cluster.look_for_fault()
        keys = [f"enter/{self.number}/{rank}" for rank in range(cluster.world_size)]
        mine = {"key": asdict(self.key), "plan": _shared_plan(self._plan), "generation": generation, "groups": cluster.groups_from}
        cluster.store.set(keys[cluster.rank], mine)
        doing = f"entering node {self.key.node_id}, call {self.key.call}"
        if generation is None:
            cluster.adopt_generation(self._collect(keys[:1], doing)[0]["generation"], self._plan)
        entries = self._collect(keys, doing)
        self._compare_entries(entries)
        # Every rank has read the entries before the last one, else it could not have come here.
        cluster.store.delete(f"enter/{self.number - 2}/{cluster.rank}")
        # After a fault that not every rank has heard of, some have ended their groups and some have not.
        kept = {entry["groups"] for entry in entries}
        cluster.connect(self._meet, kept=len(kept) == 1 and kept != {0}).ledger.reset()

    def _meet(self) -> None:
        """The rendezvous of the groups waits for a rank without looking for its fault, so nobody goes there before all are here."""
        cluster = self._cluster
        keys = [f"meet/{cluster.generation}/{rank}" for rank in range(cluster.world_size)]
        cluster.store.set(keys[cluster.rank], True)
        self._collect(keys, "making the process groups")
        cluster.look_for_fault()  # of those who were here too, and have given up waiting for this rank
        # Who is here has left the meeting before this one.
        cluster.store.delete(f"meet/{cluster.generation - 1}/{cluster.rank}")

    def _compare_entries(self, entries: Sequence[dict[str, Any]]) -> None:
        lead = SectionKey(**entries[0]["key"])
        for rank, entry in enumerate(entries):
            difference = lead.difference(SectionKey(**entry["key"]))
            if not difference and entry["plan"] != entries[0]["plan"]:
                difference = f"uses plan {entry['plan']['name']}, rank 0 plan {entries[0]['plan']['name']}"
            if difference:
                raise self._cluster.fail(
                    self._cluster.fault("mismatch", (rank,), f"rank {rank} {difference}")
                )


def _shared_plan(plan: ParallelPlan) -> dict[str, Any]:
    """What the ranks' plans have in common."""
    return {name: value for name, value in asdict(plan).items() if name != "rank"}


def never_cancelled() -> bool:
    return False


@contextmanager
def open_section(
    cluster: Cluster,
    key: SectionKey,
    plan: ParallelPlan,
    *,
    phase: str,
    number: int | None = None,
    generation: int | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
    report: Report | None = None,
) -> Iterator[Section]:
    """Run the body on all ranks as one section. ``cancelled`` and ``report`` count on rank 0 only.

    Raises, on all ranks: SectionCancelled, or a SectionError with the same sentence. In a world of one an
    exception passes unchanged.
    """
    section = Section(cluster, key, plan, cancelled, report)
    cluster.record.start_section(phase, f"{key.prompt_id}/{key.node_id}")
    try:
        section._enter(number, generation)
        yield section
        if section.result_digest is None:
            section.exit("")
        _close(cluster, digest=section.result_digest)
    except SectionCancelled:
        _close(cluster)
        raise
    except (SectionError, StoreUnreachable) as error:
        let_go(error)
        cluster.retire()
        _close(cluster, error=error)
        raise
    except BaseException as error:
        if cluster.world_size == 1:
            _close(cluster, error=error)
            raise
        shared = share_fault(cluster, error)
        _close(cluster, error=shared)
        if not isinstance(error, Exception):
            raise
        # contextlib takes a RuntimeError that comes from a StopIteration for the generator's own end, and drops it.
        raise shared from (None if isinstance(error, StopIteration) else error)


def _close(cluster: Cluster, *, digest: str | None = None, error: BaseException | None = None) -> None:
    """Publish how the section ended. Without a store nobody could read it, and the error itself says that."""
    cluster.record.end_section(digest=digest, error=describe_cause(error) if error is not None else "")
    if not isinstance(error, StoreUnreachable):
        cluster.publish_record()
