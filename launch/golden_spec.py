"""What a ``case.json`` must hold, so that a damaged or foreign one ends in a sentence and not in the middle of a run."""

from __future__ import annotations

from typing import Any

TASKS = ("t2i", "ti2i", "ar_text", "auto_ratio", "modules")
KINDS = ("base", "instruct", "distil")
BOT_TASKS = ("image", "think", "recaption", "think_recaption", "img_ratio")
# Field -> types; None where null is allowed.
_COMMON: dict[str, tuple[type | None, ...]] = {"checkpoint": (str,), "task": (str,), "kind": (str,)}
_FULL: dict[str, tuple[type | None, ...]] = {
    "prompt": (str,),
    "system_prompt": (str, None),
    "cot_text": (str, None),
    "bot_task": (str,),
    "image_size": (str,),
    "input_images": (list,),
    "seed": (int,),
    "denoise": (bool,),
    "do_sample": (bool, None),
    "max_new_tokens": (int, None),
}
_DENOISE: dict[str, tuple[type | None, ...]] = {"steps": (int,), "guidance": (int, float), "flow_shift": (int, float)}
_CHOICES = {"task": TASKS, "kind": KINDS, "bot_task": BOT_TASKS}


class CaseError(ValueError):
    """A golden folder that cannot be read; the message names the case and the field."""


def check_spec(name: str, spec: Any) -> None:
    """Raises CaseError for a missing field, a value of another type, or a word that the format does not know."""
    if not isinstance(spec, dict):
        raise CaseError(f"case {name}: case.json does not hold an object; copy the case again")
    _require(name, spec, _COMMON)
    if spec["task"] != "modules":
        _require(name, spec, _FULL)
        if spec["denoise"]:
            _require(name, spec, _DENOISE)
        if not all(isinstance(image, str) for image in spec["input_images"]):
            raise CaseError(f"case {name}: input_images must be a list of file names")
    tolerances = spec.get("tolerances", {})
    numbers = isinstance(tolerances, dict) and all(
        _is_number(value) for pattern, value in tolerances.items() if pattern != "metric"
    )
    if not numbers:
        raise CaseError(f"case {name}: tolerances must map tensor names to numbers")
    if not isinstance(spec.get("expected", {}), dict):
        raise CaseError(f"case {name}: expected must be an object")


def _require(name: str, spec: dict[str, Any], fields: dict[str, tuple[type | None, ...]]) -> None:
    for field, types in fields.items():
        if field not in spec:
            raise CaseError(f"case {name}: case.json has no {field}; copy the case again")
        value = spec[field]
        if not any(value is None if kind is None else type(value) is kind for kind in types):
            raise CaseError(f"case {name}: {field} is {value!r}, which the format does not allow there")
        choices = _CHOICES.get(field)
        if choices and value not in choices:
            raise CaseError(f"case {name}: {field} {value!r} is unknown; the format knows {', '.join(choices)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
