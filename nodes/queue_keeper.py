"""Rank 0's queue survives when all ranks are started again: waiting prompts are put back, the one that ran is shown as failed.

ComfyUI keeps its queue in memory, and the ranks start again together when one of them is lost. The launcher's store lives on, so the queue is
copied there whenever it changes. Passwords and tokens of a prompt are not copied.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..parallel.environment import LaunchEnvironment
from ..parallel.faults import describe_cause
from ..parallel.store import JsonStore, StoreUnreachable

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_KEY = "queue"
_PLAIN_FIELDS = 5
"""Of a queue's item: number, prompt id, graph, extra data, outputs. What newer hosts append is secret."""
_SECRETS = frozenset({"auth_token_comfy_org", "api_key_comfy_org"})
"""Entries of the extra data that are secret; hosts that append them as a field of their own have taken them out."""

LOST = (
    "a rank was lost while this prompt ran, and all ranks were started again; queue it again if you still want it (the launcher's lines say which rank and why)"
)


class QueueKeeper:
    """Copies ``server``'s queue into the launch's store, and back after a restart."""

    def __init__(self, server: Any, environment: LaunchEnvironment) -> None:
        self._server = server
        self._restart = environment.restart_count
        # Not below the restart's own prefix: the copy is for the ranks that come after this one.
        self._store = JsonStore.tcp(environment.store_host, environment.store_port, environment.launch_id)
        self._copied: tuple[list[str], list[str]] | None = None
        """None: the first look writes, so that what an earlier life of this process left there is put back once only."""
        self._lock = threading.Lock()
        self._frozen = False
        self._in_front = False
        """Of what changes the queue: since it was frozen first."""
        self._held: list[Any] = []
        """Waiting prompts that were taken out of the queue since it is frozen; guarded by the queue's own lock."""
        self._begun: dict[Any, Any] = {}
        """Prompts that ran since then, by ComfyUI's number for the run: also those that have ended, since what ComfyUI knows of them ends with it."""
        self._told: set[str] = set()

    def start(self) -> None:
        """Call when the server starts, before it takes a prompt."""
        threading.Thread(target=self._keep, name="phase-parallel-queue", daemon=True).start()

    def _keep(self) -> None:
        closed = threading.Event()
        going = not self._restart or self._try(self._put_back, "the prompts that waited before the restart are not in the queue again")
        while going and not closed.wait(_LOOK_S):
            going = self._try(self._look, "the queue could not be copied for a restart, and is looked at again")

    def _try(self, action: Callable[[], None], failed: str) -> bool:
        """False when there is nowhere left to copy to. Whatever else goes wrong with one look may be right at the next."""
        try:
            action()
        except (StoreUnreachable, dist.DistError) as error:
            _log.warning("the queue is no longer kept: %s", error)
            return False
        except Exception as error:
            sentence = f"{failed}: {describe_cause(error)}"
            if sentence not in self._told:  # ten looks a second
                self._told.add(sentence)
                _log.exception("%s", sentence)
        return True

    def freeze(self) -> None:
        """A rank is lost, and in a moment all are ended and started again: nothing that waits, or comes until then, may start before that."""
        queue = self._server.prompt_queue
        with self._lock, queue.mutex:
            self._frozen = True
            if not self._in_front:
                self._in_front = True
                queue.put = functools.partial(self._put_or_hold, queue.put)
                queue.wipe_queue = functools.partial(self._wipe, queue.wipe_queue)
                queue.delete_queue_item = functools.partial(self._delete, queue.delete_queue_item)
        self._look()

    def thaw(self) -> None:
        """All ranks are there after all: what was taken out waits again."""
        queue = self._server.prompt_queue
        with self._lock, queue.mutex:
            if not self._frozen:
                return
            self._frozen = False
            for item in self._held:
                queue.put(item)
            self._held, self._begun = [], {}
        self._look()

    def _put_or_hold(self, put: Callable[[Any], None], item: Any) -> None:
        """In front of the queue's own ``put``: an executor that has nothing to do takes what is posted at once, long before the next look."""
        with self._server.prompt_queue.mutex:
            if self._frozen:
                self._held.append(item)
            else:
                put(item)

    def _wipe(self, wipe: Callable[[], None]) -> None:
        """Clear on the page, which shows nothing of what is held."""
        with self._server.prompt_queue.mutex:
            self._held = []
            wipe()

    def _delete(self, delete: Callable[[Callable[[Any], bool]], bool], wanted: Callable[[Any], bool]) -> bool:
        with self._server.prompt_queue.mutex:
            found = next((item for item in self._held if wanted(item)), None)
            if found is None:
                return delete(wanted)
            self._held.remove(found)
            return True

    def _look(self) -> None:
        """Write what runs and what waits, if that has changed."""
        with self._lock:
            running, waiting = self._hold() if self._frozen else self._read()
            ids = ([item[1] for item in running], [item[1] for item in waiting])
            if ids != self._copied:
                self._store.set(_KEY, {"running": _plain(running), "waiting": _plain(waiting)})
                self._copied = ids

    def _read(self) -> tuple[list[Any], list[Any]]:
        queue = self._server.prompt_queue
        with queue.mutex:
            return list(queue.currently_running.values()), _in_order(queue.queue)

    def _hold(self) -> tuple[list[Any], list[Any]]:
        """As ``_read``, of a frozen queue: what waits is taken out. The executor may be faster, and what it took will be cut off."""
        queue = self._server.prompt_queue
        with queue.mutex:  # one lock for all of it: what came in between would be in no place, or in two
            self._held += queue.queue
            queue.queue.clear()
            self._begun.update(queue.currently_running)
            ended = self._begun.keys() - queue.currently_running.keys()
            for run in [run for run in ended if _succeeded(queue.history.get(self._begun[run][1]))]:
                del self._begun[run]
        return list(self._begun.values()), _in_order(self._held)

    def _put_back(self) -> None:
        kept = self._store.find(_KEY)
        if kept is None:
            return
        queue = self._server.prompt_queue
        for item in kept["running"]:
            _log.error("prompt %s: %s", item[1], LOST)
            with queue.mutex:
                queue.history[item[1]] = {"prompt": tuple(item), "outputs": {}, "status": _failed(item[1])}
        for item in kept["waiting"]:
            self._server.number = max(self._server.number, item[0] + 1)
            # Hosts that have a sixth field read it without asking. One prompt that the host does not take must not hold back the others.
            self._try(functools.partial(queue.put, (*item, {})), f"prompt {item[1]} waited and could not be put back, queue it again")
        if kept["waiting"]:
            _log.info("%d waiting prompts are in the queue again", len(kept["waiting"]))


_process_keeper: QueueKeeper | None = None


def keep_queue(server: Any, environment: LaunchEnvironment) -> None:
    """Keep the queue of this process, rank 0, from now on."""
    global _process_keeper
    _process_keeper = QueueKeeper(server, environment)
    _process_keeper.start()


def freeze_queue() -> None:
    """A rank is lost; called before its user reads so, since the next prompt starts right behind."""
    if _process_keeper is not None:
        _process_keeper.freeze()


def thaw_queue() -> None:
    """The rank that was thought to be lost answers."""
    if _process_keeper is not None:
        _process_keeper.thaw()


def _plain(items: list[Any]) -> list[list[Any]]:
    plain = [list(item[:_PLAIN_FIELDS]) for item in items]
    for item in plain:
        item[3] = {name: value for name, value in item[3].items() if name not in _SECRETS}
    return plain


def _in_order(items: list[Any]) -> list[Any]:
    """As the executor takes them."""
    return sorted(items, key=lambda item: item[0])


def _succeeded(history: dict[str, Any] | None) -> bool:
    """Did a prompt that has ended do what it should? Its user has the result, and needs no sentence after the restart."""
    return bool(history and history["status"] and history["status"]["status_str"] == "success")


def _failed(prompt_id: str) -> dict[str, Any]:
    """A status as ComfyUI writes it for a prompt that ended with an error."""
    details = {"prompt_id": prompt_id, "node_id": "", "node_type": "", "executed": [], "exception_type": "RanksRestarted", "traceback": []}
    message = ["execution_error", {**details, "exception_message": LOST, "current_inputs": {}, "current_outputs": []}]
    return {"status_str": "error", "completed": False, "messages": [message]}
