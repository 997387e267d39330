"""From resident tensors to the weights of a phase: the whole shard for denoise, a micro view of it for prefill and decode. Views, never copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...kernels.kernel_set import EAGER, KernelSet
from ...kernels.moe import ExpertBlock, MoeLayout, MoePath
from ...parallel.plan import ParallelPlan, Phase
from ...parallel.resident import Weight
from .blocks import FinalLayer, PatchEmbed, ResBlock, TimestepEmbedder
from .config import HunyuanImage3Config
from .sharding import AROUND, VAE
from .transformer import LayerWeights, TrunkWeights
from .vae import Vae
from .vision import Aligner, VisionTower


class Around(nn.Module):
    """Everything around the trunk, replicated on every rank; attribute names are the checkpoint's prefixes."""

    def __init__(self, config: HunyuanImage3Config):
        super().__init__()
        hidden = config.hidden_size
        self.timestep_emb = TimestepEmbedder(hidden)
        self.time_embed = TimestepEmbedder(hidden)
        self.time_embed_2 = TimestepEmbedder(hidden)
        self.guidance_emb = TimestepEmbedder(hidden) if config.cfg_distilled else None
        self.timestep_r_emb = TimestepEmbedder(hidden) if config.use_meanflow else None
        sizes = {"inner_channels": config.patch_embed_hidden_dim, "hidden_size": hidden}
        self.patch_embed = PatchEmbed(config.vae.latent_channels, **sizes)
        self.final_layer = FinalLayer(config.vae.latent_channels, **sizes)
        self.vision_model = VisionTower(config.vit)
        self.vision_aligner = Aligner(config.aligner)
        self.vae = Vae(config.vae)


def around_modules(
    config: HunyuanImage3Config, resident: Mapping[str, torch.Tensor], kinds: Mapping[str, str], kernels: KernelSet = EAGER
) -> Around:
    """Modules whose parameters *are* the resident tensors of kinds ``around`` and ``vae`` (no second copy)."""
    with torch.device("meta"):
        modules = Around(config)
    mine = {name: tensor for name, tensor in resident.items() if kinds[name] in (AROUND, VAE)}
    modules.load_state_dict(mine, assign=True, strict=True)
    for module in modules.modules():
        if isinstance(module, ResBlock):
            module.norm_silu = kernels.norm_silu
    return modules.eval().requires_grad_(False)


def order_convolutions(resident: dict[str, torch.Tensor], kinds: Mapping[str, str]) -> None:
    """Weights of the convolutions around the trunk with the channels last, in place of what was there: cuDNN wants them so and would turn 0.4 GB of them
    in every step. Values stay."""
    for name, kind in kinds.items():
        if kind == AROUND and resident[name].dim() == 4:
            resident[name] = resident[name].contiguous(memory_format=torch.channels_last)


def phase_weights(
    config: HunyuanImage3Config,
    plan: ParallelPlan,
    resident: Mapping[str, torch.Tensor],
    *,
    phase: Phase,
    layout: MoeLayout,
    path: MoePath,
    kernels: KernelSet = EAGER,
) -> TrunkWeights:
    """Trunk weights of ``phase``, for denoise the whole shard; every tensor shares storage with ``resident``."""
    micro, count = None if phase == "denoise" else plan.topology(phase).micro, plan.micro_count

    def weight(name: str, role: str, site: str) -> Weight:
        return Weight(resident[name], role, site).micro(micro, count)

    layers = []
    for index in range(config.num_hidden_layers):
        at = f"layers.{index}"
        layers.append(
            LayerWeights(
                site=at,
                input_layernorm=resident[f"{at}.input_layernorm"],
                qkv_proj=weight(f"{at}.qkv_proj", "column_parallel", f"{at}.attn.qkv_proj"),
                query_layernorm=resident[f"{at}.query_layernorm"],
                key_layernorm=resident[f"{at}.key_layernorm"],
                o_proj=weight(f"{at}.o_proj", "row_parallel", f"{at}.attn.o_proj"),
                post_attention_layernorm=resident[f"{at}.post_attention_layernorm"],
                router=resident[f"{at}.router"],
                topk=config.moe_topk[index],
                shared_gate_and_up=weight(
                    f"{at}.shared_gate_and_up", "column_parallel", f"{at}.mlp.shared_gate_and_up"
                ),
                shared_down=weight(f"{at}.shared_down", "row_parallel", f"{at}.mlp.shared_down"),
                shared_micros=count if micro is None else 1,
                experts=expert_blocks(resident[f"{at}.experts_w1"], resident[f"{at}.experts_w2"], layout, micro, count),
                moe_path=path,
            )
        )
    wte = weight("wte", "vocab_parallel", "wte")
    return TrunkWeights(
        wte=wte,
        lm_head=weight("lm_head", "vocab_parallel", "lm_head"),
        vocab_start=(plan.shard if micro is None else plan.logical_tp_rank) * wte.tensor.shape[0],
        ln_f=resident["ln_f"],
        layers=tuple(layers),
        head_dim=config.head_dim,
        query_group=config.num_attention_heads // config.num_key_value_heads,
        eps=config.rms_norm_eps,
        kernels=kernels,
    )


def expert_blocks(
    w1: torch.Tensor, w2: torch.Tensor, layout: MoeLayout, micro: int | None, micro_count: int
) -> tuple[ExpertBlock, ...]:
    """Expert weights of one layer as blocks (see ``kernels/moe.py``); ``micro`` None means all micro shards."""
    if layout == "micro_major":
        chosen = range(micro_count) if micro is None else (micro,)
        return tuple(ExpertBlock(w1[m], w2[m], 1) for m in chosen)
    if micro is None:
        return (ExpertBlock(w1, w2, micro_count),)
    rows, columns = w1.shape[1] // micro_count, w2.shape[2] // micro_count
    return (ExpertBlock(w1.narrow(1, micro * rows, rows), w2.narrow(2, micro * columns, columns), 1),)
