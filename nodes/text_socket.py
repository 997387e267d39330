"""The CLIP socket: a tokenizer and the engine that writes text. There is no text encoder in this model, so
CLIP nodes are told where to go.
"""

from __future__ import annotations

from typing import Any, NoReturn

from .engine_handle import EngineHandle


class HunyuanText:
    """What `Load HunyuanImage-3.0` puts into the CLIP socket."""

    def __init__(self, engine: EngineHandle) -> None:
        self.engine = engine

    def tokenize(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "CLIP Text Encode cannot prepare a prompt for HunyuanImage-3.0, whose prompt also contains the "
            "picture size; "
            "use HunyuanImage-3.0 Encode and connect both of its conditioning outputs."
        )

    def add_patches(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "LoRA cannot be applied to the text side of HunyuanImage-3.0; remove the LoRA loader."
        )

    clone = add_patches
    clip_layer = tokenize
    encode_from_tokens = tokenize
    encode_from_tokens_scheduled = tokenize


def engine_of_clip(clip: object) -> EngineHandle:
    """The engine behind a CLIP input. Raises ValueError for another model's CLIP."""
    if not isinstance(clip, HunyuanText):
        raise ValueError(
            "The clip input is not from Load HunyuanImage-3.0; connect that node's CLIP output (other text "
            "encoders do not fit)."
        )
    return clip.engine
