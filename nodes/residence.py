"""Our weights in ComfyUI's memory management, so that "unload models" and "free memory" reach all ranks.

ComfyUI frees what stands in its list of loaded models. The weights of a checkpoint belong to the engines of all
ranks and are no module here, so rank 0 puts one entry into that list that stands for all of them: when ComfyUI
unloads it, for the button or because it needs the memory, every rank unloads. The next call loads again.
"""

from __future__ import annotations

import logging
import threading

from ..models.hunyuan_image_3.operations import MODEL
from . import host_compat
from .driver import Driver
from .engine_handle import UNKNOWN_NODE

_log = logging.getLogger(__name__)


class Residence:
    """The entry of this process. All methods run on ComfyUI's executor thread, as its memory management does."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._listed = False
        self.patcher = host_compat.standing_patcher(self._unlisted)

    def hold(self) -> None:
        """The weights are resident, or will be in a moment: stand in ComfyUI's list."""
        if not self._listed:
            host_compat.load_into_management(self.patcher)
            self._listed = True

    def _unlisted(self) -> None:
        """ComfyUI has taken the entry from its list."""
        if not self._listed:
            return
        self._listed = False
        try:
            self._driver.call(f"{MODEL}.unload", {}, {}, node_id=UNKNOWN_NODE)
        except Exception as error:
            if self._driver.is_running:
                raise
            # Between prompts ComfyUI's only executor thread would end with this error, whatever it is, and its queue with it.
            _log.error("The weights were not unloaded on all ranks: %s", error, exc_info=not isinstance(error, RuntimeError))


_process_lock = threading.Lock()
_process_residence: Residence | None = None


def process_residence(driver: Driver) -> Residence:
    """The entry of this process, made at the first loader that works; ``driver`` is the one of this process."""
    global _process_residence
    with _process_lock:
        if _process_residence is None:
            _process_residence = Residence(driver)
        return _process_residence
