"""The cache of one row: absolute positions, writes in place, a limit that is never passed."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.models.hunyuan_image_3.kv_cache import KVCache


def cache(capacity: int = 6, heads: int = 2) -> KVCache:
    made = KVCache.allocate(3, capacity, heads, 4, dtype=torch.float32, device=torch.device("cpu"))
    made.k.fill_(0)
    made.v.fill_(0)
    return made


def values(rows: int, fill: float, heads: int = 2) -> torch.Tensor:
    return torch.full((rows, heads, 4), fill)


def test_sizes() -> None:
    made = KVCache.allocate(3, 6, 2, 4, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (made.capacity, made.length, made.nbytes) == (6, 0, 2 * 3 * 6 * 2 * 4 * 2)


def test_write_goes_to_one_layer_and_its_positions() -> None:
    made = cache()
    made.write(1, 2, values(3, 5.0), values(3, 7.0))
    touched = torch.zeros(3, 6, dtype=torch.bool)
    touched[1, 2:5] = True
    assert torch.equal(made.k == 5.0, touched[..., None, None].expand_as(made.k))
    assert torch.equal(made.v == 7.0, touched[..., None, None].expand_as(made.v))


def test_later_write_replaces_an_earlier_one_in_place() -> None:
    made = cache()
    addresses = made.k.data_ptr(), made.v.data_ptr()
    made.write(0, 0, values(4, 1.0), values(4, 1.0))
    made.write(0, 3, values(3, 2.0), values(3, 2.0))
    assert made.k[0, :, 0, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert addresses == (made.k.data_ptr(), made.v.data_ptr())


@pytest.mark.parametrize(("start", "rows", "stop"), [(6, 1, 7), (5, 2, 7), (0, 7, 7)])
def test_position_behind_the_end_is_refused(start: int, rows: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"^position {stop} does not fit a KV cache of 6 positions$"):
        cache().write(0, start, values(rows, 1.0), values(rows, 1.0))


def test_prefix_is_copied_and_then_independent() -> None:
    source, target = cache(), cache(capacity=9)
    for layer in range(3):
        source.write(layer, 0, values(6, float(layer + 1)), values(6, 10.0))
    target.copy_prefix(source, 4)
    assert target.length == 4
    assert target.k[:, :4, 0, 0].tolist() == [[1] * 4, [2] * 4, [3] * 4] and not target.k[:, 4:].any()
    source.write(0, 0, values(1, 99.0), values(1, 99.0))
    assert target.k[0, 0, 0, 0] == 1.0
