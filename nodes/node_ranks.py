"""Ranks: what every process of the launch is doing, and the two things a user may do to all of them."""

from __future__ import annotations

import os
import threading
from typing import Any

from ..models.hunyuan_image_3.operations import MODEL
from ..parallel.rank_words import error_lines, memory_words, phase_words, picture_words, place_words, text_words
from . import host_compat, inputs
from .driver import Driver, process_driver
from .engine_handle import UNKNOWN_NODE
from .status_routes import read_status

ACTIONS = ("status", "free memory", "restart")

RESTART_EXIT_CODE = 75
RESTART_DELAY_S = 2.0
"""Long enough for this prompt to end and its answer to reach the page before the process does."""


class HunyuanImage3Ranks:
    DESCRIPTION = (
        "Shows each rank's device, place in the plan, memory, work, speed and last error. 'free memory' unloads the model on all ranks; 'restart' "
        "ends all ranks and has the "
        "launcher start them again."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("report",)
    OUTPUT_TOOLTIPS = ("The plan, one line per rank, and the last errors.",)
    FUNCTION = "run"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "action": (
                    list(ACTIONS),
                    {
                        "default": ACTIONS[0],
                        "tooltip": "'status': only look. 'free memory': unload the model on all ranks; it "
                        "is loaded again when a node needs "
                        "it. 'restart': end all ranks, this ComfyUI included, and start them again; the "
                        "page reconnects by itself.",
                    },
                )
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def IS_CHANGED(cls, action: str, **hidden: Any) -> float:
        return float("nan")  # unequal to itself: the ranks' state is not among the inputs

    def run(self, action: str, unique_id: str | None = None) -> dict[str, Any]:
        driver = process_driver()
        if action == "free memory":
            driver.call(f"{MODEL}.unload", {}, {}, node_id=unique_id or UNKNOWN_NODE)
            host_compat.release_cached_memory()
        if action == "restart":
            _restart(driver)
        report = describe_ranks(read_status(driver.cluster))
        host_compat.show_text(report, unique_id)
        return {"ui": {"text": [report]}, "result": (report,)}


def _restart(driver: Driver) -> None:
    if driver.cluster.world_size == 1 and not driver.cluster.launch_id:
        raise ValueError(
            "This ComfyUI was not started by `phase-parallel up`, so nothing would start it again; restart "
            "it yourself."
        )
    timer = threading.Timer(RESTART_DELAY_S, os._exit, (RESTART_EXIT_CODE,))
    timer.daemon = True
    timer.start()


def describe_ranks(status: dict[str, Any]) -> str:
    """The plan, one line per rank, and the last errors, for people."""
    lines = [status["plan"] or "no model has been loaded yet"]
    for rank, record in enumerate(status["ranks"]):
        if record is None:
            lines.append(f"rank {rank}: not started; see its log or restart the launch")
            continue
        silent = "silent" if rank in status["silent"] else ""
        device = record["device_name"] or record["device"]
        text = " ".join(word for word in (text_words(record), f"({record['text_path']})" if record["text_path"] else "") if word)
        words = (device, place_words(record), phase_words(record), memory_words(record), text, picture_words(record), silent)
        lines.append(f"rank {rank}: " + "; ".join(word for word in words if word))
    return "\n".join(lines + error_lines(record for record in status["ranks"] if record is not None))
