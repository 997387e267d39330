"""What rank 0 asks of the launcher when a process hangs for ever: to end it, so that all ranks are started again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from .store import JsonStore

_KEY = "hung"


@dataclass(frozen=True)
class HungRank:
    """``pid``: on the rank's own machine. ``silent_s``: how long its heart has not beaten, at least."""

    rank: int
    pid: int
    silent_s: float


def ask_to_end(store: JsonStore, hung: Iterable[HungRank]) -> None:
    """``store``: the launch's, above its restarts."""
    store.set(_KEY, [asdict(one) for one in hung])


def asked_to_end(store: JsonStore) -> list[HungRank]:
    """The last request, until it is forgotten."""
    return [HungRank(int(one["rank"]), int(one["pid"]), float(one["silent_s"])) for one in store.find(_KEY) or []]


def forget_request(store: JsonStore) -> None:
    """For the launcher, which has read it."""
    store.set(_KEY, [])
