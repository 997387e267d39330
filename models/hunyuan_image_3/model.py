"""One rank's model: the trunk in each phase and the modules around it, as three calls: prefill, decode, denoise.

Every rank of the plan makes the same calls with the same arguments; results are equal on all of them, bit by bit.

Letters: T tokens, H hidden, C latent channels, n rows computed together, h×w token grid of the picture.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...kernels.attention_runs import plan_runs
from ...parallel.collectives import Communicator, PhaseView
from ...parallel.plan import ParallelPlan, Phase
from ..reduction import ReductionChoice
from ..row_reduction import GroupRows, RowReduction, choose_row_reduction
from .config import HunyuanImage3Config
from .kv_cache import KVCache
from .token_row import TokenRow, rope_tables
from .transformer import ForwardBatch, Slot, TrunkWeights, embed, forward_layers, local_rows, logits, padded_length
from .weights import Around

# Rows whose rotary tables are kept; the longest row's take 23 MB.
MAX_TABLES = 4


@dataclass(frozen=True)
class ReferenceFeatures:
    """One conditioning picture as the trunk takes it: ``image [1 + h·w, H]``, its timestep's token and those of its scaled ``latent [C, h, w]``, and
    aligned ``vit [slots, H]``. ``digest`` names all. Made by :meth:`HunyuanImage3Model.reference_features`."""

    latent: torch.Tensor
    image: torch.Tensor
    vit: torch.Tensor
    digest: str


@dataclass(frozen=True)
class StepInputs:
    """What a denoise step adds to the rows: ``timestep`` t = 1000·σ, ``timestep_r`` the next one (MeanFlow), ``guidance`` (distilled)."""

    timestep: float
    timestep_r: float | None = None
    guidance: float | None = None


@dataclass(frozen=True)
class StepTensors:
    """:class:`StepInputs` on the device, fp32 ``[1]`` each, as the network takes them: kernels read them there, so a recorded step can be given others."""

    timestep: torch.Tensor
    timestep_r: torch.Tensor | None
    guidance: torch.Tensor | None

    @classmethod
    def of(cls, step: StepInputs, device: torch.device) -> StepTensors:
        def value(number: float | None) -> torch.Tensor | None:
            return None if number is None else torch.full((1,), number, device=device)

        return cls(value(step.timestep), value(step.timestep_r), value(None if step.guidance is None else 1000.0 * step.guidance))

    def set(self, step: StepInputs) -> None:
        """To values of which the same ones are None."""
        self.timestep.fill_(step.timestep)
        if self.timestep_r is not None:
            self.timestep_r.fill_(step.timestep_r)
        if self.guidance is not None:
            self.guidance.fill_(1000.0 * step.guidance)


@dataclass(frozen=True)
class BlockRow:
    """One row of a denoise call: its prefix is in ``cache``; ``latent`` indexes the call's latents."""

    row: TokenRow
    cache: KVCache
    latent: int


class HunyuanImage3Model:
    """Weights of all phases over one set of resident tensors."""

    def __init__(
        self,
        config: HunyuanImage3Config,
        plan: ParallelPlan,
        comm: Communicator,
        weights: Mapping[Phase, TrunkWeights],
        around: Around,
        *,
        device: torch.device,
        dtype: torch.dtype,
        resident: Mapping[str, torch.Tensor],
        reduction: ReductionChoice = "auto",
    ):
        """``resident``: all weights of this rank by name; ``weights`` and ``around`` are views of them, for denoise of the whole shard. ``reduction``: see
        :meth:`row_reduction`."""
        self.resident = resident
        self.config = config
        self.plan = plan
        self.comm = comm
        self.weights = weights
        self._whole_shard = weights["denoise"]
        self.denoise_as(plan)
        self.around = around
        self.device = device
        self.dtype = dtype
        self._tables: OrderedDict[tuple[TokenRow, int, int], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._reduce = reduction
        self._connected: Communicator | None = None
        self._rows: dict[tuple[int, ...], tuple[RowReduction, str]] = {}
        self.rows_reason = ""

    def row_reduction(self) -> RowReduction:
        """Who adds up the ranks' summands in a denoise step; ``rows_reason`` says why. Collective where the communicator is new, or the ranks that share
        the summands are."""
        if self._connected is not self.comm:
            self._rows.clear()  # their memory goes back first
            self._connected = self.comm
        ranks = self.plan.topology("denoise").tp_ranks
        if ranks not in self._rows:
            # In inference mode it would make buffers that nobody may write elsewhere.
            with torch.inference_mode(False):
                kernels = self.weights["denoise"].kernels
                self._rows[ranks] = choose_row_reduction(self.comm, kernels, self.config.hidden_size, self.dtype, self.device, self._reduce)
        reduction, self.rows_reason = self._rows[ranks]
        return reduction

    def denoise_as(self, plan: ParallelPlan) -> None:
        """Steps from now on have the denoise topology of ``plan``, over the same weights where they are. Every rank of the plan makes the same call."""
        self.plan = plan
        if self.comm.plan != plan:
            self.comm.denoise_as(plan)
        views = self._whole_shard if plan.topology("denoise").micro is None else self.weights["prefill"]
        if self.weights["denoise"] is not views:
            self.weights = {**self.weights, "denoise": views}

    def new_cache(self, capacity: int, phase: Phase) -> KVCache:
        """Empty cache with the KV heads that this rank attends with in ``phase``."""
        plan = self.plan
        parts = plan.denoise_parts() if phase == "denoise" else plan.ar_parts()
        heads = self.config.num_key_value_heads // (plan.storage_tp * plan.head_parts) * len(parts)
        return KVCache.allocate(
            self.config.num_hidden_layers, capacity, heads, self.config.head_dim, dtype=self.dtype, device=self.device
        )

    def tables(self, row: TokenRow, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary ``cos, sin [stop-start, d]`` of a row's positions, fp32. Kept, because every step of a picture asks for the same."""
        key = (row, start, stop)
        if key not in self._tables:
            positions = row.positions(self.config.cond_token_attn_type, rope_type=self.config.rope_type)[start:stop]
            self._tables[key] = rope_tables(positions.to(self.device), self.config.head_dim, self.config.rope_theta)
        self._tables.move_to_end(key)
        while len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        return self._tables[key]

    @torch.inference_mode()
    def reference_features(self, latent: torch.Tensor, vit: torch.Tensor, digest: str) -> ReferenceFeatures:
        """A picture's ``latent [C, h, w]`` and ``vit [slots, H]`` as tokens. They depend on the picture alone, so every prefill uses them as they are."""
        zero = torch.zeros(1, device=self.device)
        image = self.around.patch_embed(latent.unsqueeze(0), self.around.time_embed(zero))[0]
        tokens = torch.cat([self.around.timestep_emb(zero).to(self.dtype), image.to(self.dtype)])
        return ReferenceFeatures(latent, tokens, vit.to(self.dtype), digest)

    @torch.inference_mode()
    def prefill(
        self,
        row: TokenRow,
        start: int,
        stop: int,
        cache: KVCache,
        features: Sequence[ReferenceFeatures] = (),
        probe: Mapping[str, list] | None = None,
    ) -> torch.Tensor:
        """Positions ``[start, stop)`` of ``row`` through the trunk; the cache already holds what lies before. Returns hidden ``[T, H]``."""
        view, weights = self.comm.phase("prefill"), self.weights["prefill"]
        ids = torch.tensor(row.tokens[start:stop], dtype=torch.int64, device=self.device)
        with view.forward({"row_reduce": 1}, "embedding"):
            hidden = embed(ids, weights, view)
        self._insert_references(hidden, row, start, stop, features)
        slices = [s for s in row.full_slices(self.config.cond_token_attn_type) if s[0] < stop]
        cos, sin = self.tables(row, start, stop)
        slot = Slot(cache, start, stop - start, plan_runs(start, stop, slices), cos, sin)
        hidden = forward_layers(hidden, weights, ForwardBatch((slot,), stop - start), view, self.plan.attention, _by_group(weights), probe)
        cache.length = stop
        return hidden

    def _insert_references(
        self, hidden: torch.Tensor, row: TokenRow, start: int, stop: int, features: Sequence[ReferenceFeatures]
    ) -> None:
        """Continuous embeddings replace token embeddings *after* the vocabulary reduction (spec section 8)."""
        if len(features) != len(row.cond):
            raise ValueError(f"the row has {len(row.cond)} conditioning pictures but {len(features)} were given")
        for span, feature in zip(row.cond, features, strict=True):
            if not start <= span.timestep_index < stop:
                continue
            hidden[span.timestep_index - start : span.vae[1] - start] = feature.image
            hidden[span.vit[0] - start : span.vit[1] - start] = feature.vit

    @torch.inference_mode()
    def next_logits(self, hidden: torch.Tensor, phase: Phase) -> torch.Tensor:
        """``hidden [T, H]`` -> fp32 logits ``[T, vocab]``, the same on all ranks."""
        view = self.comm.phase(phase)
        with view.forward({"vocab_gather": 1}, "head"):
            return logits(hidden, self.weights[phase], view)

    @torch.inference_mode()
    def decode(self, token: int, position: int, cache: KVCache) -> torch.Tensor:
        """One generated token at ``position``: fp32 logits ``[vocab]`` for the next one."""
        view, weights = self.comm.phase("decode"), self.weights["decode"]
        with view.forward({"row_reduce": 1}, "embedding"):
            hidden = embed(torch.tensor([token], dtype=torch.int64, device=self.device), weights, view)
        cos, sin = rope_tables(torch.full((1, 2), position, device=self.device), self.config.head_dim, self.config.rope_theta)
        runs = plan_runs(position, position + 1, ())
        slot = Slot(cache, position, 1, runs, cos, sin)
        hidden = forward_layers(hidden, weights, ForwardBatch((slot,), 1), view, self.plan.attention, _by_group(weights))
        cache.length = position + 1
        return self.next_logits(hidden, "decode")[0]

    @torch.inference_mode()
    def denoise(self, rows: Sequence[BlockRow], latents: torch.Tensor, step: StepInputs, *, one_by_one: bool = False) -> torch.Tensor:
        """Velocity ``[n, C, h, w]`` fp32 of rows whose blocks ``[<timestep> …, <img>×h·w]`` have one length.

        ``latents [b, C, h, w]``; ``rows[i].latent`` says which one row i uses, and each is embedded once, whoever uses it. The block's K/V overwrite
        the cache behind the prefix. ``one_by_one``: a pass of the trunk for each row, not one for all.
        """
        slots = [(self.block_slot(row), row.latent) for row in rows]
        return self.denoise_slots(slots, latents, StepTensors.of(step, self.device), one_by_one=one_by_one)

    def block_slot(self, row: BlockRow) -> Slot:
        """Where the block of a row stands; the same in every step of a picture."""
        span = row.row.gen
        start, stop = span.timestep_index, span.image[1]
        cos, sin = self.tables(row.row, start, stop)
        return Slot(row.cache, start, stop - start, plan_runs(start, stop, [span.image]), cos, sin)

    @torch.inference_mode()
    def denoise_slots(self, rows: Sequence[tuple[Slot, int]], latents: torch.Tensor, step: StepTensors, *, one_by_one: bool = False) -> torch.Tensor:
        """As :meth:`denoise`, for slots and the latent of each; launches only, and nothing that waits for the device."""
        blocks = self._block_embeddings(latents, step)  # [b, T, H]
        passes = [[row] for row in rows] if one_by_one else [rows]
        return torch.cat([self._velocities(some, blocks, latents.shape[-2:], step) for some in passes])

    def _velocities(self, rows: Sequence[tuple[Slot, int]], blocks: torch.Tensor, grid: torch.Size, step: StepTensors) -> torch.Tensor:
        """One pass of the trunk over ``rows``, whose embedded blocks are among ``blocks [b, T, H]``."""
        view, weights = self.comm.phase("denoise"), self.weights["denoise"]
        length = blocks.shape[1]
        for slot, _ in rows:
            if slot.length != length:
                raise ValueError(f"a latent with {length} block tokens does not belong to a row with {slot.length}")
        padded = padded_length(length, view.topology.sp_size)
        first, last = local_rows(view, padded)
        hidden = blocks.new_empty(len(rows), last - first, blocks.shape[2])
        for number, (_, latent) in enumerate(rows):
            part = blocks[latent, first:last]
            hidden[number, : part.shape[0]] = part
            hidden[number, part.shape[0] :] = 0.0
        batch = ForwardBatch(tuple(slot for slot, _ in rows), padded)
        hidden = forward_layers(hidden.flatten(0, 1), weights, batch, view, self.plan.attention, self.row_reduction())
        whole = self._gather_rows(hidden, len(rows), view)[:, :length]
        h, w = grid
        image = whole[:, length - h * w :]
        modulation = self.around.time_embed_2(step.timestep.expand(len(rows)))
        return self.around.final_layer(image, modulation, h, w).float()

    def _gather_rows(self, hidden: torch.Tensor, rows: int, view: PhaseView) -> torch.Tensor:
        """``[n·T/sp, H]`` -> ``[n, T, H]``; the convolutions of the final layer need the whole picture."""
        local = hidden.unflatten(0, (rows, -1))
        if view.topology.sp_size == 1:
            return local
        with view.forward({"seq_gather": 1}, "final hidden states"):
            return view.seq_gather(local.transpose(0, 1), "final_layer.in", order=view.topology.sp_ranks).transpose(
                0, 1
            )

    def _block_embeddings(self, latents: torch.Tensor, step: StepTensors) -> torch.Tensor:
        """``[b, T, H]``: the special tokens' embedders, then the picture in row-major order (spec 4.5)."""
        count = latents.shape[0]
        t = step.timestep.expand(count)
        parts = [self.around.timestep_emb(t)]
        if self.around.guidance_emb is not None:
            # The release feeds 1000·guidance rounded to bf16, 2.5 -> 2496 (spec 4.1).
            parts.append(self.around.guidance_emb(step.guidance.bfloat16().float().expand(count)))
        if self.around.timestep_r_emb is not None:
            parts.append(self.around.timestep_r_emb(step.timestep_r.expand(count)))
        image = self.around.patch_embed(latents, self.around.time_embed(t))
        specials = torch.stack([part.to(self.dtype) for part in parts], dim=1)
        return torch.cat([specials, image.to(self.dtype)], dim=1)


def _by_group(weights: TrunkWeights) -> GroupRows:
    return GroupRows(weights.kernels.residual_norm)
