"""GPUs for the rank processes of a test: one each where there are as many, or shared ones where ``PHASE_PARALLEL_SHARE_GPU`` allows it.

Ranks on one GPU take turns, and each waits in its reductions for the others' turn; NCCL joins them from 2.30 on, with
NCCL_MULTI_RANK_GPU_ENABLE=1. Slow, but the real NCCL, the real peers' memory and the real graphs.
"""

from __future__ import annotations

import torch

from phase_parallel.launch.gpus import gpu_of, gpus_for


def have_gpus(ranks: int) -> bool:
    return torch.cuda.is_available() and gpus_for(ranks) >= ranks


def on_gpu(rank: int) -> dict[str, str]:
    """Variables of the process of ``rank``."""
    return {"CUDA_VISIBLE_DEVICES": gpu_of(rank), "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TRITON_INTERPRET": "0"}
