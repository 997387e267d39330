"""A decode step's reduction through FlashInfer's fused all-reduce: one launch for sum, residual and RMSNorm. For comparisons with our own kernel.

Its peers' memory is opened through PyTorch's symmetric memory and its backend is named, because the automatic ones use multicast, which stays off
(see ``parallel/peer_memory.py``). Its kernel waits for a peer without a time limit, and only the end of the process ends that.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from ..kernels.flashinfer_support import first_line, function, why_not_built, why_not_installed
from ..parallel.collectives import Communicator, Partial, PhaseView
from ..parallel.peer_memory import PeerMemoryError, opening_together, prepare_symmetric_memory
from ..parallel.resident import Weight
from .decode_head import GroupHead, Head

MODULE = "flashinfer.comm.trtllm_ar"
RANKS = (2, 4, 8, 16)
ALIGNMENT = 16


@functools.cache
def why_not_flashinfer_reduction(device: torch.device) -> str | None:
    """None when FlashInfer's all-reduce is built and runs on ``device``, else the reason."""
    return why_not_installed(device) or why_not_built("flashinfer.jit.comm", "gen_trtllm_comm_module")


class FlashInferReduction:
    """One kernel of FlashInfer through a workspace that every rank of the tensor-parallel group has opened."""

    name = "FlashInfer"
    failed = None

    def __init__(self, workspace: tuple[object, torch.Tensor, dict[str, object]], rank: int, ranks: int):
        """``workspace``: what FlashInfer returned, which keeps the peers' memory open; ``rank``: this rank's place in the group."""
        self._handles, self._pointers, self._limits = workspace
        self._rank, self._ranks = rank, ranks
        self._reduce = function(MODULE, "trtllm_allreduce_fusion")
        self._pattern = function(MODULE, "AllReduceFusionPattern").kARResidualRMSNorm

    def __call__(self, view: PhaseView, partial: Partial, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor) -> None:
        view.row_reduce_with(partial, lambda summand: self._fused(summand, residual, weight, eps, normed))

    def _fused(self, summand: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor) -> None:
        self._reduce(
            allreduce_in=summand, world_size=self._ranks, world_rank=self._rank, token_num=1, hidden_dim=summand.numel(), workspace_ptrs=self._pointers,
            launch_with_pdl=True, trigger_completion_at_end=True, fp32_acc=True, pattern_code=self._pattern, use_oneshot=True, allreduce_out=None,
            residual_in=residual, residual_out=residual, norm_out=normed, quant_out=None, scale_out=None, rms_gamma=weight, rms_eps=eps,
            scale_factor=None, layout_code=None, metadata=self._limits,
        )  # fmt: skip

    def head(self, view: PhaseView, lm_head: Weight, vocab_start: int, vocab: int) -> Head:
        return GroupHead(view, lm_head, vocab)

    def require(self, failed: int) -> None:
        """There is nothing to ask: FlashInfer's kernel has no time limit."""


def open_flashinfer_reduction(comm: Communicator, ranks: tuple[int, ...], hidden: int, dtype: torch.dtype, device: torch.device) -> FlashInferReduction:
    """Collective over all ranks, each with the ``ranks`` of its own group, of one size. Raises PeerMemoryError on the rank where it fails; peers may then
    have succeeded, so ask them."""
    # The same on all ranks, so that none of them goes on to the agreement.
    if len(ranks) not in RANKS:
        raise PeerMemoryError(f"the kernel takes {', '.join(map(str, RANKS))} ranks, not {len(ranks)}")
    if hidden * dtype.itemsize % ALIGNMENT:
        raise PeerMemoryError(f"the kernel takes rows in multiples of {ALIGNMENT} bytes, not {hidden * dtype.itemsize}")
    with opening_together(comm, why_not_flashinfer_reduction(device) or ""):
        return _open_workspace(comm, ranks, hidden, dtype, device)


def _open_workspace(comm: Communicator, ranks: tuple[int, ...], hidden: int, dtype: torch.dtype, device: torch.device) -> FlashInferReduction:
    prepare_symmetric_memory()
    group = comm.groups.for_ranks(ranks)
    assert group is not None
    rank = dist.get_group_rank(group, comm.plan.rank)
    try:
        workspace = function(MODULE, "trtllm_create_ipc_workspace_for_all_reduce_fusion")(
            tp_rank=rank, tp_size=len(ranks), max_token_num=1, hidden_dim=hidden, use_fp32_lamport=dtype == torch.float32, group=group,
            create_metadata=True, use_symm_dev_mem=False,
        )  # fmt: skip
        torch.cuda.synchronize(device)
        return FlashInferReduction(workspace, rank, len(ranks))
    except (ImportError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        raise PeerMemoryError(first_line(error)) from error
