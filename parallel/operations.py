"""Operations by name: what rank 0 can ask all ranks to do together, and how one such call runs on a rank.

A model registers its operations; nothing here knows one. An operation is SPMD: every rank runs it with equal
inputs, which it must not write into, and must end with equal results, except what it puts under the key
``measured``, which is this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from .cluster import Cluster
from .plan import ParallelPlan, make_plan
from .section import Report, Section, SectionKey, digest_of, never_cancelled, open_section

Tensors = dict[str, torch.Tensor]
MEASURED = "measured"
"""Key of a result for times and rates: they differ between ranks, so ranks do not compare them."""


@dataclass(frozen=True)
class OperationContext:
    """What an operation gets besides its inputs."""

    cluster: Cluster
    section: Section
    plan: ParallelPlan
    device: torch.device


Operation = Callable[[OperationContext, dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]]
_operations: dict[str, Operation] = {}


def register(name: str) -> Callable[[Operation], Operation]:
    """Decorator. A name belongs to one operation; the model's name is its first part, as in
    ``hunyuan_image_3.load``.
    """

    def add(operation: Operation) -> Operation:
        assert name not in _operations, f"operation {name} is registered twice"
        _operations[name] = operation
        return operation

    return add


def lookup(name: str) -> Operation:
    if name not in _operations:
        raise RuntimeError(
            f"operation {name} is unknown; all ranks must run the same pack, restart the launch"
        )
    return _operations[name]


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    def empty(self, device: torch.device) -> torch.Tensor:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise RuntimeError(f"tensor {self.name} has dtype {self.dtype!r}, which this torch does not know")
        return torch.empty(tuple(self.shape), dtype=dtype, device=device)


@dataclass(frozen=True)
class OperationCall:
    """Rank 0's announcement of one section; JSON in the store, so every field is JSON."""

    number: int
    generation: int
    op: str
    args: dict[str, Any]
    tensors: tuple[TensorSpec, ...]
    key: SectionKey
    plan: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Without copies of the arguments, which can be long: it is written out at once."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"tensors": [asdict(spec) for spec in self.tensors], "key": asdict(self.key)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> OperationCall:
        known = {field.name: value[field.name] for field in fields(cls)}
        known["tensors"] = tuple(TensorSpec(**spec) for spec in value["tensors"])
        known["key"] = SectionKey(**value["key"])
        return cls(**known)

    def plan_on(self, rank: int) -> ParallelPlan:
        return make_plan(**{**self.plan, "rank": rank})


def describe_tensors(tensors: Tensors) -> tuple[TensorSpec, ...]:
    """In the order in which they are broadcast."""
    return tuple(
        TensorSpec(name, str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape))
        for name in sorted(tensors)
    )


def run_call(
    cluster: Cluster,
    call: OperationCall,
    tensors: Tensors | None,
    *,
    cancelled: Callable[[], bool] = never_cancelled,
    report: Report | None = None,
) -> tuple[dict[str, Any], Tensors]:
    """One section of ``call`` on this rank. Rank 0 gives the ``tensors``; the others receive them.

    Raises: as :func:`~.section.open_section`.
    """
    plan = call.plan_on(cluster.rank)
    with open_section(
        cluster,
        call.key,
        plan,
        phase=call.op.rpartition(".")[2],
        number=call.number,
        generation=call.generation,
        cancelled=cancelled,
        report=report,
    ) as section:
        operation = lookup(call.op)
        inputs = _receive(cluster, section, call.tensors, tensors)
        section.communicator.await_device("receiving its inputs")
        # The key was made from what rank 0 sent; this is what arrived.
        section.agree("input", digest_of(call.args, inputs))
        context = OperationContext(cluster, section, plan, cluster.device)
        result, outputs = operation(context, call.args, inputs)
        shared = {name: value for name, value in result.items() if name != MEASURED}
        section.exit(digest_of(shared, outputs))
    return result, outputs


def _receive(
    cluster: Cluster, section: Section, specs: tuple[TensorSpec, ...], tensors: Tensors | None
) -> Tensors:
    received: Tensors = {}
    for spec in specs:
        if tensors is not None:
            tensor = tensors[spec.name].to(cluster.device).contiguous()
        else:
            tensor = spec.empty(cluster.device)
        received[spec.name] = section.communicator.broadcast(tensor, f"{section.key.node_id}.{spec.name}")
    return received
