"""What travels in ComfyUI's CONDITIONING socket: one token row as a Python object, never as numbers a host
may cast.

ComfyUI casts conditioning tensors to the model's dtype; in bfloat16 different token ids above 256 become
equal. The row therefore rides in the conditioning's dictionary, and the tensor beside it is only a marker: if
it is not the very tensor we made, another node has changed the conditioning, and the row no longer says what
that node meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from ..models.hunyuan_image_3.sequence import TokenRow
    from .engine_handle import EngineHandle
    from .references import References

ROW_KEY = "hunyuan_image_3_row"
ENCODE_NODE = "HunyuanImage-3.0 Encode"

RowKind = Literal["cond", "uncond", "no_uncond"]
"""``no_uncond`` fills the negative output of a distilled checkpoint, which has no unconditional branch."""

_REFUSED = {
    "area": "an area (Set Area)",
    "mask": "a mask (Set Mask)",
    "control": "a ControlNet",
    "gligen": "GLIGEN boxes",
    "hooks": "hooks (LoRA or model schedules)",
}


class ConditioningError(ValueError):
    """A conditioning that this model cannot run; the message names the input and the remedy."""


def _marker() -> torch.Tensor:
    return torch.zeros(1, 1, 1)


@dataclass(frozen=True, eq=False)
class RowConditioning:
    """One branch of one prompt. `height` and `width` are picture pixels; `pair` is the digest of the
    conditional row it belongs to.
    """

    engine: EngineHandle
    kind: RowKind
    row: TokenRow
    digest: str
    pair: str
    height: int
    width: int
    guidance: float | None = None
    references: References | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    marker: torch.Tensor = field(default_factory=_marker)

    def as_conditioning(self) -> list[list[Any]]:
        """The CONDITIONING value: one entry, marker [1, 1, 1] fp32 and this object."""
        return [[self.marker, {ROW_KEY: self}]]

    def with_guidance(self, guidance: float) -> RowConditioning:
        return replace(self, guidance=guidance, marker=_marker())

    @property
    def handle(self) -> int:
        """A positive int64 that names this row and its guidance in tensors and tables."""
        return int(self.digest[:12], 16) * 4 + ("cond", "uncond", "no_uncond").index(self.kind)


def find_row(cond: Mapping[str, Any], *, where: str) -> RowConditioning:
    """The row inside one conditioning dictionary. Raises ConditioningError if there is none or if another
    node changed it.

    `where` is "positive" or "negative". `cond` is the dictionary as samplers see it: the tensor is under
    ``cross_attn``.
    """
    row = cond.get(ROW_KEY)
    if not isinstance(row, RowConditioning):
        raise ConditioningError(
            f"The {where} conditioning was not made by {ENCODE_NODE}; connect that node's {where} output "
            "(this model has no free negative prompt and no CLIP text embedding)."
        )
    if cond.get("cross_attn") is not row.marker:
        raise ConditioningError(
            f"The {where} conditioning was changed by another node after {ENCODE_NODE}; "
            "combine the texts in the prompt instead and connect the node directly."
        )
    for key, what in _REFUSED.items():
        if cond.get(key) is not None:
            raise ConditioningError(
                f"The {where} conditioning carries {what}, which HunyuanImage-3.0 cannot use; remove that "
                "node."
            )
    return row


def check_branch(row: RowConditioning, engine: EngineHandle, *, where: str) -> None:
    """Raises ConditioningError if the row belongs to another checkpoint or sits in the wrong socket."""
    if row.engine.key != engine.key:
        raise ConditioningError(
            f"The {where} conditioning was made for {row.engine.describe()}, but the model is "
            f"{engine.describe()}; "
            "feed both from one Load HunyuanImage-3.0 node."
        )
    if where == "positive" and row.kind != "cond":
        raise ConditioningError(
            f"The positive input got the negative output of {ENCODE_NODE}; exchange the two wires."
        )
    if where == "negative" and row.kind == "cond":
        raise ConditioningError(
            f"The negative input got the positive output of {ENCODE_NODE}; exchange the two wires."
        )


def check_pair(positive: list[RowConditioning], negative: list[RowConditioning]) -> None:
    """Classifier-free guidance needs the two rows of one prompt. Raises ConditioningError if a negative has
    no such partner.
    """
    pairs = {row.pair for row in positive}
    for row in negative:
        if row.pair not in pairs:
            raise ConditioningError(
                "The negative conditioning belongs to another prompt or size than the positive one; "
                f"connect both outputs of one {ENCODE_NODE}."
            )


def check_latent(shape: tuple[int, ...], row: RowConditioning) -> None:
    """Raises ConditioningError unless `shape` is [batch, channels, height / 16, width / 16] of the row's size
    and checkpoint.
    """
    vae = row.engine.config.vae
    stride = vae.ffactor_spatial
    remedy = f"use the latent output of {ENCODE_NODE} or Empty HunyuanImage-3.0 Latent"
    if len(shape) != 4:
        raise ConditioningError(
            f"The latent has {len(shape)} dimensions {list(shape)}, but this model takes 4; {remedy}."
        )
    if shape[1] != vae.latent_channels:
        raise ConditioningError(
            f"The latent has {shape[1]} channels, but this checkpoint has {vae.latent_channels}: "
            f"it comes from another model's node; {remedy}."
        )
    expected = (row.height // stride, row.width // stride)
    if tuple(shape[2:]) != expected:
        raise ConditioningError(
            f"The latent is {shape[3]}x{shape[2]} (a picture of {shape[3] * stride}x{shape[2] * stride} "
            "pixels), but the prompt was "
            f"encoded for {row.width}x{row.height} pixels; {remedy} with that size."
        )
