"""The decode step's kernels where Triton is interpreted: fewer and larger programs, one rank at a time."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from phase_parallel.kernels import decode_attention, decode_moe
from phase_parallel.kernels.decode_moe import all_down_triton, routed_up_triton


def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time is the number of programs; results are the same up to the order of a split attention's sum."""
    monkeypatch.setattr(decode_attention, "SPLITS", 2)
    monkeypatch.setattr(decode_moe, "all_down_triton", partial(all_down_triton, rows=16))
    monkeypatch.setattr(decode_moe, "routed_up_triton", partial(routed_up_triton, rows=8))


def one_rank_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps the running program in module variables, so ranks that are threads must take turns. No kernel may wait for a peer."""
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpretedFunction

    turn, run = threading.Lock(), InterpretedFunction.run

    def in_turn(self: InterpretedFunction, *arguments: object, **options: object) -> object:
        # Rewriting the kernel's source, which comes before its first run, cannot bear company either.
        with turn:
            return run(self, *arguments, **options)

    monkeypatch.setattr(InterpretedFunction, "run", in_turn)
