"""Role-tagged, fail-closed collectives: the only module that moves tensors between ranks.

A row-parallel product is a :class:`Partial`, which only :meth:`PhaseView.row_reduce` opens. Every call names a role and a site; a role that the
active phase does not own, a wrong gather order, or another number of calls than one forward makes is an error on the rank that made it, and the
:class:`~.ledger.Ledger` digest lets ranks find out that they differ. Bias, where a model has one, is added once, after the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from .abort_word import AbortWord
from .device_watch import DeviceWatch
from .groups import ProcessGroups
from .ledger import Ledger, Role, exactly
from .plan import ParallelPlan
from .topology import Phase, Topology
from .waiting import CollectiveError, await_event, await_work

OWN_LIMIT_FIRST_S = 2.0
"""The main thread's own limit comes first, where it has one: it knows better what it waits for."""

PHASE_ROLES: Mapping[Phase, frozenset[Role]] = {
    "prefill": frozenset({"row_reduce", "vocab_gather", "broadcast"}),
    "decode": frozenset({"row_reduce", "vocab_gather", "broadcast"}),
    "denoise": frozenset({"row_reduce", "seq_to_heads", "heads_to_seq", "kv_gather", "seq_gather", "cfg_gather", "broadcast"}),
}


class Partial:
    """An unreduced row-parallel product, one summand per tensor-parallel rank. Only a reducing collective opens it."""

    __slots__ = ("_summand", "site")

    def __init__(self, summand: torch.Tensor, site: str):
        if not site:
            raise CollectiveError("a partial product without a site cannot be traced; name the projection it comes from")
        self._summand = summand
        self.site = site

    def __add__(self, other: Partial) -> Partial:
        """Two summands of one later reduction, for example routed and shared experts."""
        if not isinstance(other, Partial):
            raise CollectiveError(f"{self.site} is not reduced yet and {type(other).__name__} is; call row_reduce first")
        return Partial(self._summand + other._summand, self.site)

    def extend(self, add: Callable[[torch.Tensor], torch.Tensor]) -> Partial:
        """The summand with another one of the same reduction added to it by a kernel; ``add`` must return an unreduced summand too."""
        return Partial(add(self._summand), self.site)

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> None:
        flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else (arg,))]
        site = next((item.site for item in flat if isinstance(item, Partial)), "a projection")
        raise CollectiveError(f"{site} is an unreduced partial product and reached {getattr(func, '__name__', func)}; call row_reduce first")

    def __getattr__(self, name: str) -> object:
        raise CollectiveError(f"{self.site} is an unreduced partial product and has no {name}; call row_reduce first")


class Communicator:
    """This rank's collectives under one plan. ``fault_check`` raises when a peer has published a fault; waits call it every 250 ms.

    ``abort_word`` is for kernels that wait for peers themselves, and is set when a peer has failed.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        groups: ProcessGroups,
        *,
        timeout_s: float = 60.0,
        fault_check: Callable[[], None] = lambda: None,
    ):
        self.plan = plan
        self.groups = groups
        self.timeout_s = timeout_s
        self.fault_check = fault_check
        self.ledger = Ledger()
        self.abort_word = AbortWord(pinned=groups.backend == "nccl" and torch.cuda.is_available())
        self._device = DeviceWatch()
        self.gave_up = False
        """The device waited too long for a peer and was freed: what it has computed since is worthless."""
        self._views = {phase: PhaseView(self, plan.topology(phase)) for phase in PHASE_ROLES}

    def phase(self, phase: Phase) -> PhaseView:
        """The immutable view of one phase. Views are made once; taking one creates no group and allocates nothing."""
        return self._views[phase]

    def denoise_as(self, plan: ParallelPlan) -> None:
        """From now on denoise has the topology of ``plan``, which keeps the same weights on the same ranks: its groups are there already."""
        self.plan, self._views["denoise"] = plan, PhaseView(self, plan.topology("denoise"))

    def control_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Host-side all-gather of a few int64 over all ranks, by rank; the basis of keys, stop words and digests."""
        if self.plan.world_size == 1:
            return [list(values)]
        mine = torch.tensor(list(values), dtype=torch.int64)
        out = [torch.empty_like(mine) for _ in range(self.plan.world_size)]
        self.wait(dist.all_gather(out, mine, group=self.groups.control, async_op=True), "control")
        return [t.tolist() for t in out]

    def broadcast(self, tensor: torch.Tensor, site: str, phase: Phase | None = None) -> torch.Tensor:
        """Rank 0's ``tensor`` on every rank, in place; dtype and shape must already agree."""
        self.ledger.record(phase or "section", "broadcast", site, tensor.shape, str(tensor.dtype))
        if self.plan.world_size == 1:
            return tensor
        group = self.groups.for_ranks(tuple(range(self.plan.world_size))) if tensor.is_cuda else self.groups.control
        self.wait(dist.broadcast(tensor, src=0, group=group, async_op=True), site)
        return tensor

    def sum(self, summand: torch.Tensor, ranks: tuple[int, ...], site: str) -> torch.Tensor:
        """Sum over ``ranks``, the same bits on all of them; ``summand`` may be overwritten.

        On gloo the summands are gathered and added in the order of ``ranks``, so that the sum does not depend on a ring's schedule.
        """
        if len(ranks) == 1:
            return summand
        if self.groups.backend == "nccl":
            self.wait(dist.all_reduce(summand, group=self.groups.for_ranks(ranks), async_op=True), site)
            return summand
        chunks = self.gather(summand.contiguous(), ranks, site)
        total = chunks[0].clone()
        for chunk in chunks[1:]:
            total += chunk
        return total

    def gather(self, tensor: torch.Tensor, ranks: tuple[int, ...], site: str) -> list[torch.Tensor]:
        """Chunks of all ``ranks`` in that order (not in the group's physical order)."""
        if len(ranks) == 1:
            return [tensor]
        group = self.groups.for_ranks(ranks)
        chunks = [torch.empty_like(tensor) for _ in ranks]
        self.wait(dist.all_gather(chunks, tensor, group=group, async_op=True), site)
        physical = sorted(ranks)
        return [chunks[physical.index(rank)] for rank in ranks]

    def all_to_all(self, chunks: torch.Tensor, ranks: tuple[int, ...], site: str) -> torch.Tensor:
        """``chunks[i]`` goes to ``ranks[i]``; result ``[i]`` came from ``ranks[i]``. ``ranks`` is ascending."""
        out = torch.empty_like(chunks)
        self.wait(dist.all_to_all_single(out, chunks, group=self.groups.for_ranks(ranks), async_op=True), site)
        return out

    def wait(self, work: dist.Work, site: str) -> None:
        """NCCL orders streams; on gloo the host waits here."""
        if self.groups.backend == "nccl" and site != "control":
            work.wait()
            self._device.issued()
        else:
            await_work(work, site, timeout_s=self.timeout_s, fault_check=self.fault_check)

    def await_event(self, event: torch.cuda.Event, what: str) -> None:
        """Wait until the device has reached ``event``; NCCL's kernels know no limit of their own. Raises as :func:`.waiting.await_event`."""
        await_event(event, what, timeout_s=self.timeout_s, fault_check=self.fault_check)

    def await_device(self, what: str) -> None:
        """As ``await_event``, for all that this rank's device has been told to do. Before the host reads a result that peers take part in: reading
        waits too, but without looking at the peers. On gloo the host has waited already, and a rank alone may take its time."""
        if self.groups.backend == "nccl" and self.plan.world_size > 1:
            event = torch.cuda.Event()
            event.record()
            self.await_event(event, what)

    def free_overdue_device(self) -> None:
        """For the monitor thread: the main thread may wait for its device, and the device for a peer that never comes."""
        if self.groups.backend == "nccl" and self._device.overdue(self.timeout_s + OWN_LIMIT_FIRST_S):
            self.gave_up = True
            self.free_device()

    def free_device(self) -> None:
        """What waits for a peer on this rank's device ends; any thread may call it."""
        self.abort_word.set()
        self.groups.end_kernels()

    def destroy(self) -> None:
        """Of a communicator whose ranks have left it together."""
        self.groups.destroy()

    def abort(self) -> None:
        """As ``destroy``, after a fault: what waits for a peer on this rank's device ends too."""
        self.abort_word.set()
        self.groups.abort()


class PhaseView:
    """What a forward pass may communicate in one phase: its topology and the collectives of the roles that the phase owns."""

    def __init__(self, comm: Communicator, topology: Topology):
        self.comm = comm
        self.topology = topology
        self.phase: Phase = topology.phase

    def _record(self, role: Role, site: str, tensor: torch.Tensor, order: Sequence[int] = (), *, alone: bool = False) -> None:
        """``alone``: in a group of one rank."""
        if role not in PHASE_ROLES[self.phase]:
            owners = [phase for phase, roles in PHASE_ROLES.items() if role in roles]
            raise CollectiveError(f"{site}: role {role} does not belong to phase {self.phase}; it belongs to {', '.join(owners)}")
        # Relative places, because ranks of other groups make the same gather over other physical ranks.
        relative = [sorted(order).index(rank) for rank in order]
        self.comm.ledger.record(self.phase, role, site, tensor.shape, str(tensor.dtype), relative, alone=alone)

    def forward(self, expected: Mapping[Role, int], name: str) -> AbstractContextManager[None]:
        """Body must make exactly ``expected`` collectives of each role; another number raises, naming the roles."""
        return exactly(self.comm.ledger, expected, f"{name} in phase {self.phase}")

    def row_reduce(self, partial: Partial) -> torch.Tensor:
        """Sum of a partial product over the tensor-parallel group; identical bits on all its ranks."""
        summand = self._open(partial)
        return self.comm.sum(summand, self.topology.tp_ranks, partial.site)

    def row_reduce_with(self, partial: Partial, reduce: Callable[[torch.Tensor], None]) -> None:
        """The sum as somebody else's kernel makes it: ``reduce`` gets the summand and must reduce it over the tensor-parallel group."""
        reduce(self._open(partial))

    def _open(self, partial: Partial) -> torch.Tensor:
        if not isinstance(partial, Partial):
            raise CollectiveError(
                f"row_reduce got a {type(partial).__name__}, not a partial product; a column-parallel or reduced tensor must not be summed again"
            )
        # Ranks compare what they exchange, and a rank without peers exchanges nothing.
        self._record("row_reduce", partial.site, partial._summand, alone=self.topology.tp_size == 1)
        return partial._summand

    def vocab_gather(self, logits: torch.Tensor, site: str, *, order: tuple[int, ...]) -> torch.Tensor:
        """``[T, V/tp]`` on each rank -> ``[T, V]``, vocabulary rows in logical rank order, which the caller states."""
        self._require_order(order, self.topology.tp_ranks, site)
        self._record("vocab_gather", site, logits, order)
        return torch.cat(self.comm.gather(logits.contiguous(), order, site), dim=-1)

    def vocab_gather_into(self, logits: torch.Tensor, out: torch.Tensor, site: str, *, order: tuple[int, ...]) -> None:
        """``[V/tp]`` on each rank into ``out [V]``, in the logical rank order that the caller states; allocates nothing that outlives a graph."""
        self._require_order(order, self.topology.tp_ranks, site)
        self._record("vocab_gather", site, logits, order)
        torch.cat(self.comm.gather(logits, order, site), out=out)

    def vocab_gather_with(self, mine: torch.Tensor, site: str, gather: Callable[[], None], *, order: tuple[int, ...]) -> None:
        """As somebody else's kernel does it: ``mine [V/tp]`` is this rank's place in the vector that ``gather`` completes."""
        self._require_order(order, self.topology.tp_ranks, site)
        self._record("vocab_gather", site, mine, order)
        gather()

    def seq_to_heads(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """Ulysses, first half: ``[T/sp, heads, …]`` -> ``[T, heads/sp, …]``; ``heads`` counts what travels together (KV groups)."""
        self._record("seq_to_heads", site, x)
        sp = self.topology.sp_size
        if sp == 1:
            return x
        rows, heads = x.shape[:2]
        chunks = x.reshape(rows, sp, heads // sp, *x.shape[2:]).transpose(0, 1).contiguous()
        return self.comm.all_to_all(chunks, self.topology.sp_ranks, site).flatten(0, 1)

    def heads_to_seq(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """Ulysses, second half: ``[T, heads/sp, …]`` -> ``[T/sp, heads, …]``."""
        self._record("heads_to_seq", site, x)
        sp = self.topology.sp_size
        if sp == 1:
            return x
        rows, heads = x.shape[:2]
        chunks = x.reshape(sp, rows // sp, heads, *x.shape[2:]).contiguous()
        out = self.comm.all_to_all(chunks, self.topology.sp_ranks, site)
        return out.transpose(0, 1).reshape(rows // sp, sp * heads, *x.shape[2:])

    def kv_gather(self, kv: torch.Tensor, site: str, *, order: tuple[int, ...]) -> torch.Tensor:
        """``[T/sp, …]`` -> ``[T, …]`` over the sequence-parallel group."""
        return self._sequence("kv_gather", kv, site, order)

    def seq_gather(self, hidden: torch.Tensor, site: str, *, order: tuple[int, ...]) -> torch.Tensor:
        """``[T/sp, H]`` -> ``[T, H]`` over the sequence-parallel group."""
        return self._sequence("seq_gather", hidden, site, order)

    def _sequence(self, role: Role, x: torch.Tensor, site: str, order: tuple[int, ...]) -> torch.Tensor:
        self._require_order(order, self.topology.sp_ranks, site)
        self._record(role, site, x, order)
        if len(order) == 1:
            return x
        return torch.cat(self.comm.gather(x.contiguous(), order, site), dim=0)

    def replica_kv_gather(self, kv: torch.Tensor, site: str) -> list[torch.Tensor]:
        """KV of one row from every replica of this rank's shard, by micro shard; fetches the heads that decode left with the partners."""
        ranks = self.comm.plan.replica_ranks
        self._record("kv_gather", site, kv, ranks)
        return self.comm.gather(kv.contiguous(), ranks, site)

    def cfg_gather(self, prediction: torch.Tensor, site: str, *, order: tuple[int, ...]) -> torch.Tensor:
        """``[rows/cfg, …]`` -> ``[rows, …]``, branch 0 (conditional) first."""
        self._require_order(order, self.topology.cfg_ranks, site)
        self._record("cfg_gather", site, prediction, order)
        if len(order) == 1:
            return prediction
        return torch.cat(self.comm.gather(prediction.contiguous(), order, site), dim=0)

    def _require_order(self, order: tuple[int, ...], expected: tuple[int, ...], site: str) -> None:
        if tuple(order) != expected:
            raise CollectiveError(f"{site}: gather order {tuple(order)} is not the {self.phase} order {expected}; take it from the topology")
