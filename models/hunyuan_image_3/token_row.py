"""One row of tokens and where its pictures lie: positions and attention slices, not how it was made.

A row is used through `positions` and `full_slices`; the S x S mask exists for tests and checks only. Indices
count tokens of the row from 0; a span is (start, stop) with stop exclusive; a grid is (rows, columns).
Imports torch only.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any

import torch

Span = tuple[int, int]
Grid = tuple[int, int]


class SequenceError(ValueError):
    """A row cannot be built from what was asked, or is longer than the model allows."""


@dataclass(frozen=True)
class CondSpan:
    """A conditioning picture in a row; the first gh*gw tokens of `vit` are patches, the rest padding."""

    timestep_index: int
    vae: Span
    vae_grid: Grid
    vit: Span
    vit_grid: Grid


@dataclass(frozen=True)
class GenSpan:
    """The picture to be generated; timestep, guidance and timestep_r stand directly before `image`."""

    timestep_index: int
    guidance_index: int | None
    timestep_r_index: int | None
    image: Span
    grid: Grid


@dataclass(frozen=True)
class TokenRow:
    """Token ids with the spans of the conditioning pictures and of the generated one (None in a text row)."""

    tokens: tuple[int, ...]
    cond: tuple[CondSpan, ...]
    gen: GenSpan | None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prefix_length(self) -> int:
        """Tokens before the generated picture's block; no denoise step changes them; all without one."""
        return len(self.tokens) if self.gen is None else self.gen.timestep_index

    def positions(self, cond_attn: str, *, rope_type: str = "2d") -> torch.Tensor:
        """(y, x) of every token, int64 `[S, 2]`: the index itself for text, a grid centred in its own span for pictures.

        `cond_attn` is the configuration's cond_token_attn_type: it decides which conditioning spans are
        grids.
        """
        positions = torch.arange(len(self.tokens)).unsqueeze(1).repeat(1, 2)
        if rope_type == "default":
            return positions
        grids = [] if self.gen is None else [(self.gen.image[0], self.gen.grid)]
        for cond in self.cond:
            if cond_attn != "causal":
                grids.append((cond.vae[0], cond.vae_grid))
            if cond_attn in ("joint_full", "full"):
                grids.append((cond.vit[0], cond.vit_grid))
        for start, (height, width) in grids:
            area = height * width
            top, left = (2 * start + area - height) // 2, (2 * start + area - width) // 2
            place = torch.arange(area)
            positions[start : start + area] = torch.stack((top + place // width, left + place % width), dim=1)
        return positions

    def full_slices(self, cond_attn: str) -> tuple[Span, ...]:
        """Spans whose tokens attend to each other in both directions, in row order; all else is causal."""
        slices: list[Span] = []
        for cond in self.cond:
            if cond_attn == "joint_full":
                slices.append((cond.vae[0], cond.vit[1]))
            elif cond_attn == "full":
                slices += [cond.vae, cond.vit]
            elif cond_attn == "full_causal":
                slices.append(cond.vae)
        if self.gen is not None:
            slices.append(self.gen.image)
        return tuple(slices)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers; `from_json` gives an equal row. Every step of a stock sampler sends it, so the thousands of equal tokens of a picture
        are one entry.
        """
        return {"tokens": self._runs, "cond": [asdict(span) for span in self.cond], "gen": None if self.gen is None else asdict(self.gen)}

    @cached_property
    def _runs(self) -> list[int | list[int]]:
        """The tokens, and [token, count] for equal ones in a row."""
        runs = ((token, len(list(equal))) for token, equal in groupby(self.tokens))
        return [token if count == 1 else [token, count] for token, count in runs]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TokenRow:
        """The row that `to_json` described, also after a trip through JSON text."""
        cond = tuple(CondSpan(**_tuples(span)) for span in values["cond"])
        gen = None if values["gen"] is None else GenSpan(**_tuples(values["gen"]))
        tokens: list[int] = []
        for run in values["tokens"]:
            if isinstance(run, int):
                tokens.append(run)
            else:
                tokens += [run[0]] * run[1]
        return cls(tuple(tokens), cond, gen)

    def digest(self) -> str:
        """Equal for equal rows, in every process."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        # Every step of a picture asks for it, and the tokens are not written out as text.
        total = hashlib.sha256(array("q", self.tokens).tobytes())
        total.update(repr((self.cond, self.gen)).encode())
        return total.hexdigest()

    def name(self) -> str:
        """For ledgers and messages: how long the row is and which one."""
        return f"row {self.digest()[:12]} of {len(self)} tokens"


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def dense_mask(row: TokenRow, cond_attn: str) -> torch.Tensor:
    """Attention mask, bool `[S, S]`, True = row may attend to column; for tests and checks only."""
    mask = torch.ones(len(row), len(row), dtype=torch.bool).tril()
    for start, stop in row.full_slices(cond_attn):
        mask[start:stop, start:stop] = True
    return mask


@cache
def _frequencies(head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Fp32 `[head_dim / 2]`. Powers of a CPU, whose last bits are the reference's; kept, so that no table moves anything to a device."""
    with torch.inference_mode(False):
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return (1.0 / (theta**exponents)).to(device)


def rope_tables(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`positions [S, 2]` -> cos and sin, fp32 `[S, head_dim]` on the device of `positions`, both halves equal; even frequencies turn with y, odd with x."""
    frequencies = _frequencies(head_dim, theta, positions.device)
    # [y, x, y, x, …] without an index: column i turns with positions[i % 2].
    angles = positions.float().repeat(1, -(-head_dim // 4))[:, : head_dim // 2] * frequencies
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
