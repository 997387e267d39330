"""Waiting for a peer where Triton is interpreted."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import triton.language as tl


def spin_in_python(address: tl.tensor, target: tl.tensor, timeout_ns: tl.tensor, abort: tl.tensor, look_ns: tl.tensor) -> tl.tensor:
    """``_spin_until``, whose assembly the interpreter does not know, in its own words."""
    started, look = time.monotonic_ns(), int(look_ns.handle.data[0])
    reached = np.zeros(address.handle.data.shape, np.int32)
    for place, counter in enumerate(address.handle.data):
        while not reached[place]:
            reached[place] = word_at(counter) >= int(target.handle.data[place])
            passed = time.monotonic_ns() - started
            if passed > int(timeout_ns.handle.data[place]):
                break
            if passed >= look:
                look = passed + int(look_ns.handle.data[0])
                if word_at(abort.handle.data[place]):
                    break
    return tl.where(target == target, tl.tensor(type(target.handle)(reached, tl.int32), target.type), 0)


def word_at(address: int) -> int:
    return ctypes.c_int32.from_address(int(address)).value
