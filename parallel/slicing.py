"""The sharding table: every checkpoint key mapped to exactly one rule, and from there to slices of this rank's resident tensors.

A model declares its table (``models/<name>/sharding.py``); nobody else knows a key. The loader (:mod:`.checkpoint`) asks the table which part of which
key it needs and where that part goes. Sizes in, index tables out: no file, no process, no device.

Legend: S = storage_tp, M = micro_count (replicas in plan hybrid, else 1), N = S * M ranks of prefill and decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from .plan import ParallelPlan, PlanError

WeightRole = Literal["column_parallel", "row_parallel", "vocab_parallel", "replicated"]
Index = tuple[int | slice, ...]


class ShardingError(ValueError):
    """A key without a rule, a rule without a key, a wrong shape or a size that does not divide; the message names the key."""


@dataclass(frozen=True)
class Piece:
    """Copy ``checkpoint[key][source]`` to ``resident[target][index]``."""

    source: tuple[slice, ...]
    target: str
    index: Index


@dataclass(frozen=True)
class Target:
    """A resident tensor of this rank. ``kind`` picks its dtype (see the model's loader)."""

    shape: tuple[int, ...]
    kind: str
    role: WeightRole


@dataclass(frozen=True)
class Entry:
    """Rule for one key. No pieces: the key is known and not needed."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass
class ShardingTable:
    """Entries by checkpoint key and targets by resident name, for one rank of one plan."""

    plan: ParallelPlan
    entries: dict[str, Entry] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)

    def target(self, name: str, shape: Iterable[int], kind: str, role: WeightRole) -> str:
        if name in self.targets:
            raise ShardingError(f"resident tensor {name} is declared twice in the sharding table")
        self.targets[name] = Target(tuple(shape), kind, role)
        return name

    def entry(self, key: str, shape: Iterable[int], pieces: Iterable[Piece]) -> None:
        if key in self.entries:
            raise ShardingError(f"checkpoint key {key} has two rules in the sharding table; each key needs exactly one")
        self.entries[key] = Entry(tuple(shape), tuple(pieces))

    def unused(self, key: str, shape: Iterable[int]) -> None:
        """A key of the release that inference never reads."""
        self.entry(key, shape, ())

    def replicated(self, key: str, shape: tuple[int, ...], kind: str, *, target: str | None = None) -> None:
        name = self.target(target or key, shape, kind, "replicated")
        everything = tuple(slice(0, n) for n in shape)
        self.entry(key, shape, [Piece(everything, name, everything)])

    def column_parallel(self, key: str, shape: tuple[int, int], kind: str, *, target: str, role: WeightRole = "column_parallel") -> None:
        """Rows split over S; a micro view is a range of these rows. For fused QKV the rows are whole KV groups, in the checkpoint's order."""
        rows, columns = shape
        local = self.share(key, "rows", rows)
        name = self.target(target, (local, columns), kind, role)
        start = self.plan.shard * local
        self.entry(key, shape, [Piece((slice(start, start + local), slice(0, columns)), name, (slice(0, local), slice(0, columns)))])

    def row_parallel(self, key: str, shape: tuple[int, int], kind: str, *, target: str) -> None:
        """Columns split over S; a micro view is a strided range of columns."""
        rows, columns = shape
        local = self.share(key, "columns", columns)
        name = self.target(target, (rows, local), kind, "row_parallel")
        start = self.plan.shard * local
        self.entry(key, shape, [Piece((slice(0, rows), slice(start, start + local)), name, (slice(0, rows), slice(0, local)))])

    def gated_column_parallel(self, key: str, shape: tuple[int, int], kind: str, *, target: str) -> None:
        """Fused [up; gate] rows, each half split separately; resident rows are [up_0, gate_0, up_1, gate_1, …] by micro shard."""
        rows, columns = shape
        name = self.target(target, (rows // self.plan.storage_tp, columns), kind, "column_parallel")
        width = self.share(key, "rows of one half", rows // 2, over=self.plan.ar_tp)
        places = [(slice(2 * m * width, (2 * m + 1) * width), slice((2 * m + 1) * width, (2 * m + 2) * width)) for m in range(self.plan.micro_count)]
        columns_slice = slice(0, columns)
        self.gated_pieces(key, shape, name, [((up, columns_slice), (gate, columns_slice)) for up, gate in places])

    def gated_pieces(self, key: str, shape: tuple[int, int], target: str, places: list[tuple[Index, Index]]) -> None:
        """Entry for fused [up; gate] rows: ``places[m]`` are the resident indices of micro shard m's up and gate rows."""
        rows, columns = shape
        half = rows // 2
        width = self.share(key, "rows of one half", half, over=self.plan.ar_tp)
        pieces = []
        for micro, (up, gate) in enumerate(places):
            start = (self.plan.shard * self.plan.micro_count + micro) * width
            pieces.append(Piece((slice(start, start + width), slice(0, columns)), target, up))
            pieces.append(Piece((slice(half + start, half + start + width), slice(0, columns)), target, gate))
        self.entry(key, shape, pieces)

    def share(self, key: str, what: str, size: int, *, over: int | None = None) -> int:
        """``size / S`` (or ``/ over``)."""
        parts = over or self.plan.storage_tp
        if size % parts:
            raise PlanError(f"{key}: {size} {what} do not divide by {parts}; choose a plan with fewer ranks")
        return size // parts

    def check_keys(self, keys: Iterable[str]) -> None:
        """Every key of the checkpoint has a rule and every rule a key.

        Raises:
            ShardingError: names the first few keys on the wrong side.
        """
        found = set(keys)
        unknown = sorted(found - self.entries.keys())
        missing = sorted(self.entries.keys() - found)
        if unknown:
            raise ShardingError(
                f"the checkpoint has {len(unknown)} keys that this model does not know, first {_some(unknown)}; is it another model or release?"
            )
        if missing:
            raise ShardingError(f"the checkpoint lacks {len(missing)} keys that this model needs, first {_some(missing)}; download the missing files again")

    def check_shape(self, key: str, shape: Iterable[int]) -> None:
        wanted = self.entries[key].shape
        if tuple(shape) != wanted:
            raise ShardingError(f"{key} has shape {list(shape)} but config.json asks for {list(wanted)}; config and weights do not belong together")

    def bytes_resident(self, itemsize: Mapping[str, int]) -> int:
        """Bytes on this rank; ``itemsize`` gives the bytes per element of each kind."""
        return sum(prod(t.shape) * itemsize[t.kind] for t in self.targets.values())


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3])


def piece_elements(piece: Piece) -> int:
    return prod(s.stop - s.start for s in piece.source)
