"""From an official folder to one rank's model: check everything, allocate once, read only this rank's slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, get_args

import torch

from ...kernels.flashinfer_experts import ALIGNMENT, FlashInferExperts
from ...kernels.kernel_set import KERNEL_CHOICES, MOE_BACKENDS, KernelChoice, MoeBackend, check_experts, choose_kernels, with_experts
from ...kernels.moe import MOE_LAYOUTS, MOE_PATHS, MoeLayout, MoePath
from ...parallel.checkpoint import Checkpoint, CheckpointError, allocate, first_not_finite, tensor_digests
from ...parallel.collectives import Communicator
from ...parallel.plan import PHASES, REPLICA_PLANS, ParallelPlan, PlanError, PlanName, make_plan
from ...parallel.plan_choice import choose_plan, plan_on_machines
from ...parallel.slicing import ShardingTable
from ..reduction import ReductionChoice, why_not_reduction
from .config import HunyuanImage3Config
from .model import HunyuanImage3Model
from .random_weights import RandomWeights, declared
from .sharding import AROUND, ROUTER, TRUNK, VAE, sharding_table
from .token_loop import DECODE_CHOICES, DecodeChoice, choose_decode
from .weights import around_modules, order_convolutions, phase_weights

WeightDtype = Literal["auto", "bf16", "fp32"]
WEIGHT_DTYPES: tuple[WeightDtype, ...] = get_args(WeightDtype)
REDUCTION_CHOICES: tuple[ReductionChoice, ...] = get_args(ReductionChoice)
# Room for activations, KV caches and the workspace of libraries beside the weights.
DEVICE_HEADROOM = 2 << 30


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is kept and computed. ``weight_dtype`` auto follows config.json. ``decode``: how tokens are written; ``reduction``: how a step of
    that on the device adds up the ranks' summands, and with ``group`` also a step of a picture. ``moe_backend``: who computes the routed experts; auto
    follows ``kernels``."""

    weight_dtype: WeightDtype = "auto"
    moe_layout: MoeLayout = "micro_major"
    moe_path: MoePath = "multi_micro"
    kernels: KernelChoice = "auto"
    decode: DecodeChoice = "auto"
    reduction: ReductionChoice = "auto"
    moe_backend: MoeBackend = "auto"

    def __post_init__(self) -> None:
        for what, value, choices in (
            ("weight dtype", self.weight_dtype, WEIGHT_DTYPES),
            ("MoE layout", self.moe_layout, MOE_LAYOUTS),
            ("MoE path", self.moe_path, MOE_PATHS),
            ("kernels", self.kernels, KERNEL_CHOICES),
            ("decode", self.decode, DECODE_CHOICES),
            ("reduction", self.reduction, REDUCTION_CHOICES),
            ("moe_backend", self.moe_backend, MOE_BACKENDS),
        ):
            if value not in choices:
                raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(choices)}")
        if self.moe_layout == "expert_major" and self.moe_path == "two_dispatch":
            raise ValueError(
                "MoE path two_dispatch runs one dispatch per micro shard, which expert_major has merged; choose micro_major"
            )
        if self.moe_backend == "flashinfer" and self.moe_layout == "expert_major":
            raise ValueError("moe_backend flashinfer needs each micro shard in one piece, but expert_major keeps them side by side; choose micro_major")

    def check_device(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        """Raises ValueError when ``device`` cannot follow a choice for trunk weights of ``dtype``."""
        choose_kernels(device, self.kernels)
        check_experts(device, self.moe_backend, self.kernels, dtype)
        on_device, reason = choose_decode(device, self.decode, self.kernels)
        if self.reduction in ("peer", "flashinfer") and not on_device:
            raise ValueError(f"reduction {self.reduction} is for tokens that are written on the device, but decode is {reason}; choose reduction auto")
        why_not = why_not_reduction(device, self.reduction)
        if why_not is not None:
            raise ValueError(why_not)


def trunk_dtype(config: HunyuanImage3Config, choice: WeightDtype) -> torch.dtype:
    name = {"auto": config.dtype, "bf16": "bfloat16", "fp32": "float32"}[choice]
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def kind_dtypes(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The router and the VAE stay fp32 (spec 2.7), the rest follows the trunk."""
    return {TRUNK: dtype, AROUND: dtype, ROUTER: torch.float32, VAE: torch.float32}


def load_model(
    folder: str | Path,
    plan: ParallelPlan,
    comm: Communicator,
    options: LoadOptions,
    *,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> HunyuanImage3Model:
    """Collective over the plan's ranks (replicas compare their weights at the end).

    Raises:
        ValueError (ConfigError, CheckpointError, ShardingError, PlanError): before memory is spent; the sentence says what to do.
    """
    options.check_device(device)
    config = HunyuanImage3Config.from_folder(folder)
    dtype = trunk_dtype(config, options.weight_dtype)
    options.check_device(device, dtype)
    check_experts_fit(config, plan, options)
    source = _weights_of(folder, config, plan)
    table = sharding_table(config, plan, options.moe_layout)
    source.check(table)
    dtypes = kind_dtypes(dtype)
    need = table.bytes_resident({kind: torch.empty((), dtype=d).element_size() for kind, d in dtypes.items()})
    check_device_memory(device, need, plan)
    resident = allocate(table, dtypes, device)
    source.load(table, resident, progress=progress)
    refuse_nan(resident)
    compare_replicas(table, resident, comm)
    return build_model(config, plan, comm, options, table, resident, device=device, dtype=dtype)


def _weights_of(folder: str | Path, config: HunyuanImage3Config, plan: ParallelPlan) -> Checkpoint | RandomWeights:
    if declared(folder):
        return RandomWeights(folder, shard=plan.shard, layers=config.num_hidden_layers)
    return Checkpoint(folder)


def build_model(
    config: HunyuanImage3Config,
    plan: ParallelPlan,
    comm: Communicator,
    options: LoadOptions,
    table: ShardingTable,
    resident: dict[str, torch.Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> HunyuanImage3Model:
    """A model over tensors that are already in their final place."""
    kinds = {name: target.kind for name, target in table.targets.items()}
    options.check_device(device, dtype)
    kernels = with_experts(choose_kernels(device, options.kernels)[0], options.moe_backend)
    weights = {
        phase: phase_weights(config, plan, resident, phase=phase, layout=options.moe_layout, path=options.moe_path, kernels=kernels)
        for phase in PHASES
    }
    if isinstance(kernels.experts, FlashInferExperts):
        kernels.experts.tune((layer.experts, layer.topk, layer.moe_path) for phase in PHASES for layer in weights[phase].layers)
    if device.type == "cuda":
        order_convolutions(resident, kinds)
    around = around_modules(config, resident, kinds, kernels)
    return HunyuanImage3Model(
        config, plan, comm, weights, around, device=device, dtype=dtype, resident=resident, reduction=options.reduction
    )


def check_experts_fit(config: HunyuanImage3Config, plan: ParallelPlan, options: LoadOptions) -> None:
    """Raises ValueError when ``moe_backend`` cannot compute experts of this rank's width."""
    if options.moe_backend != "flashinfer":
        return
    for width in {config.hidden_size, *(width // plan.ar_tp for width in config.moe_intermediate_size)}:
        if width % ALIGNMENT:
            raise ValueError(
                f"moe_backend flashinfer needs sizes in multiples of {ALIGNMENT}, and with {plan.ar_tp} ranks one of this model's is {width}; "
                "choose moe_backend auto"
            )


def check_device_memory(device: torch.device, need: int, plan: ParallelPlan) -> None:
    """A device that is too small is refused before the first byte, with needed and free GB."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if need + DEVICE_HEADROOM > free:
        raise CheckpointError(
            f"rank {plan.rank} needs {(need + DEVICE_HEADROOM) / 1e9:.1f} GB for plan {plan.name} but {free / 1e9:.1f} GB of its GPU are free; "
            "close other programs, or choose plan tp with more ranks"
        )


def refuse_nan(resident: dict[str, torch.Tensor]) -> None:
    """A damaged download shows as NaN or infinity long before it shows as a picture."""
    name = first_not_finite(resident)
    if name is not None:
        raise CheckpointError(f"weights of {name} hold NaN or infinity; the checkpoint is damaged, download it again")


def compare_replicas(table: ShardingTable, resident: dict[str, torch.Tensor], comm: Communicator) -> None:
    """Ranks that hold the same shard must hold the same bits; replicated tensors must agree on all ranks."""
    if comm.plan.world_size == 1:
        return
    names, sums = zip(*tensor_digests(resident), strict=True)
    by_rank = comm.control_gather([s - (1 << 63) for s in sums])
    for number, name in enumerate(names):
        everywhere = table.targets[name].role == "replicated"
        for rank, values in enumerate(by_rank):
            first = 0 if everywhere else rank % comm.plan.storage_tp
            if values[number] != by_rank[first][number]:
                raise CheckpointError(
                    f"rank {rank} read other weights for {name} than rank {first}; the model folders of the ranks differ, use one folder"
                )


def check_folder(folder: str | Path, plan: ParallelPlan, options: LoadOptions) -> tuple[int, int]:
    """Everything that can be wrong with a folder, a plan and options, found on one rank before any collective.

    Returns the bytes of weights that are split and that are replicated, for the whole model.
    """
    config = HunyuanImage3Config.from_folder(folder)
    check_experts_fit(config, plan, options)
    table = sharding_table(config, plan, options.moe_layout)
    _weights_of(folder, config, plan).check(table)
    return weight_bytes(config, options.weight_dtype)


def weight_bytes(config: HunyuanImage3Config, choice: WeightDtype) -> tuple[int, int]:
    """Bytes of split and of replicated weights of the whole model, for choosing a plan."""
    table = sharding_table(config, make_plan("single", world_size=1), "micro_major")
    sizes = {kind: torch.empty((), dtype=dtype).element_size() for kind, dtype in kind_dtypes(trunk_dtype(config, choice)).items()}
    total = table.bytes_resident(sizes)
    replicated = sum(prod(t.shape) * sizes[t.kind] for t in table.targets.values() if t.role == "replicated")
    return total - replicated, replicated


def resolve_plan(
    folder: str | Path,
    *,
    world_size: int,
    free_bytes_per_rank: int,
    name: str = "auto",
    denoise: str = "auto",
    attention: str = "auto",
    weight_dtype: WeightDtype = "auto",
    at_start: PlanName | None = None,
    machine_ranks: int | None = None,
) -> tuple[ParallelPlan, str]:
    """The plan that the loader's choices mean here, and why. Rank 0 decides; the others receive the result. What ``denoise`` and ``attention``
    leave open is chosen for each run, see :mod:`.topology_choice`; until then the plan has its usual ones.

    ``at_start``: what ``auto`` means in this launch, if its user has said so. ``machine_ranks``: ranks of each machine, where there are several.

    Raises:
        PlanError: a choice does not fit the number of ranks or the memory.
    """
    reason = f"{name}: chosen in the loader"
    if name == "auto" and at_start is not None:
        name, reason = at_start, f"{at_start}: chosen at start"
    elif name == "auto":
        split, replicated = weight_bytes(HunyuanImage3Config.from_folder(folder), weight_dtype)
        name, reason = choose_plan(
            world_size, free_bytes_per_rank=free_bytes_per_rank, sharded_bytes=split, replicated_bytes=replicated, machine_ranks=machine_ranks
        )
    if name not in REPLICA_PLANS and denoise in ("sp", "cfg", "cfg_sp"):
        raise PlanError(f"denoise {denoise} needs plan hybrid or replicated, and the plan is {name} ({reason}); set denoise to auto or start 4 ranks")
    plan = plan_on_machines(
        name,
        world_size=world_size,
        machine_ranks=machine_ranks or world_size,
        denoise=None if denoise == "auto" else denoise,
        attention="ulysses" if attention == "auto" else attention,
    )
    if attention == "auto" and not plan.splits_heads(HunyuanImage3Config.from_folder(folder).num_key_value_heads):
        plan = plan.denoising(plan.denoise, "kv_gather")  # any number of heads can be gathered
    return plan, reason
