"""FlashInfer as a way of computing the experts: with a double of it on the CPU, with itself on a GPU that has it."""

from __future__ import annotations

import pytest
import torch
from flashinfer_double import VERSION, FlashInferDouble

from phase_parallel.kernels import flashinfer_support
from phase_parallel.kernels.decode_moe import DecodeMoeBuffers, all_down_eager, routed_up_eager, router_and_shared_eager, router_and_shared_triton
from phase_parallel.kernels.flashinfer_experts import FlashInferExperts, joined, route_to_micros, why_not_flashinfer
from phase_parallel.kernels.flashinfer_support import FlashInferError
from phase_parallel.kernels.kernel_set import EAGER, FUSED, check_experts, with_experts
from phase_parallel.kernels.moe import ExpertBlock, moe_eager
from phase_parallel.kernels.router import Routing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REASON = why_not_flashinfer(CUDA, torch.bfloat16) if torch.cuda.is_available() else "no CUDA device"
needs_flashinfer = pytest.mark.skipif(REASON is not None, reason=f"FlashInfer: {REASON}")


def blocks_of(micros: int, experts: int, width: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[ExpertBlock, ...]:
    """Micro shards as ``micro_major`` keeps them."""
    w1 = (torch.randn(micros, experts, 2 * width, hidden, device=device) * hidden**-0.5).to(dtype)
    w2 = (torch.randn(micros, experts, hidden, width, device=device) * width**-0.5).to(dtype)
    return tuple(ExpertBlock(w1[m], w2[m], 1) for m in range(micros))


def routing(kind: str, tokens: int, experts: int, topk: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``skewed``: every token's first choice is the same expert. ``empty``: half of the experts get nothing."""
    scores = torch.rand(tokens, experts, device=device)
    if kind == "skewed":
        scores[:, experts // 2] = 2.0
    if kind == "empty":
        scores[:, ::2] = -1.0
    weights, ids = scores.topk(topk)
    return weights / weights.sum(-1, keepdim=True), ids.int()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(got).all(), "something was not written"
    return float((got.double() - want.double()).norm() / want.double().norm())


def exact(blocks: tuple[ExpertBlock, ...]) -> tuple[ExpertBlock, ...]:
    return tuple(ExpertBlock(block.w1.float(), block.w2.float(), block.micros) for block in blocks)


class TestArithmetic:
    """With a double that keeps FlashInfer's contract, in fp32: what is passed to it means what the eager reference computes."""

    @pytest.mark.parametrize("path", ["multi_micro", "two_dispatch"])
    @pytest.mark.parametrize("kind", ["even", "skewed", "empty"])
    @pytest.mark.parametrize(("tokens", "micros"), [(1, 1), (7, 1), (1, 2), (7, 2), (5, 3)])
    def test_many_tokens(self, tokens: int, micros: int, kind: str, path: str) -> None:
        double = FlashInferDouble()
        blocks = blocks_of(micros, 6, 8, 16, torch.float32, CPU)
        x, shared = torch.randn(tokens, 16), torch.randn(tokens, 16)
        weights, ids = routing(kind, tokens, 6, 3, CPU)
        want, kept = shared + moe_eager(x, blocks, weights, ids, path=path), shared.clone()
        got = FlashInferExperts(double.cutlass_fused_moe)(x, blocks, Routing(weights, ids), shared, path)
        assert error(got, want) < 1e-5
        assert torch.equal(shared, kept), "the shared expert's summand belongs to the caller"
        assert double.calls == ([(tokens, 6 * micros, 3 * micros)] if path == "multi_micro" else [(tokens, 6, 3)] * micros)

    def test_ids_of_the_eager_router_are_taken_too(self) -> None:
        weights, ids = routing("even", 4, 6, 3, CPU)
        _, got = route_to_micros(weights, ids.long(), 2, 6)
        assert got.dtype == torch.int32 and torch.equal(got, torch.cat([ids, ids + 6], dim=1))

    def test_several_micro_shards_are_a_view(self) -> None:
        blocks = blocks_of(3, 4, 8, 16, torch.float32, CPU)
        for part, name in zip(joined(blocks), ("w1", "w2"), strict=True):
            assert part.data_ptr() == getattr(blocks[0], name).data_ptr()
            assert torch.equal(part, torch.cat([getattr(block, name) for block in blocks]))

    def test_one_token_of_a_decode_step(self, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        double = FlashInferDouble()
        double.install(monkeypatch)
        (block,) = blocks_of(1, 6, 8, 32, torch.float32, triton_device)
        one_token_is_eager(with_experts(FUSED, "flashinfer").one_token(block, 3), block, 3, 12, torch.float32, triton_device, 1e-5)
        assert double.calls == [(1, 6, 3)]

    def test_layers_of_one_size_share_the_memory_of_a_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FlashInferDouble().install(monkeypatch)
        experts = FlashInferExperts()
        first, second, other = (blocks_of(1, 4, width, 16, torch.float32, CPU)[0] for width in (8, 8, 16))
        assert experts.for_one_token(first, 2) is experts.for_one_token(second, 2)
        assert experts.for_one_token(first, 2) is not experts.for_one_token(other, 2)


def one_token_is_eager(step: object, block: ExpertBlock, topk: int, shared: int, dtype: torch.dtype, device: torch.device, limit: float) -> torch.Tensor:
    experts, twice, hidden = block.w1.shape
    x, router = torch.randn(hidden, device=device).to(dtype), torch.randn(experts, hidden, device=device) * hidden**-0.5
    shared_up = (torch.randn(2 * shared, hidden, device=device) * hidden**-0.5).to(dtype)
    shared_down = (torch.randn(hidden, shared, device=device) * shared**-0.5).to(dtype)
    buffers = DecodeMoeBuffers.make(experts, topk, twice // 2, shared, dtype, device)
    out = torch.full((hidden,), float("nan"), dtype=dtype, device=device)
    router_and_shared_triton(x, router, shared_up, buffers)
    step(x, block, shared_down, buffers, out)
    _, weights, ids, activation = router_and_shared_eager(x.float(), router, shared_up.float(), topk)
    assert torch.equal(buffers.ids.long(), ids.long())
    routed = routed_up_eager(x.float(), ids, block.w1.float())
    assert error(out, all_down_eager(routed, activation, weights, ids, block.w2.float(), shared_down.float())) < limit
    return out


class TestTuning:
    def test_once_for_each_size_before_any_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        double = FlashInferDouble()
        double.install(monkeypatch)
        micro, both = blocks_of(1, 4, 8, 16, torch.float32, CPU), blocks_of(2, 4, 8, 16, torch.float32, CPU)
        experts = FlashInferExperts()
        assert experts.words == f"FlashInfer {VERSION}, not tuned"
        experts.tune([(micro, 2, "multi_micro"), (micro, 2, "multi_micro"), (both, 2, "multi_micro")])
        assert double.tuned == [(1, 4, 2), (1, 8, 4)] and not double.calls
        assert experts.words == f"FlashInfer {VERSION}, tuned for up to 8192 tokens"

    def test_two_dispatches_are_calls_of_one_micro_shard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        double = FlashInferDouble()
        double.install(monkeypatch)
        FlashInferExperts().tune([(blocks_of(2, 4, 8, 16, torch.float32, CPU), 2, "two_dispatch")])
        assert double.tuned == [(1, 4, 2)]

    def test_a_tuner_that_measures_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As it happens without any error where one of its modules is missing: what runs then is several times slower."""
        FlashInferDouble(measures=False).install(monkeypatch)
        with pytest.raises(FlashInferError, match=f"^FlashInfer {VERSION} could measure none of its tactics for the experts; choose moe_backend auto$"):
            FlashInferExperts().tune([(blocks_of(1, 4, 8, 16, torch.float32, CPU), 2, "multi_micro")])


class TestRefusals:
    def test_micro_shards_side_by_side(self) -> None:
        """What ``expert_major`` keeps: both micro shards of an expert in one block, or a strided view of one of them."""
        w1, w2 = torch.zeros(4, 2 * 2 * 8, 16), torch.zeros(4, 16, 2 * 8)
        for block in (ExpertBlock(w1, w2, 2), ExpertBlock(w1.narrow(1, 0, 16), w2.narrow(2, 0, 8), 1)):
            with pytest.raises(FlashInferError, match=r"in one piece, as MoE layout micro_major keeps them; choose micro_major$"):
                joined((block,))

    def test_micro_shards_that_lie_apart(self) -> None:
        blocks = blocks_of(3, 4, 8, 16, torch.float32, CPU)
        with pytest.raises(FlashInferError, match=r"one behind the other in memory; choose MoE path two_dispatch$"):
            joined((blocks[0], blocks[2]))

    def test_a_cpu(self) -> None:
        with pytest.raises(ValueError, match=r"^moe_backend flashinfer cannot run here: no CUDA device; or choose moe_backend auto$"):
            check_experts(CPU, "flashinfer", "auto", torch.bfloat16)
        with pytest.raises(ValueError, match=r"^moe_backend triton cannot run here: kernels are eager: chosen; choose moe_backend auto$"):
            check_experts(CPU, "triton", "eager", torch.bfloat16)

    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> FlashInferDouble:
        """A GPU of compute capability 9.0 with FlashInfer, as far as the refusals look."""
        double = FlashInferDouble()
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(flashinfer_support.importlib.util, "find_spec", lambda name: object())
        for cached in (flashinfer_support.why_not_installed, why_not_flashinfer):
            cached.cache_clear()
        double.install(monkeypatch)
        yield double
        for cached in (flashinfer_support.why_not_installed, why_not_flashinfer):
            cached.cache_clear()

    def test_none_where_it_is_built(self, machine: FlashInferDouble) -> None:
        assert why_not_flashinfer(CUDA, torch.bfloat16) is None

    def test_weights_in_fp32(self, machine: FlashInferDouble) -> None:
        assert why_not_flashinfer(CUDA, torch.float32) == "FlashInfer's experts take bfloat16 weights and these are float32"

    @pytest.mark.parametrize("missing", ["fused_moe_90", "trtllm_utils"])
    def test_a_module_that_would_have_to_be_built(self, machine: FlashInferDouble, missing: str) -> None:
        machine.built = tuple({*machine.built} - {missing})
        assert why_not_flashinfer(CUDA, torch.bfloat16) == (
            f"FlashInfer {VERSION} has not built its {missing} and building it can take hours; run `flashinfer download-kernels`, "
            "which installs its built kernels for your CUDA"
        )

    def test_a_gpu_that_it_does_not_know(self, machine: FlashInferDouble, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert why_not_flashinfer(CUDA, torch.bfloat16) == "FlashInfer has no experts for sm_80"

    def test_not_installed(self, machine: FlashInferDouble, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flashinfer_support.importlib.util, "find_spec", lambda name: None)
        assert why_not_flashinfer(CUDA, torch.bfloat16) == "FlashInfer is not installed"


def test_auto_and_triton_change_nothing() -> None:
    assert with_experts(FUSED, "auto") is FUSED and with_experts(EAGER, "auto") is EAGER and with_experts(FUSED, "triton") is FUSED


@needs_flashinfer
@pytest.mark.gpu
class TestOnTheGpu:
    """FlashInfer itself, not tuned, against the eager reference in fp32 on the same bfloat16 weights."""

    @pytest.mark.parametrize("kind", ["even", "skewed", "empty"])
    @pytest.mark.parametrize("micros", [1, 2])
    @pytest.mark.parametrize("tokens", [1, 7, 300])
    @pytest.mark.parametrize(("experts", "topk", "width", "hidden"), [(64, 8, 768, 1024), (16, 4, 96, 512)])
    def test_many_tokens(self, experts: int, topk: int, width: int, hidden: int, tokens: int, micros: int, kind: str) -> None:
        blocks = blocks_of(micros, experts, width, hidden, torch.bfloat16, CUDA)
        x, shared = (torch.randn(tokens, hidden, device=CUDA).bfloat16() for _ in range(2))
        weights, ids = routing(kind, tokens, experts, topk, CUDA)
        want = shared.float() + moe_eager(x.float(), exact(blocks), weights, ids.long(), path="multi_micro")
        experts_of = FlashInferExperts()
        got = experts_of(x, blocks, Routing(weights, ids), shared, "multi_micro")
        eager = shared + moe_eager(x, blocks, weights, ids.long(), path="multi_micro")
        assert error(got, want) < max(1.5 * error(eager, want), 4e-3)
        assert torch.equal(got, experts_of(x, blocks, Routing(weights, ids), shared, "multi_micro")), "equal inputs must give equal bits"

    def test_one_token_of_a_decode_step(self) -> None:
        (block,) = blocks_of(1, 64, 768, 1024, torch.bfloat16, CUDA)
        one_token_is_eager(FlashInferExperts().for_one_token(block, 8), block, 8, 768, torch.bfloat16, CUDA, 1e-2)
