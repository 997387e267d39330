"""Weights with a role: micro views are views, and a projection without a role is refused."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.parallel.collectives import Partial
from phase_parallel.parallel.resident import Weight, project
from phase_parallel.parallel.waiting import CollectiveError


def inside(view: torch.Tensor, parent: torch.Tensor) -> bool:
    """``view`` shares the parent's storage and lies within it."""
    same = view.untyped_storage().data_ptr() == parent.untyped_storage().data_ptr()
    start = view.data_ptr() - parent.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) * view.element_size()
    return same and start >= 0 and start + last < parent.nbytes


@pytest.mark.parametrize("role", ["column_parallel", "vocab_parallel"])
@pytest.mark.parametrize("micros", [1, 2, 4])
def test_row_ranges_are_contiguous_views(role: str, micros: int) -> None:
    weight = Weight(torch.arange(8 * 3.0).reshape(8, 3), role, "site")
    for micro in range(micros):
        view = weight.micro(micro, micros)
        assert torch.equal(view.tensor, weight.tensor.chunk(micros)[micro])
        assert inside(view.tensor, weight.tensor) and view.tensor.is_contiguous()
        assert view.tensor.data_ptr() == weight.tensor.data_ptr() + micro * (8 // micros) * 3 * 4
        assert (view.role, view.site) == (role, "site")


@pytest.mark.parametrize("micros", [2, 4])
def test_column_ranges_are_strided_views(micros: int) -> None:
    weight = Weight(torch.arange(3 * 8.0).reshape(3, 8), "row_parallel", "site")
    for micro in range(micros):
        view = weight.micro(micro, micros).tensor
        assert torch.equal(view, weight.tensor.chunk(micros, dim=1)[micro])
        assert inside(view, weight.tensor) and not view.is_contiguous()
        # What a GEMM takes as the leading dimension: the whole resident row.
        assert view.stride() == (8, 1)


def test_whole_shard_and_replicated_weights_are_themselves() -> None:
    weight = Weight(torch.ones(4, 4), "row_parallel", "site")
    assert weight.micro(None, 2) is weight
    norm = Weight(torch.ones(4, 4), "replicated", "site")
    assert norm.micro(1, 2) is norm


def test_projection_type_follows_the_role() -> None:
    generator = torch.Generator().manual_seed(0)
    x, matrix = torch.randn(5, 3, generator=generator), torch.randn(4, 3, generator=generator)
    wanted = (x.double() @ matrix.double().T).float()
    for role in ("column_parallel", "vocab_parallel", "replicated"):
        torch.testing.assert_close(project(x, Weight(matrix, role, "site")), wanted)
    partial = project(x, Weight(matrix, "row_parallel", "layers.3.attn.o_proj"))
    assert isinstance(partial, Partial) and partial.site == "layers.3.attn.o_proj"


def test_micro_products_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, up, down = (
        torch.randn(5, 3, generator=generator),
        torch.randn(8, 3, generator=generator),
        torch.randn(3, 8, generator=generator),
    )
    first, second = Weight(up, "column_parallel", "up"), Weight(down, "row_parallel", "down")
    whole = project(project(hidden, first), second)._summand
    parts = [project(project(hidden, first.micro(m, 4)), second.micro(m, 4))._summand for m in range(4)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


def test_untagged_projection_is_refused() -> None:
    with pytest.raises(CollectiveError, match=r"^a projection got a bare Tensor of shape \[4, 3\] without a role; wrap it in Weight$"):
        project(torch.ones(1, 3), torch.ones(4, 3))


def test_unreduced_input_is_refused() -> None:
    weight = Weight(torch.ones(3, 3), "column_parallel", "layers.0.mlp.up")
    with pytest.raises(
        CollectiveError, match=r"^layers.0.mlp.up got the unreduced product of layers.0.attn.o_proj; call row_reduce first$"
    ):
        project(Partial(torch.ones(1, 3), "layers.0.attn.o_proj"), weight)
