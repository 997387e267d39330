"""The ledger: what a rank has communicated, as a rolling digest that ranks compare.

Two ranks that made the same calls in the same order with the same shapes have the same digest; comparing 16 bytes per step is enough to
stop a run that has diverged before it draws a wrong picture. The tail of recent entries names the first site that differs.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

from .waiting import CollectiveError

Role = Literal[
    "row_reduce",
    "vocab_gather",
    "seq_to_heads",
    "heads_to_seq",
    "kv_gather",
    "seq_gather",
    "cfg_gather",
    "broadcast",
    "halo_gather",
    "norm_gather",
    "picture_gather",
]
ROLES: tuple[Role, ...] = get_args(Role)


class Ledger:
    """Rolling digest, counts per role, and the last ``tail_length`` entries of one rank."""

    def __init__(self, tail_length: int = 512):
        self._tail: deque[str] = deque(maxlen=tail_length)
        self._apart: list[str] | None = None
        self.reset()

    def reset(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._tail.clear()
        self._length = 0
        self.counts: Counter[Role] = Counter()

    def record(
        self, phase: str, role: Role, site: str, shape: Sequence[int], dtype: str, order: Sequence[int] = (), *, alone: bool = False
    ) -> None:
        """``order``: the logical order of an ordered gather; two ranks that disagree on it diverge here, not in the picture. ``alone``: the rank has no
        peers there, so it is counted and not compared."""
        entry = f"{phase} {role} {site} {'x'.join(map(str, shape))} {dtype}"
        if order:
            entry += " order " + ",".join(map(str, order))
        if not alone:
            self._append(entry)
        self.counts[role] += 1

    def note(self, phase: str, what: str) -> None:
        """What all ranks must have in common although nobody sends it, such as the tokens that each rank looks up by itself.

        A sum over ranks with other tokens is wrong and yet equal on all of them, so no later comparison of results would show it.
        """
        self._append(f"{phase} takes {what}")

    @contextmanager
    def apart(self) -> Iterator[list[str]]:
        """What the body makes is counted as ever, and its entries go into the list: it is put down to be made later, with :meth:`repeat`."""
        outer, self._apart = self._apart, []
        try:
            yield self._apart
        finally:
            self._apart = outer

    def repeat(self, entries: Sequence[str]) -> None:
        """What was put down :meth:`apart` is made now."""
        for entry in entries:
            self._append(entry)

    def _append(self, entry: str) -> None:
        if self._apart is not None:
            self._apart.append(entry)
            return
        self._hash.update(entry.encode() + b"\n")
        self._tail.append(entry)
        self._length += 1

    def digest(self) -> tuple[int, int]:
        """Two signed 64-bit halves, ready for an int64 gather."""
        raw = self._hash.digest()
        return int.from_bytes(raw[:8], "big", signed=True), int.from_bytes(raw[8:], "big", signed=True)

    def tail(self) -> dict[str, object]:
        """``{"first": index of the first kept entry, "entries": [...]}``, JSON-ready."""
        return {"first": self._length - len(self._tail), "entries": list(self._tail)}


@contextmanager
def exactly(ledger: Ledger, expected: Mapping[Role, int], what: str) -> Iterator[None]:
    """Body must make exactly ``expected`` collectives of each role.

    Raises:
        CollectiveError: it made another number; names the roles.
    """
    before = ledger.counts.copy()
    yield
    made = ledger.counts.copy()
    made.subtract(before)
    wrong = [f"{role} {made[role]} instead of {expected.get(role, 0)}" for role in made if made[role] != expected.get(role, 0)]
    wrong += [f"{role} 0 instead of {n}" for role, n in expected.items() if n and role not in made]
    if wrong:
        raise CollectiveError(f"{what} made a wrong number of collectives: {', '.join(sorted(wrong))}")


def first_difference(tails: Sequence[dict]) -> str:
    """A sentence about the first entry where the ranks' tails differ; ``tails`` is ordered by rank."""
    start = max(int(tail["first"]) for tail in tails)
    rows = [tail["entries"][start - int(tail["first"]) :] for tail in tails]
    for index in range(max(len(row) for row in rows)):
        seen = [row[index] if index < len(row) else "nothing" for row in rows]
        if len(set(seen)) > 1:
            usual = Counter(seen).most_common(1)[0][0]
            odd = [f"rank {rank} made `{entry}`" for rank, entry in enumerate(seen) if entry != usual]
            return f"at collective {start + index} most ranks made `{usual}` but " + ", ".join(odd)
    return "the ranks differ before the entries that are still kept"
