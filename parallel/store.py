"""Small JSON values shared by all ranks, over torch's TCPStore.

Nothing is pickled: a value that is not JSON is an error here, not code that runs elsewhere. One connection
per thread, because a client that waits inside the store blocks every other thread that shares it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_FIRST_POLL_S = 0.0005
_LAST_POLL_S = 0.02
_SOON_S = 0.1
"""A check costs 50 µs on loopback. Polling, because TCPStore.wait prints two warnings to stderr for every
wait that times out. For `_SOON_S` the pauses stay short: ranks meet several times in a step, and what comes
soon must not be seen late.
"""


class StoreUnreachable(RuntimeError):
    """The launcher's store does not answer."""


class StoreTimeout(RuntimeError):
    """Keys did not appear in time; ``missing`` are the ones that were not there."""

    def __init__(self, missing: Sequence[str], timeout_s: float):
        super().__init__(f"{', '.join(missing)} did not appear in the store within {timeout_s:g} s")
        self.missing = tuple(missing)


def _never() -> None:
    return None


class JsonStore:
    """JSON by key, below one prefix. Safe to use from several threads."""

    def __init__(self, connect: Callable[[], dist.Store], prefix: str):
        """``connect`` returns a connection that the calling thread may block in."""
        self._connect = connect
        self._prefix = prefix
        self._local = threading.local()

    @classmethod
    def tcp(cls, host: str, port: int, prefix: str, *, timeout_s: float = 30.0) -> JsonStore:
        """Client of the store that the launcher serves.

        Raises:
            StoreUnreachable: on first use, when nothing listens there.
        """

        def connect() -> dist.Store:
            try:
                # TCPStore prints a C++ stack trace when nobody listens; a plain connect fails in one line.
                socket.create_connection((host, port), timeout=timeout_s).close()
                return dist.TCPStore(
                    host, port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
                )
            except (OSError, RuntimeError) as error:
                raise StoreUnreachable(
                    f"the launch's store at {host}:{port} does not answer ({error}); "
                    "the launcher has ended, start again with `phase-parallel up`"
                ) from error

        return cls(connect, prefix)

    @classmethod
    def in_process(cls) -> JsonStore:
        """For a world of one."""
        shared = dist.HashStore()
        return cls(lambda: shared, "local")

    def connection(self) -> dist.Store:
        """A connection of its own, for process groups, which keep it for as long as they live."""
        return dist.PrefixStore(self._prefix, self._connect())

    def _store(self) -> dist.Store:
        if not hasattr(self._local, "store"):
            self._local.store = self.connection()
        return self._local.store

    def set(self, key: str, value: Any) -> None:
        self._store().set(key, json.dumps(value))

    def set_first(self, key: str, value: Any) -> Any:
        """Set unless some rank already did. Returns the value that stands: the same one on every rank that
        asks.
        """
        return json.loads(self._store().compare_set(key, "", json.dumps(value)))

    def find(self, key: str) -> Any | None:
        """The value, or None when there is none."""
        store = self._store()
        return json.loads(store.get(key)) if store.check([key]) else None

    def delete(self, key: str) -> None:
        self._store().delete_key(key)

    def collect(
        self, keys: Sequence[str], timeout_s: float | None, check: Callable[[], None] = _never
    ) -> list[Any]:
        """Wait until every key is there. ``check`` runs between polls and ends the wait by raising;
        ``timeout_s`` None waits for ever.

        Raises:
            StoreTimeout: names the keys that are missing.
        """
        store = self._store()
        start = time.monotonic()
        pause = _FIRST_POLL_S
        while not store.check(list(keys)):
            check()
            if timeout_s is not None and time.monotonic() - start > timeout_s:
                # The last may have come since the look above, which on a busy machine can lie seconds back.
                if missing := [key for key in keys if not store.check([key])]:
                    raise StoreTimeout(missing, timeout_s)
                break
            time.sleep(pause)
            if time.monotonic() - start > _SOON_S:
                pause = min(pause * 1.5, _LAST_POLL_S)
        return [json.loads(value) for value in store.multi_get(list(keys))]

    def wait(self, key: str, timeout_s: float | None, check: Callable[[], None] = _never) -> Any:
        return self.collect([key], timeout_s, check)[0]
