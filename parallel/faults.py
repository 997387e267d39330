"""What went wrong on one rank, in a form that every rank can tell in the same words.

The rank that notices first writes one :class:`Fault` into the store; all ranks raise the error made from it.
Imports the standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

FaultKind = Literal["failed", "timeout", "mismatch", "divergence"]


class SectionError(RuntimeError):
    """A section ended with an error on all ranks; ``str()`` is one sentence, the same on each of them."""

    def __init__(self, fault: Fault):
        super().__init__(fault.sentence())
        self.fault = fault


class RankFault(SectionError):
    """One rank failed; the sentence names it, the phase and the cause."""


class SectionTimeout(SectionError):
    """One or more ranks did not answer in time."""


class SectionMismatch(SectionError):
    """The ranks meant to run different sections, or the same one with different inputs or results."""


class CollectiveDivergence(SectionError):
    """The ranks made different collectives; the sentence names the first site that differs."""


class SharedSymptom(RuntimeError):
    """An error that every rank sees although one of them is its cause, such as NaN after a sum over the ranks."""


class SectionCancelled(Exception):
    """All ranks agreed to stop here. Not an error: process groups stay as they are and the next section can
    start.
    """


_ERRORS: dict[FaultKind, type[SectionError]] = {
    "failed": RankFault,
    "timeout": SectionTimeout,
    "mismatch": SectionMismatch,
    "divergence": CollectiveDivergence,
}


@dataclass(frozen=True)
class Fault:
    """``ranks``: those to blame, possibly none. ``site``: how far they got, for example ``step 3 of 50``."""

    kind: FaultKind
    ranks: tuple[int, ...]
    phase: str
    site: str
    message: str

    def sentence(self) -> str:
        where = f"{self.phase} ({self.site})" if self.site else self.phase
        if self.kind == "failed":
            when = "while idle" if self.phase == "idle" else f"in {where}"
            return f"{name_ranks(self.ranks)} failed {when}: {self.message}"
        if self.kind == "timeout":
            who = name_ranks(self.ranks) if self.ranks else "one of the other ranks"
            return f"{who} did not answer within {self.message} in {where}; see the log of that rank"
        return f"{self.message} in {where}"

    def error(self) -> SectionError:
        return _ERRORS[self.kind](self)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> Fault:
        if value["kind"] not in get_args(FaultKind):
            raise ValueError(
                f"unknown fault kind {value['kind']!r} in the store; all ranks must run the same pack"
            )
        return cls(value["kind"], tuple(value["ranks"]), value["phase"], value["site"], value["message"])


def name_ranks(ranks: tuple[int, ...]) -> str:
    """``rank 2``, ``ranks 1 and 3``, ``ranks 1, 2 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def describe_cause(error: BaseException) -> str:
    """One line from an exception: its message, with the type where the message alone says little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0].rstrip(".") if lines else ""
    name = type(error).__name__
    if "OutOfMemory" in name or isinstance(error, MemoryError) or "can't allocate memory" in first:
        # CUDA's line goes on about every process on the device.
        asked = ". ".join(first.split(". ")[:3])
        return f"out of memory ({asked})" if asked else "out of memory"
    if first and isinstance(error, (ValueError, RuntimeError, OSError)):
        return first
    return f"{name}: {first}" if first else name
