"""Routed experts through FlashInfer's ``cutlass_fused_moe``: another way to the numbers of ``moe.py``, for comparisons.

Its contract: ``fc1 [E, 2·I, H]`` with the rows [linear, gate], which is the order [up, gate] of this pack; ``fc2 [E, H, I]``; both contiguous; int32 ids
and fp32 weights ``[T, K]``, no expert twice for one token. Several micro shards that lie one behind the other are one call over M·E experts: a token
that chose expert e goes to e, e + E, … with the same weight, because the shards' products are summands.

Letters: T tokens, K experts per token, E experts, H hidden, I width of an expert in one micro shard, J width of the shared expert, M micro shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .decode_moe import DecodeMoeBuffers
from .flashinfer_support import FlashInferError, function, version, why_not_built, why_not_installed
from .gemv import gemv_triton
from .moe import ExpertBlock, MoePath
from .router import Routing

# Compute capability -> FlashInfer's recipe of the module that it loads there.
MODULES = {(8, 9): "89", (9, 0): "90", (10, 0): "100", (10, 3): "103", (12, 0): "120", (12, 1): "120"}
# Hidden size and expert width in elements: FlashInfer's weights must lie in steps of 16 bytes.
ALIGNMENT = 8
TUNED_UP_TO = 8192
"""Tokens up to which FlashInfer measures its tactics; it takes those of the nearest number that it measured."""

TUNED_OPERATIONS = ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")

FusedMoe = Callable[..., Any]


@functools.cache
def why_not_flashinfer(device: torch.device, dtype: torch.dtype) -> str | None:
    """None when FlashInfer computes experts of ``dtype`` on ``device`` with kernels that are already built, else the reason."""
    reason = why_not_installed(device)
    if reason is not None:
        return reason
    if dtype != torch.bfloat16:
        return f"FlashInfer's experts take bfloat16 weights and these are {str(dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(device)
    if capability not in MODULES:
        return f"FlashInfer has no experts for sm_{capability[0]}{capability[1]}"
    experts = why_not_built("flashinfer.jit.fused_moe", f"gen_cutlass_fused_moe_sm{MODULES[capability]}_module")
    # Without this small one its tuner measures nothing, and says so nowhere.
    return experts or why_not_built("flashinfer.jit.tllm_utils", "gen_trtllm_utils_module")


def joined(blocks: tuple[ExpertBlock, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """All blocks as one pair ``[M·E, 2·I, H]``, ``[M·E, H, I]``: a view, never a copy.

    Raises:
        FlashInferError: an expert's micro shards lie side by side, or the blocks do not lie one behind the other.
    """
    if any(block.micros != 1 for block in blocks) or not all(t.is_contiguous() for block in blocks for t in (block.w1, block.w2)):
        raise FlashInferError("FlashInfer's experts need each micro shard in one piece, as MoE layout micro_major keeps them; choose micro_major")
    return _one_behind_the_other([block.w1 for block in blocks]), _one_behind_the_other([block.w2 for block in blocks])


def _one_behind_the_other(parts: list[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(part.data_ptr() != first.data_ptr() + number * first.nbytes for number, part in enumerate(parts)):
        raise FlashInferError("FlashInfer's experts need the micro shards one behind the other in memory; choose MoE path two_dispatch")
    return first.as_strided((len(parts) * first.shape[0], *first.shape[1:]), first.stride())


def route_to_micros(weights: torch.Tensor, ids: torch.Tensor, micros: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``weights, ids [T, K]`` -> fp32 and int32 ``[T, M·K]`` over M·E experts: all of the first micro shard, then of the second …"""
    ids = ids.to(torch.int32)
    if micros == 1:
        return weights.float().contiguous(), ids.contiguous()
    first = torch.arange(0, micros * experts, experts, dtype=torch.int32, device=ids.device)
    return weights.float().repeat(1, micros), (ids[:, None, :] + first[None, :, None]).flatten(1)


class FlashInferExperts:
    """One model's routed experts. ``words`` says what runs; ``tune`` must have been called before a CUDA graph records any call."""

    def __init__(self, fused_moe: FusedMoe | None = None):
        """``fused_moe``: what to call instead of FlashInfer's function (tests)."""
        self._fused_moe = fused_moe or function("flashinfer.fused_moe", "cutlass_fused_moe")
        self._tuned: set[tuple[int, ...]] = set()
        self._one_token: dict[tuple[int, ...], OneTokenExperts] = {}

    @property
    def words(self) -> str:
        if not self._tuned:
            return f"FlashInfer {version()}, not tuned"
        return f"FlashInfer {version()}, tuned for up to {TUNED_UP_TO} tokens"

    def tune(self, cases: Iterable[tuple[tuple[ExpertBlock, ...], int, MoePath]]) -> None:
        """``cases``: an example (blocks, K, path) of everything that will be called. FlashInfer measures its tactics for each size and keeps the best
        in this process; without that it takes slow ones. Two launches may choose differently, and then differ in their rounding.

        Raises:
            FlashInferError: it could measure none.
        """
        autotune = function("flashinfer", "autotune")
        for blocks, topk, path in cases:
            calls = [blocks] if path == "multi_micro" else [blocks[:1]]
            for call in calls:
                w1, _ = joined(call)
                size = (*w1.shape, topk * len(call))
                if size in self._tuned:
                    continue
                x = torch.randn(1, w1.shape[2], device=w1.device).to(w1.dtype)
                ids = torch.arange(topk, dtype=torch.int32, device=w1.device)[None, :]
                weights = torch.full((1, topk), 1.0 / topk, device=w1.device)
                with autotune(True):
                    self._run(x, call, weights, ids, torch.empty_like(x), None)
                self._tuned.add(size)
        if not all(function("flashinfer.autotuner", "AutoTuner").get().stats.tuned_op_successful_configs.get(op) for op in TUNED_OPERATIONS):
            raise FlashInferError(f"FlashInfer {version()} could measure none of its tactics for the experts; choose moe_backend auto")

    def __call__(
        self, x: torch.Tensor, blocks: tuple[ExpertBlock, ...], routing: Routing, shared: torch.Tensor, path: MoePath
    ) -> torch.Tensor:
        """As ``KernelSet.experts``: ``x [T, H]``, ``shared [T, H]`` -> this rank's summand ``[T, H]``."""
        for call in [blocks] if path == "multi_micro" else [(block,) for block in blocks]:
            shared = self._run(x, call, routing.weights, routing.ids, torch.empty_like(x), None).add_(shared)
        return shared

    def _run(
        self, x: torch.Tensor, blocks: tuple[ExpertBlock, ...], weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        w1, w2 = joined(blocks)
        weights, ids = route_to_micros(weights, ids, len(blocks), blocks[0].w1.shape[0])
        # Without the fused finalize, which adds in no fixed order: equal inputs must give equal bits.
        self._fused_moe(
            x.contiguous(), ids, weights, w1, w2, x.dtype, quant_scales=[], output=out, use_fused_finalize=False, workspace_buffer=workspace,
            tune_max_num_tokens=TUNED_UP_TO,
        )  # fmt: skip
        return out

    def for_one_token(self, block: ExpertBlock, topk: int) -> OneTokenExperts:
        """The call of a decode step; layers of one size share its memory, since they run one after the other."""
        w1, w2 = joined((block,))
        size = (*w1.shape, topk)
        if size not in self._one_token:
            self._one_token[size] = OneTokenExperts(self, self._workspace(w1, w2, topk), w2.new_zeros(1, w2.shape[1]))
        return self._one_token[size]

    def _workspace(self, w1: torch.Tensor, w2: torch.Tensor, topk: int) -> torch.Tensor:
        nbytes = function("flashinfer.fused_moe", "cutlass_fused_moe_workspace_size")(
            1, w2.shape[1], w2.shape[2], w1.shape[0], topk, x_dtype=w1.dtype, weight_dtype=w1.dtype, output_dtype=w1.dtype, use_fused_finalize=False,
            device=w1.device,
        )  # fmt: skip
        return torch.empty(nbytes, dtype=torch.uint8, device=w1.device)


class OneTokenExperts:
    """Routed and shared experts of a decode step in static memory, so that a CUDA graph can hold it."""

    def __init__(self, experts: FlashInferExperts, workspace: torch.Tensor, routed: torch.Tensor):
        self._experts, self._workspace, self._routed = experts, workspace, routed

    def __call__(self, x: torch.Tensor, block: ExpertBlock, shared_down: torch.Tensor, buffers: DecodeMoeBuffers, out: torch.Tensor) -> None:
        """``x [H]``, the routing and the shared activation in ``buffers``, ``shared_down [H, J]`` -> this rank's summand in ``out [H]``."""
        self._experts._run(x[None], (block,), buffers.weights[None], buffers.ids[None], self._routed, self._workspace)
        gemv_triton(buffers.shared, shared_down, out, plus=self._routed[0])
