"""Guidance of distilled checkpoints, which is a number the model reads and not a second branch."""

from __future__ import annotations

from typing import Any

from . import inputs
from .conditioning import ENCODE_NODE, RowConditioning, find_row


class HunyuanImage3Guidance:
    DESCRIPTION = (
        "Sets the guidance that a distilled checkpoint (Instruct-Distil) reads as a number. Sample with cfg "
        "1. "
        "Other checkpoints are guided by the sampler's cfg instead."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("CONDITIONING",)
    OUTPUT_TOOLTIPS = ("The same conditioning with this guidance.",)
    FUNCTION = "guide"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "conditioning": ("CONDITIONING", {"tooltip": f"The positive output of {ENCODE_NODE}."}),
                "guidance": (
                    "FLOAT",
                    {
                        "default": 2.5,
                        "min": 0.0,
                        "max": 30.0,
                        "step": 0.1,
                        "tooltip": "Higher follows the prompt more closely. The release uses 2.5.",
                    },
                ),
            }
        }

    def guide(self, conditioning: list[Any], guidance: float) -> tuple[list[Any]]:
        rows = [
            find_row({"cross_attn": marker, **options}, where="positive") for marker, options in conditioning
        ]
        return ([entry for row in rows for entry in _guided(row, guidance).as_conditioning()],)


def _guided(row: RowConditioning, guidance: float) -> RowConditioning:
    if not row.engine.config.cfg_distilled:
        raise ValueError(
            f"{row.engine.name} is not a distilled checkpoint and does not read a guidance number; remove "
            "this node and set the sampler's cfg."
        )
    return row.with_guidance(guidance)
