"""Watch the ranks come up: a rank is ready when its ComfyUI answers. Runs in a thread beside the agent."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..parallel.stacks import ask_for_stacks
from .http_json import Refused, get_json
from .machine_watch import MachineWatch
from .records import LaunchRecord, RankEntry

POLL_S = 0.3
# Four ranks on two cores import torch and ComfyUI in about 30 s; a slow disk or a cold cache takes several
# times that.
START_TIMEOUT_S = 600.0
STACKS_S = 0.5
"""What a rank needs to write its stacks, and the agent to show them."""

STATUS_ROUTE = "/phase_parallel/status"


def answers(url: str) -> bool:
    """True when a ComfyUI is up there."""
    try:
        get_json(url + "/system_stats")
    except Refused as refusal:
        return refusal.status == 403  # a worker answers nobody without the secret
    except (OSError, ValueError):
        return False
    return True


def pack_is_loaded(url: str) -> bool:
    """True when the ComfyUI there has loaded this pack (ComfyUI goes on without a pack that fails to
    import).
    """
    try:
        get_json(url + STATUS_ROUTE)
    except Refused as refusal:
        return refusal.status != 404
    return True


class ReadinessWatch(threading.Thread):
    """Keeps the record up to date; `failure` is set, and the agent told to stop, when the ranks do not come
    up.

    urls: of this machine's ranks.  elsewhere: the launch is ready when its other machines are.
    """

    def __init__(
        self,
        record: LaunchRecord,
        say: Callable[[str], None],
        *,
        urls: Mapping[int, str],
        elsewhere: MachineWatch | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        super().__init__(name="readiness", daemon=True)
        self.failure: str | None = None
        self._record = record
        self._say = say
        self._urls = urls
        self._elsewhere = elsewhere
        self._timeout_s = timeout_s
        self._run_folder = Path(record.run_folder)
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        self.join(timeout=15)

    def run(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._stopped.wait(POLL_S):
            if self._notice_restart():
                deadline = time.monotonic() + self._timeout_s
            if self._record.state == "ready":
                continue
            self._look_for_new_ones()
            if all(entry.ready for entry in self._record.ranks):
                self._become_ready()
            elif time.monotonic() > deadline:
                self._give_up_waiting([entry for entry in self._record.ranks if not entry.ready])

    def _reports(self) -> dict[int, dict[str, int]]:
        """What rank.py wrote about each rank that has begun: its process id and how often the ranks were
        restarted.
        """
        found = {}
        for entry in self._record.ranks:
            path = self._run_folder / f"rank{entry.rank}.json"
            if path.exists():
                found[entry.rank] = json.loads(path.read_text())
        return found

    def _notice_restart(self) -> bool:
        newest = max((report["restart"] for report in self._reports().values()), default=0)
        if newest <= self._record.restarts:
            return False
        self._record.restarts = newest
        self._record.state = "starting"
        for entry in self._record.ranks:
            entry.ready, entry.pid = False, None
        self._record.write()
        self._say(f"A rank failed: all ranks are started again (restart {newest}).")
        return True

    def _look_for_new_ones(self) -> None:
        reports = self._reports()
        for entry in self._record.ranks:
            report = reports.get(entry.rank)
            # A report of an earlier attempt names a process that is gone.
            if entry.ready or report is None or report["restart"] != self._record.restarts:
                continue
            entry.pid = report["pid"]
            if answers(self._urls[entry.rank]):
                entry.ready = True
                self._record.write()
                self._say(f"rank {entry.rank} is ready on port {entry.port} (process {entry.pid})")

    def _become_ready(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.tell_ready()
            if not self._elsewhere.all_ready():
                return
        try:
            loaded = 0 not in self._urls or pack_is_loaded(self._urls[0])
        except OSError:
            return  # busy or gone again: the next look decides
        if not loaded:
            self._give_up(
                "ComfyUI runs on rank 0 but could not load this pack; its lines above name the error."
            )
            return
        (self._run_folder / "ready").touch()
        self._record.state = "ready"
        self._record.write()
        self._say(f"Ready: {self._record.url}")

    def _give_up_waiting(self, late: list[RankEntry]) -> None:
        if any([ask_for_stacks(entry.pid) for entry in late if entry.pid is not None]):
            self._stopped.wait(STACKS_S)
        who = ", ".join(str(entry.rank) for entry in late)
        self._give_up(f"Rank {who} did not answer within {self._timeout_s:.0f} s of its start; see its lines above.")

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._stopped.set()
        os.kill(os.getpid(), signal.SIGTERM)  # the agent ends the ranks on it
