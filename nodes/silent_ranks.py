"""A rank whose whole process hangs: rank 0 waits whether it comes back, else has the launcher end it, so that all ranks are started again.

From the prompt that it broke until that is decided nothing else starts, because every prompt would end on the same rank.
"""

from __future__ import annotations

import logging
import threading
import time

from ..parallel.cluster import Cluster
from ..parallel.environment import LaunchEnvironment
from ..parallel.faults import name_ranks
from ..parallel.heartbeat import BEAT_S
from ..parallel.hung_ranks import HungRank, ask_to_end
from ..parallel.store import JsonStore
from .queue_keeper import freeze_queue, thaw_queue

_log = logging.getLogger(__name__)
SILENCE_S = 2.5 * BEAT_S
_LOOK_S = 0.2
_ENDING_S = 30.0
"""The launcher ends a rank within a second, and then all of them within ten."""

OUTLOOK = "if it stays silent, the launcher ends it and starts all ranks again, and what waits in the queue is kept"


class SilentRanks:
    """Watches the ranks that do not answer, from the first failure on."""

    def __init__(self, cluster: Cluster, store: JsonStore):
        """``store``: the launch's, above its restarts."""
        self._cluster, self._store = cluster, store
        self._lock = threading.Lock()
        self._watching = False

    @classmethod
    def of_launch(cls, cluster: Cluster, environment: LaunchEnvironment) -> SilentRanks:
        return cls(cluster, JsonStore.tcp(environment.store_host, environment.store_port, environment.launch_id))

    def suspect(self) -> bool:
        """A prompt has failed. True when a rank is silent: it is watched from now on, and nothing starts until it is known what becomes of it."""
        if not self._cluster.stale_ranks(SILENCE_S):
            return False
        freeze_queue()
        with self._lock:
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="phase-parallel-silent", daemon=True).start()
        return True

    def _watch(self) -> None:
        try:
            # This process may itself have slept, and hears the others again only with its next heartbeat.
            time.sleep(2 * BEAT_S)
            while self._cluster.stale_ranks(SILENCE_S):
                hung = self._cluster.stale_ranks(self._cluster.timeout_s)
                if hung:
                    self._end(hung)
                    break
                time.sleep(_LOOK_S)
        except RuntimeError as error:  # the launcher has gone, and its store with it
            _log.warning("ranks that hang are no longer ended: %s", error)
        finally:
            with self._lock:
                self._watching = False
            thaw_queue()

    def _end(self, hung: tuple[int, ...]) -> None:
        """Returns only where the launcher has not done it: this process ends with the others."""
        records = self._cluster.records()
        limit = self._cluster.timeout_s
        _log.error("%s did not answer for %g s: the launcher is asked to end it and to start all ranks again", name_ranks(hung), limit)
        ask_to_end(self._store, [HungRank(rank, records[rank]["pid"], limit) for rank in hung if records[rank] is not None])
        time.sleep(_ENDING_S)
        _log.error("the launcher has not ended %s within %g s; restart the launch with `phase-parallel up`", name_ranks(hung), _ENDING_S)
