"""Waits that are never stuck behind a peer: for a collective of gloo and for the device. Both look for faults of peers and have a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

_POLL = timedelta(milliseconds=250)
# How often the host looks whether the device has got so far, and whether a peer has failed.
_DEVICE_POLL_S = 0.0002
_FAULT_CHECK_S = 0.25


class CollectiveError(RuntimeError):
    """A collective was used wrongly or lost a peer; the message names phase, role and site."""


class CollectiveTimeout(CollectiveError):
    """A peer did not join a collective in time."""


def await_work(work: dist.Work, site: str, *, timeout_s: float, fault_check: Callable[[], None]) -> None:
    """``fault_check`` raises when a peer has failed meanwhile.

    Raises:
        CollectiveTimeout: a peer stayed away although nobody has said that it failed.
        CollectiveError: a peer left.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            work.wait(_POLL)
            return
        except RuntimeError as error:
            fault_check()
            if work.is_completed():
                _settle(work, site)
                return
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"a peer did not join the collective at {site} within {timeout_s:.0f} s") from error


def _settle(work: dist.Work, site: str) -> None:
    """The outcome of completed work. It may have completed well just after a poll gave up, so the poll's own error says nothing."""
    try:
        work.wait()
    except RuntimeError as error:
        raise CollectiveError(f"a peer left the collective at {site}: {str(error).splitlines()[0]}") from error


def await_event(event: torch.cuda.Event, what: str, *, timeout_s: float, fault_check: Callable[[], None]) -> None:
    """Until the device has reached ``event``. Raises what ``fault_check`` raises, and CollectiveTimeout as :func:`await_work`."""
    began = asked = time.monotonic()
    while not event.query():
        time.sleep(_DEVICE_POLL_S)
        now = time.monotonic()
        if now - asked > _FAULT_CHECK_S:
            fault_check()
            asked = now
        if now - began > timeout_s:
            raise CollectiveTimeout(f"the device did not finish {what} within {timeout_s:.0f} s")
