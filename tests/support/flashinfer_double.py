"""Stands for FlashInfer on a CPU: the contract of its ``cutlass_fused_moe`` in plain torch, and modules of its names that a test can install."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

VERSION = "0.0.double"


@dataclass
class FlashInferDouble:
    """``calls``: tokens, experts and experts per token of every call; ``tuned``: those under ``autotune``. ``built``: names of the modules that lie
    ready; ``measures``: whether the tuner finds anything."""

    calls: list[tuple[int, int, int]] = field(default_factory=list)
    tuned: list[tuple[int, int, int]] = field(default_factory=list)
    built: tuple[str, ...] = ("fused_moe_90", "trtllm_utils", "trtllm_comm")
    measures: bool = True
    _thread: threading.local = field(default_factory=threading.local)

    def cutlass_fused_moe(
        self, input: torch.Tensor, token_selected_experts: torch.Tensor, token_final_scales: torch.Tensor, fc1_expert_weights: torch.Tensor,
        fc2_expert_weights: torch.Tensor, output_dtype: torch.dtype, *, quant_scales: list, output: torch.Tensor, use_fused_finalize: bool,
        workspace_buffer: torch.Tensor | None, tune_max_num_tokens: int,
    ) -> None:  # fmt: skip
        """Refuses what the real one refuses, and what would make it slow or change from run to run."""
        (tokens, hidden), (experts, twice, _) = input.shape, fc1_expert_weights.shape
        assert token_selected_experts.dtype == torch.int32 and token_final_scales.dtype == torch.float32
        assert token_selected_experts.shape == token_final_scales.shape and token_selected_experts.shape[0] == tokens
        assert fc1_expert_weights.shape[2] == hidden and fc2_expert_weights.shape == (experts, hidden, twice // 2)
        assert all(t.is_contiguous() for t in (input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output))
        assert output.shape == input.shape and output.dtype == output_dtype and not quant_scales
        assert use_fused_finalize is False, "its fused finalize adds in no fixed order"
        size = (tokens, experts, token_selected_experts.shape[1])
        (self.tuned if getattr(self._thread, "tuning", False) else self.calls).append(size)
        linear, gate = torch.einsum("th,eih->tei", input.float(), fc1_expert_weights.float()).chunk(2, dim=-1)
        each = torch.einsum("tei,ehi->teh", linear * F.silu(gate), fc2_expert_weights.float())
        chosen = each.gather(1, token_selected_experts.long()[:, :, None].expand(-1, -1, hidden))
        output.copy_((chosen * token_final_scales[:, :, None]).sum(1))

    @staticmethod
    def cutlass_fused_moe_workspace_size(tokens: int, hidden: int, width: int, experts: int, topk: int, **options: Any) -> int:
        assert options["use_fused_finalize"] is False, "the size is another one with the fused finalize"
        return tokens * topk * (hidden + 3 * width)

    @contextmanager
    def autotune(self, tune_mode: bool) -> Iterator[None]:
        self._thread.tuning = tune_mode
        yield
        self._thread.tuning = False

    def get(self) -> SimpleNamespace:
        """The tuner."""
        measured = {f"trtllm::fused_moe::gemm{number}": len(self.tuned) for number in (1, 2)} if self.measures else {}
        return SimpleNamespace(stats=SimpleNamespace(tuned_op_successful_configs=measured))

    def _spec(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, is_compiled=name in self.built)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, members in {
            "flashinfer": {"__version__": VERSION, "autotune": self.autotune},
            "flashinfer.fused_moe": {
                "cutlass_fused_moe": self.cutlass_fused_moe,
                "cutlass_fused_moe_workspace_size": self.cutlass_fused_moe_workspace_size,
            },
            "flashinfer.jit": {},
            "flashinfer.autotuner": {"AutoTuner": self},
            "flashinfer.jit.fused_moe": {"gen_cutlass_fused_moe_sm90_module": lambda: self._spec("fused_moe_90")},
            "flashinfer.jit.tllm_utils": {"gen_trtllm_utils_module": lambda: self._spec("trtllm_utils")},
            "flashinfer.jit.comm": {"gen_trtllm_comm_module": lambda: self._spec("trtllm_comm")},
        }.items():
            module = ModuleType(name)
            module.__dict__.update(members)
            monkeypatch.setitem(sys.modules, name, module)
