"""The network that ComfyUI's sampler calls: it owns no weights and makes one engine call for all rows of the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import prod
from typing import Any

import torch

from ..models.hunyuan_image_3.topology_choice import DenoiseWay
from . import host_compat
from .conditioning import RowConditioning
from .engine_handle import EngineHandle


class DenoiseCall(torch.nn.Module):
    """`rows` maps the handles of the running sampling to token rows; the model socket fills it."""

    dtype = torch.float32

    def __init__(self, engine: EngineHandle, rows: Mapping[int, RowConditioning]) -> None:
        super().__init__()
        self.engine = engine
        self.rows = rows

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        *,
        row_handle: torch.Tensor,
        transformer_options: Mapping[str, Any] | None = None,
        context: Any = None,
        control: Any = None,
    ) -> torch.Tensor:
        """Velocity of every row.

        x: [n, C, h, w] fp32, scaled latents (n = branches x batch). timestep: [n] fp32, 1000 x sigma, one
        value; the sampler's own sigmas are preferred where the host passes them, since a node may have given
        the timestep another factor. row_handle: [n, 1] int64. Returns [n, C, h, w] fp32.

        Raises ValueError for a batch this network cannot run.
        """
        rows = [self._row(handle) for handle in row_handle.flatten().tolist()]
        options = transformer_options or {}
        sigma = _one_sigma(options["sigmas"] if "sigmas" in options else timestep / 1000.0)
        guidance = {row.guidance for row in rows}
        if len(guidance) > 1:
            raise ValueError(
                "The positive conditionings have different guidance values; give all of them the same one."
            )
        latents, places = distinct(x)
        args = {
            "way": asdict(self._way(rows)),
            "rows": [_row_arguments(row) | {"latent": place} for row, place in zip(rows, places, strict=True)],
            "sigma": sigma,
            "sigma_next": next_sigma(options.get("sample_sigmas"), sigma),
            "guidance": guidance.pop(),
            "place": place_in(options.get("sample_sigmas"), sigma),
        }
        node_id = host_compat.running_node_id()
        _, tensors = self.engine.call("denoise", args, {"latents": latents}, node_id=node_id, report=show_words(node_id))
        return tensors["velocity"].to(x.device)

    def _way(self, rows: list[RowConditioning]) -> DenoiseWay:
        """Guided: one row of each branch for every picture. A conditional row stands for all of them, as they are usually alike."""
        kinds = [row.kind for row in rows]
        row = rows[kinds.index("cond")] if "cond" in kinds else rows[0]
        guided = 0 < kinds.count("cond") == kinds.count("uncond")
        return self.engine.denoise_way(guided=guided, image_tokens=prod(row.row.gen.grid), prefix=row.row.prefix_length)

    def _row(self, handle: int) -> RowConditioning:
        row = self.rows.get(handle)
        assert row is not None, f"row handle {handle} was never registered with this model"
        if row.kind == "no_uncond":
            raise ValueError(no_uncond_text(row))
        return row


def no_uncond_text(row: RowConditioning) -> str:
    """What to do where a sampler asks for the second branch of a distilled checkpoint."""
    return (
        f"{row.engine.name} is distilled and has no unconditional branch; set cfg to 1.0 "
        "and use HunyuanImage-3.0 Guidance for its strength."
    )


def show_words(node_id: str | None) -> Callable[[dict[str, Any]], None]:
    """Shows what an engine says in words; the sampler owns the progress bar."""

    def show(event: dict[str, Any]) -> None:
        if event.get("text"):
            host_compat.show_text(event["text"], node_id)

    return show


def _row_arguments(row: RowConditioning) -> dict[str, Any]:
    keys = row.references.keys if row.references is not None else ()
    return {"kind": row.kind, "row": row.row.to_json(), "references": list(keys)}


def distinct(latents: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """[n, …] -> those that differ, and which of them each one is. Samplers repeat the latent for every branch of
    guidance; it is sent and embedded once.
    """
    kept: list[int] = []
    places = []
    for i, latent in enumerate(latents):
        place = next((k for k, j in enumerate(kept) if torch.equal(latents[j], latent)), len(kept))
        if place == len(kept):
            kept.append(i)
        places.append(place)
    return torch.stack([latents[i] for i in kept]), places


def _one_sigma(sigmas: torch.Tensor) -> float:
    """sigmas: [n]. One engine call has one noise level."""
    values = set(sigmas.flatten().tolist())
    if len(values) != 1:
        raise ValueError(
            "This sampler asks for several noise levels in one step, which HunyuanImage-3.0 cannot do; "
            "choose another sampler such as euler."
        )
    return values.pop()


def place_in(schedule: torch.Tensor | None, sigma: float) -> list[int] | None:
    """[steps done, all steps] at the noise level `sigma` of a run's schedule (descending), for people; None without a schedule."""
    if schedule is None:
        return None
    values = schedule.flatten().tolist()
    return [sum(value > sigma + 1e-6 for value in values), len(values) - 1]


def next_sigma(schedule: torch.Tensor | None, sigma: float) -> float | None:
    """The noise level that follows `sigma` in the run's schedule (descending), which MeanFlow checkpoints
    need; None without a schedule.
    """
    if schedule is None:
        return None
    lower = [value for value in schedule.flatten().tolist() if value < sigma - 1e-6]
    return max(lower, default=0.0)
