"""Ranks: what every process of the launch is doing, and the two things a user may do to all of them."""

from __future__ import annotations

import os
import threading
from typing import Any

from ..models.hunyuan_image_3.operations import MODEL
from . import host_compat, inputs
from .driver import Driver, process_driver
from .engine_handle import UNKNOWN_NODE
from .guard import read_status

ACTIONS = ("status", "free memory", "restart")

RESTART_EXIT_CODE = 75
RESTART_DELAY_S = 2.0
"""Long enough for this prompt to end and its answer to reach the page before the process does."""


class HunyuanImage3Ranks:
    DESCRIPTION = (
        "Shows each rank's device, memory and work. 'free memory' unloads the model on all ranks; 'restart' "
        "ends all ranks and has the "
        "launcher start them again."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("report",)
    OUTPUT_TOOLTIPS = ("One line per rank.",)
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
    """One line for the launch and one per rank, for people."""
    lines = [status["plan"] or "no model has been loaded yet"]
    for rank, record in enumerate(status["ranks"]):
        if record is None:
            lines.append(f"rank {rank}: not started; see its log or restart the launch")
            continue
        silent = " (silent)" if rank in status["silent"] else ""
        lines.append(f"rank {rank}: {record['device']}, {_memory(record['memory'])}, {_work(record)}{silent}")
    return "\n".join(lines)


def _memory(memory: dict[str, int]) -> str:
    host = f"{memory['resident_set'] / 1e9:.1f} GB host memory"
    if "device_allocated" not in memory:
        return host
    used, free = memory["device_allocated"] / 1e9, memory["device_free"] / 1e9
    return f"{used:.1f} GB on the GPU ({free:.1f} GB free), {host}"


def _work(record: dict[str, Any]) -> str:
    if record["error"]:
        return f"last error: {record['error']}"
    work = record["phase"]
    if record["total"]:
        work += f" {record['done']}/{record['total']}"
    if record["tokens_per_s"]:
        work += f", {record['tokens_per_s']:.1f} tokens/s"
        if record["text_path"]:
            work += f" ({record['text_path']})"
    if record["s_per_step"]:
        work += f", {record['s_per_step']:.2f} s/step"
    return work
