"""The kernels of a decode step against their eager references in higher precision, on the GPU or, without one, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels.decode_attention import DecodeAttention, decode_attention_eager
from phase_parallel.kernels.decode_moe import (
    DecodeMoeBuffers,
    all_down_eager,
    all_down_triton,
    routed_up_eager,
    routed_up_triton,
    router_and_shared_eager,
    router_and_shared_triton,
)
from phase_parallel.kernels.gemv import gemv_eager, gemv_triton
from phase_parallel.kernels.residual_norm import residual_norm_eager, residual_norm_triton, rms_norm_triton
from phase_parallel.kernels.rms_norm import rms_norm_eager

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def limit(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(got).all(), "something was not written"
    return float((got.double() - want.double()).norm() / want.double().norm())


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.fixture
def draw(triton_device: torch.device):
    generator = torch.Generator(triton_device).manual_seed(torch.seed() % 2**40)

    def make(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=triton_device) * scale).to(dtype)

    return make


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "padding"), [(7, 33, 0), (64, 64, 0), (130, 1500, 20), (5, 4096, 0)])
def test_gemv(draw, rows: int, columns: int, padding: int, dtype: torch.dtype) -> None:
    x, weight = draw(columns, dtype=dtype), draw(rows, columns + padding, dtype=dtype)[:, :columns]
    out = poisoned(rows, dtype=torch.float32, device=x.device)
    gemv_triton(x, weight, out)
    assert error(out, gemv_eager(x.double(), weight.double(), torch.float64)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 100), (1, 4096)])
def test_residual_norm(draw, rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual, weight = draw(rows, hidden, dtype=dtype), draw(rows, hidden, dtype=dtype), draw(hidden, dtype=dtype)
    total, want = residual_norm_eager(x, residual, weight, EPS)
    normed = poisoned(rows, hidden, dtype=dtype, device=x.device)
    residual_norm_triton(x, residual, weight, EPS, normed)
    # The interpreter cuts to bfloat16 where hardware rounds.
    assert torch.equal(residual, total) if residual.is_cuda else error(residual, total) < limit(dtype)
    assert error(normed, want) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 100), (2, 4096)])
def test_norm_alone_leaves_its_input(draw, rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, hidden, dtype=dtype), draw(hidden, dtype=dtype)
    before = x.clone()
    assert error(rms_norm_triton(x, weight, EPS), rms_norm_eager(x, weight, EPS)) < limit(dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("experts", "topk", "hidden", "width", "shared", "micros"),
    [(8, 3, 64, 12, 12, 1), (17, 5, 40, 6, 10, 1), (6, 2, 35, 9, 33, 2), (4, 4, 32, 8, 8, 2), (1, 1, 32, 5, 5, 1)],
)
def test_mixture_of_experts(draw, experts: int, topk: int, hidden: int, width: int, shared: int, micros: int, dtype: torch.dtype) -> None:
    """``micros`` 2: the strided micro view of the layout that keeps an expert's micro shards together."""
    x, router = draw(hidden, dtype=dtype), draw(experts, hidden, dtype=torch.float32, scale=hidden**-0.5)
    w1 = draw(experts, micros * 2 * width, hidden, dtype=dtype, scale=hidden**-0.5)[:, -2 * width :]
    w2 = draw(experts, hidden, micros * width, dtype=dtype)[:, :, -width:]
    shared_up, shared_down = draw(2 * shared, hidden, dtype=dtype, scale=hidden**-0.5), draw(hidden, micros * shared, dtype=dtype)[:, :shared]
    buffers = DecodeMoeBuffers.make(experts, topk, width, shared, dtype, x.device)
    for tensor in (buffers.logits, buffers.weights, buffers.shared, buffers.routed):
        tensor.fill_(float("nan"))
    out = poisoned(hidden, dtype=dtype, device=x.device)

    for _ in range(2):  # the second launch finds the counter as the first one left it
        router_and_shared_triton(x, router, shared_up, buffers)
    logits, weights, ids, activation = router_and_shared_eager(x.double(), router.double(), shared_up.double(), topk)
    assert error(buffers.logits, logits) < 1e-5
    assert buffers.ids.tolist() == ids.tolist()
    assert error(buffers.weights, weights) < 1e-5
    assert error(buffers.shared, activation) < limit(dtype)

    routed_up_triton(x, w1, buffers)
    assert error(buffers.routed, routed_up_eager(x.double(), ids, w1.double())) < limit(dtype)

    all_down_triton(w2, shared_down, buffers, out)
    want = all_down_eager(buffers.routed.double(), buffers.shared.double(), weights, ids, w2.double(), shared_down.double())
    assert error(out, want) < limit(dtype)
    again = torch.empty_like(out)
    all_down_triton(w2, shared_down, buffers, again)
    assert torch.equal(again, out), "the sum must have one order"


def test_equal_router_logits_choose_the_first_experts(draw) -> None:
    x, router, shared_up = (draw(*shape, dtype=torch.float32) for shape in ((32,), (6, 32), (8, 32)))
    buffers = DecodeMoeBuffers.make(6, 3, 4, 4, torch.float32, x.device)
    router_and_shared_triton(x, torch.zeros_like(router), shared_up, buffers)
    assert buffers.ids.tolist() == [0, 1, 2]
    assert error(buffers.weights, torch.full((3,), 1 / 3, device=x.device)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "position"),
    [(1, 2, 16, at) for at in (0, 1, 63, 64, 200)] + [(*sizes, at) for sizes in ((2, 4, 128), (3, 1, 24), (1, 5, 64)) for at in (0, 130)],
)
def test_attention(draw, triton_device: torch.device, kv_heads: int, group: int, head_dim: int, position: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and triton_device.type == "cpu":
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices")
    capacity = 256
    qkv = draw(kv_heads, group + 2, head_dim, dtype=dtype)
    angles = draw(capacity, head_dim // 2, dtype=torch.float32).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    query_norm, key_norm = draw(head_dim, dtype=dtype), draw(head_dim, dtype=dtype)
    k, v = draw(capacity, kv_heads, head_dim, dtype=dtype), draw(capacity, kv_heads, head_dim, dtype=dtype)
    k[position:], v[position:] = float("nan"), float("nan")
    want_k, want_v = k.double(), v.double()
    want = decode_attention_eager(
        qkv.double(), cos[position].double(), sin[position].double(), query_norm.double(), key_norm.double(), want_k, want_v, position, EPS
    )
    attend = DecodeAttention(kv_heads, group, head_dim, qkv.device)
    at = torch.tensor([position], dtype=torch.int32, device=qkv.device)
    for _ in range(2):  # the second call finds the counters as the first one left them
        out = poisoned(kv_heads * group, head_dim, dtype=dtype, device=qkv.device)
        attend(qkv, cos, sin, query_norm, key_norm, k, v, at, EPS, out)
        assert error(out, want) < limit(dtype)
        assert error(k[position], want_k[position]) < limit(dtype)
        assert torch.equal(v[position].double(), want_v[position])
