"""Device time by what a kernel is for. Names are those of our kernels and of the libraries that PyTorch calls on an H200."""

from __future__ import annotations

import re
from collections.abc import Mapping

GROUPS: tuple[tuple[str, str], ...] = (
    ("collectives", r"nccl|_reduce_rows"),
    ("experts", r"_(up|down)_by_|multiply_groups|_sort_rows|_combine|_place|moe|grouped|enable_3x_kernel"),
    ("router", r"_route_tokens"),
    ("attention", r"sdpa|flash|fmha|_attend_rows|^_join"),
    ("rotary and norms", r"_rotate_into|_residual_norm|rms_norm"),
    ("gated unit", r"_gated_unit"),
    ("convolutions", r"conv|fprop|nchw|nhwc|cudnn|winograd|RowwiseMoments|group_norm"),
    ("dense products", r"nvjet|gemm|gemv|cutlass|cublas|splitK"),
    ("copies", r"memcpy|memset|copy|CatArray|fill"),
)
OTHER = "element-wise and other"


def by_group(split_us: Mapping[str, float]) -> dict[str, float]:
    """Microseconds by group, the largest first; what no pattern knows is element-wise work of PyTorch."""
    total: dict[str, float] = {}
    for name, us in split_us.items():
        group = next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), OTHER)
        total[group] = total.get(group, 0.0) + us
    return dict(sorted(total.items(), key=lambda item: -item[1]))
