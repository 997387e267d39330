"""Keys and values of one token row on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class KVCache:
    """Preallocated ``k, v [layers, capacity, kv_heads, d]``: positions are absolute, later writes overwrite in place.

    ``length`` is the number of leading positions that hold valid keys and values of ``tokens``; what lies behind (the image block of the
    current denoise step) is rewritten at every step.
    """

    k: torch.Tensor
    v: torch.Tensor
    length: int = 0

    @classmethod
    def allocate(
        cls, layers: int, capacity: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        shape = (layers, capacity, kv_heads, head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """``k, v [T, kv_heads, d]`` to positions ``start … start+T-1``."""
        k_place, v_place = self.places(layer, start, k.shape[0])
        k_place.copy_(k)
        v_place.copy_(v)

    def places(self, layer: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where keys and values of ``count`` tokens from ``start`` on belong: views ``[count, kv_heads, d]``."""
        stop = start + count
        if stop > self.capacity:
            raise ValueError(f"position {stop} does not fit a KV cache of {self.capacity} positions")
        return self.k[layer, start:stop], self.v[layer, start:stop]

    def copy_prefix(self, other: KVCache, length: int) -> None:
        """Take the first ``length`` positions of a cache with the same heads."""
        self.k[:, :length] = other.k[:, :length]
        self.v[:, :length] = other.v[:, :length]
        self.length = length
