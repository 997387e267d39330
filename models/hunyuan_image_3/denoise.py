"""Denoising: velocities of guided rows under any plan, and the release's own Euler loop (spec 4.5, 4.6).

Letters: b pictures, n rows (conditional and unconditional rows of all pictures), C latent channels, h×w token grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ...parallel.collectives import PhaseView
from .kv_cache import KVCache
from .model import BlockRow, HunyuanImage3Model, ReferenceFeatures, StepInputs, StepTensors
from .prefix import PrefixStore
from .schedule import euler_step
from .step_graph import StepGraphs, why_not_recorded
from .token_row import TokenRow
from .transformer import Slot

Branch = Literal["cond", "uncond"]
CfgMode = Literal["batched", "serial"]
CFG_MODES: tuple[CfgMode, ...] = get_args(CfgMode)
_BRANCH_INDEX: dict[Branch, int] = {"cond": 0, "uncond": 1}


@dataclass(frozen=True)
class DenoiseRow:
    """One row of a step: its tokens, its guidance branch, its conditioning pictures, and which latent it denoises."""

    row: TokenRow
    branch: Branch
    features: tuple[ReferenceFeatures, ...] = ()
    latent: int = 0


@dataclass(frozen=True)
class StepTrace:
    """One step of :func:`sample` for comparisons: ``latent_in``, ``pred_cond``, ``pred_uncond`` (or None) and the guided ``pred``, each [b, C, h, w]."""

    latent_in: torch.Tensor
    pred_cond: torch.Tensor
    pred_uncond: torch.Tensor | None
    pred: torch.Tensor


class Denoiser:
    """Velocity of rows on all ranks of a plan; equal bits everywhere."""

    def __init__(self, model: HunyuanImage3Model, prefixes: PrefixStore, *, cfg_mode: CfgMode = "batched", graphs: bool = True, alone: bool = False):
        """``graphs`` False launches every step anew (for comparisons); so it is anyway on a CPU and where a process group works inside a step, unless
        this rank is measured ``alone``, with collectives that do nothing."""
        if cfg_mode not in CFG_MODES:
            raise ValueError(f"unknown CFG mode {cfg_mode!r}; choose one of {', '.join(CFG_MODES)}")
        self._model = model
        self._prefixes = prefixes
        self.cfg_mode = cfg_mode
        self._alone = alone
        self._graphs = StepGraphs(model, prefixes) if graphs else None

    @property
    def records(self) -> bool:
        """Whether steps are recorded and replayed."""
        return self._graphs is not None and why_not_recorded(self._model, alone=self._alone) is None

    def release(self) -> None:
        """Gives back the memory of recorded steps; the next ones are recorded again."""
        if self._graphs is not None:
            self._graphs.release()

    def require(self) -> None:
        """Raises CollectiveTimeout when a step that the device has ended lacks the part of a peer; once the device was awaited, that is every step."""
        self._model.row_reduction().require()

    def note(self, row: TokenRow) -> None:
        """The next comparison of ledgers shows a rank that has another row, before a collective of another size does."""
        self._model.comm.ledger.note("denoise", row.name())

    def velocity(self, rows: Sequence[DenoiseRow], latents: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """``latents [b, C, h, w]`` fp32 -> velocity ``[n, C, h, w]`` fp32 in the order of ``rows``.

        With CFG parallel and as many conditional as unconditional rows, each half of the ranks computes one branch; otherwise every rank
        computes every row. Nobody waits for the device: :meth:`require` says later whether the velocity may be used.
        """
        try:
            return self._velocity(rows, latents, step)
        except torch.OutOfMemoryError:
            # Several ranks connect anew behind a fault, which releases what is recorded; a rank alone must do so itself, or every further try fails.
            if self._model.plan.world_size > 1 or self._graphs is None or not self._graphs.holds_memory:
                raise
        self.release()
        torch.cuda.empty_cache()
        return self._velocity(rows, latents, step)

    def _velocity(self, rows: Sequence[DenoiseRow], latents: torch.Tensor, step: StepInputs) -> torch.Tensor:
        reduction = self._model.row_reduction()
        reduction.require()  # of the steps before
        view = self._model.comm.phase("denoise")
        split, by_branch = self._split(rows)
        caches = self.prepare(rows)
        mine = by_branch[view.topology.cfg_rank] if split else list(range(len(rows)))
        blocks = [BlockRow(rows[i].row, caches[i], rows[i].latent) for i in mine]
        out = self._forward(blocks, latents, step)
        reduction.follow()
        if not split:
            return out
        gathered = self._gather_branches(out, view)
        places = by_branch[0] + by_branch[1]
        if places == sorted(places):
            return gathered
        # One row at a time: a list as an index would be copied to the device, and the host would wait for it.
        velocity = torch.empty_like(gathered)
        for row, place in zip(gathered, places, strict=True):
            velocity[place] = row
        return velocity

    def prepare(self, rows: Sequence[DenoiseRow]) -> list[KVCache | None]:
        """The prefixes of ``rows``, computed unless they are kept; None where this rank's branch needs none."""
        split, _ = self._split(rows)
        everywhere = frozenset(range(self._model.plan.cfg_size))
        return [
            self._prefixes.prepare(row.row, row.features, frozenset({_BRANCH_INDEX[row.branch]}) if split else everywhere).cache for row in rows
        ]

    def _split(self, rows: Sequence[DenoiseRow]) -> tuple[bool, list[list[int]]]:
        """Whether each half of the ranks computes one branch, and which rows belong to each."""
        by_branch = [[i for i, row in enumerate(rows) if _BRANCH_INDEX[row.branch] == b] for b in range(2)]
        return self._model.plan.cfg_size > 1 and len(by_branch[0]) == len(by_branch[1]) > 0, by_branch

    def _forward(self, blocks: list[BlockRow], latents: torch.Tensor, step: StepInputs) -> torch.Tensor:
        replayed = self._graphs.replay(blocks, latents, step, self._launch) if self.records else None
        if replayed is not None:
            return replayed
        if self.cfg_mode == "batched":
            return self._model.denoise(blocks, latents, step)
        return self._model.denoise(blocks, latents, step, one_by_one=True)

    def _launch(self, slots: Sequence[tuple[Slot, int]], latents: torch.Tensor, step: StepTensors) -> torch.Tensor:
        """As ``_forward`` without the host's part, for a graph."""
        if self.cfg_mode == "batched":
            return self._model.denoise_slots(slots, latents, step)
        return self._model.denoise_slots(slots, latents, step, one_by_one=True)

    @staticmethod
    def _gather_branches(out: torch.Tensor, view: PhaseView) -> torch.Tensor:
        with view.forward({"cfg_gather": 1}, "guidance branches"):
            return view.cfg_gather(out, "cfg.velocity", order=view.topology.cfg_ranks)


def guide(cond: torch.Tensor, uncond: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Classifier-free guidance ``u + scale·(c - u)``; without an unconditional branch the conditional velocity itself."""
    return cond if uncond is None else uncond + scale * (cond - uncond)


def sample(
    denoiser: Denoiser,
    cond: TokenRow,
    uncond: TokenRow | None,
    noise: torch.Tensor,
    sigmas: torch.Tensor,
    *,
    guidance: float,
    features: tuple[ReferenceFeatures, ...] = (),
    distilled: bool = False,
    check: Callable[[int, int], None] = lambda done, total: None,
    trace: Callable[[int, StepTrace], None] | None = None,
) -> torch.Tensor:
    """Euler from ``noise [b, C, h, w]`` along ``sigmas [N+1]``; returns the final latent, still multiplied by the VAE's scaling factor.

    ``guidance`` is the CFG scale, or the embedded value for distilled checkpoints. A scale of 1 or less runs the conditional row alone.
    ``check(done, total)`` runs before every step and may stop the loop on all ranks.
    """
    latent = noise.float()
    guided = uncond is not None and guidance > 1 and not distilled
    pictures, steps = latent.shape[0], len(sigmas) - 1
    rows = [DenoiseRow(cond, "cond", features, b) for b in range(pictures)]
    if guided:
        rows += [DenoiseRow(uncond, "uncond", features, b) for b in range(pictures)]
    for row in dict.fromkeys(row.row for row in rows):
        denoiser.note(row)
    for index in range(steps):
        check(index, steps)
        sigma, after = float(sigmas[index]), float(sigmas[index + 1])
        timesteps = 1000.0 * sigmas[index : index + 2]
        step = StepInputs(float(timesteps[0]), float(timesteps[1]), guidance if distilled else None)
        velocity = denoiser.velocity(rows, latent, step)
        pred_cond, pred_uncond = velocity[:pictures], velocity[pictures:] if guided else None
        pred = guide(pred_cond, pred_uncond, guidance)
        if trace is not None:
            trace(index, StepTrace(latent, pred_cond, pred_uncond, pred))
        latent = euler_step(latent, pred, sigma, after)
    check(steps, steps)
    return latent
