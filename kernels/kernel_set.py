"""Which backend runs the operations on many tokens (prefill, denoise) and the experts, chosen once for a model and shown to the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import torch

from .attention import attend_eager, attend_fused
from .attention_runs import AttentionRun
from .decode_moe import DecodeMoeBuffers, one_token_triton
from .flashinfer_experts import FlashInferExperts, why_not_flashinfer
from .flashinfer_support import FlashInferError
from .group_norm import NormSilu, norm_silu_eager, norm_silu_triton
from .grouped_experts import grouped_experts
from .grouped_hopper import why_not_hopper
from .moe import ExpertBlock, MoePath, gated_unit_eager, gated_unit_triton, moe_eager
from .residual_norm import residual_norm_eager, residual_norm_triton, rms_norm_triton
from .rms_norm import rms_norm_eager
from .rope_norm import rotate_into_eager, rotate_into_triton
from .route_tokens import route_tokens_triton
from .router import Routing, route_tokens_eager
from .triton_support import why_not

KernelChoice = Literal["auto", "eager", "fused"]
KERNEL_CHOICES: tuple[KernelChoice, ...] = get_args(KernelChoice)
MoeBackend = Literal["auto", "triton", "flashinfer"]
MOE_BACKENDS: tuple[MoeBackend, ...] = get_args(MoeBackend)


class OneTokenMoe(Protocol):
    """The experts of a decode step behind the router: ``x [H]``, the routing and the shared activation in ``buffers``, the shared expert's down
    weight ``[H, J]`` -> this rank's summand in ``out [H]``."""

    def __call__(self, x: torch.Tensor, block: ExpertBlock, shared_down: torch.Tensor, buffers: DecodeMoeBuffers, out: torch.Tensor) -> None: ...


class Attend(Protocol):
    """:func:`.attention.attend_eager`."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Sequence[AttentionRun], out: torch.Tensor | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class KernelSet:
    """One backend's operations; shapes and meaning are those of the eager functions."""

    name: str
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    residual_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    rotate_into: Callable[..., torch.Tensor]
    attend: Attend
    gated_unit: Callable[[torch.Tensor, int], torch.Tensor]
    norm_silu: NormSilu
    """In front of the convolutions around the trunk."""
    route: Callable[[torch.Tensor, torch.Tensor, int, bool], Routing]
    """(x, router weight, experts per token, whether to keep the logits)."""
    experts: Callable[[torch.Tensor, tuple[ExpertBlock, ...], Routing, torch.Tensor, MoePath], torch.Tensor]
    """(x, blocks, routing, shared expert's summand, path) -> their sum."""
    moe: str
    """Who computes the routed experts: eager, triton or flashinfer."""

    @property
    def moe_words(self) -> str:
        return self.experts.words if isinstance(self.experts, FlashInferExperts) else self.moe

    def one_token(self, block: ExpertBlock, topk: int) -> OneTokenMoe:
        """Experts of a decode step on the device for layers whose block is like ``block``. Without FlashInfer that step is Triton's."""
        return self.experts.for_one_token(block, topk) if isinstance(self.experts, FlashInferExperts) else one_token_triton


def _experts_eager(x: torch.Tensor, blocks: tuple[ExpertBlock, ...], routing: Routing, shared: torch.Tensor, path: MoePath) -> torch.Tensor:
    return shared + moe_eager(x, blocks, routing.weights, routing.ids, path=path)


def _experts_fused(x: torch.Tensor, blocks: tuple[ExpertBlock, ...], routing: Routing, shared: torch.Tensor, path: MoePath) -> torch.Tensor:
    if path == "multi_micro":
        return grouped_experts(x, blocks, routing, shared)
    for block in blocks:
        shared = grouped_experts(x, (block,), routing, shared)
    return shared


def _residual_norm_fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream is updated in place: nobody else holds it."""
    normed = torch.empty_like(residual)
    residual_norm_triton(x, residual, weight, eps, normed)
    return residual, normed


EAGER = KernelSet(
    "eager", rms_norm_eager, residual_norm_eager, rotate_into_eager, attend_eager, gated_unit_eager, norm_silu_eager, route_tokens_eager,
    _experts_eager, "eager",
)
FUSED = KernelSet(
    "fused", rms_norm_triton, _residual_norm_fused, rotate_into_triton, attend_fused, gated_unit_triton, norm_silu_triton,
    route_tokens_triton, _experts_fused, "triton",
)


def _many_tokens_words(device: torch.device) -> str:
    reason = why_not_hopper(device)
    if reason is not None:
        return f"many tokens' experts by Triton ({reason})"
    return "many tokens' experts by the CUDA kernel for Hopper where they are bf16 and whole tiles"


def choose_kernels(device: torch.device, choice: KernelChoice = "auto") -> tuple[KernelSet, str]:
    """The set and why. ``auto`` is fused on CUDA devices that Triton knows, else eager.

    Raises:
        ValueError: ``fused`` was asked for and cannot run here.
    """
    reason = why_not(device)
    if choice == "eager":
        return EAGER, "eager: chosen"
    if choice == "fused" and reason is not None:
        raise ValueError(f"fused kernels cannot run here: {reason}; choose kernels auto or eager")
    if choice == "fused" or (reason is None and device.type == "cuda"):
        return FUSED, f"fused: Triton kernels and PyTorch's fused attention, {_many_tokens_words(device)}"
    # None only in Triton's interpreter, which is not for real work.
    return EAGER, f"eager: {reason or 'no CUDA device'}"


def check_experts(device: torch.device, backend: MoeBackend, kernels: KernelChoice, dtype: torch.dtype) -> None:
    """``dtype`` is that of the trunk's weights.

    Raises:
        ValueError: ``triton`` or ``flashinfer`` was asked for and cannot run here.
    """
    if backend == "triton":
        chosen, words = choose_kernels(device, kernels)
        if chosen is not FUSED:
            raise ValueError(f"moe_backend triton cannot run here: kernels are {words}; choose moe_backend auto")
    if backend == "flashinfer":
        reason = why_not_flashinfer(device, dtype)
        if reason is not None:
            raise FlashInferError(f"moe_backend flashinfer cannot run here: {reason}; or choose moe_backend auto")


def with_experts(kernels: KernelSet, backend: MoeBackend) -> KernelSet:
    """``kernels`` with the experts that ``backend`` means, once :func:`check_experts` has let it pass."""
    return replace(kernels, experts=FlashInferExperts(), moe="flashinfer") if backend == "flashinfer" else kernels
