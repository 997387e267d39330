"""Plans by their names on the command line, for programs whose ranks run without ComfyUI."""

from __future__ import annotations

from typing import Any

from ..parallel.plan import PLAN_NAMES
from .errors import LaunchError

# Name on the command line -> ranks, plan and the rest.
PRESETS: dict[str, dict[str, Any]] = {
    "single": {"ranks": 1, "plan": "single"},
    "tp2": {"ranks": 2, "plan": "tp"},
    "tp4": {"ranks": 4, "plan": "tp"},
    "hybrid-sp-ulysses": {"ranks": 4, "plan": "hybrid", "denoise": "sp", "attention": "ulysses"},
    "hybrid-sp-kv": {"ranks": 4, "plan": "hybrid", "denoise": "sp", "attention": "kv_gather"},
    "hybrid-cfg": {"ranks": 4, "plan": "hybrid", "denoise": "cfg"},
    "replicated-sp-ulysses": {"ranks": 4, "plan": "replicated", "denoise": "sp", "attention": "ulysses"},
    "replicated-sp-kv": {"ranks": 4, "plan": "replicated", "denoise": "sp", "attention": "kv_gather"},
    "replicated-cfg": {"ranks": 4, "plan": "replicated", "denoise": "cfg"},
}
_RANKS = {"single": 1, "tp": 2, "hybrid": 4, "replicated": 4}
MAXIMUM_RANKS = 64


def choose_preset(name: str, ranks: int | None, *, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """`ranks`, `plan` and, where the name says so, `denoise` and `attention`. `ranks` None: as many as the name means or the plan needs at least.

    Raises LaunchError for a name that is none of PRESETS and no plan's own (`also`: names that the caller knows besides), and for a number of ranks
    that no launch has.
    """
    if name not in PRESETS and name not in PLAN_NAMES:
        raise LaunchError(f"Plan {name!r} is unknown; choose one of {', '.join([*PRESETS, *PLAN_NAMES, *also])}.")
    chosen = PRESETS.get(name) or {"ranks": _RANKS[name], "plan": name}
    count = chosen["ranks"] if ranks is None else ranks
    if not 1 <= count <= MAXIMUM_RANKS:
        raise LaunchError(f"--ranks {count} is not possible; choose 1 to {MAXIMUM_RANKS}.")
    return {**chosen, "ranks": count}
