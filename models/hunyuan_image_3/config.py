"""The configuration of one HunyuanImage-3.0 checkpoint folder, read once, checked, and never edited.

Everything that a later part must know about sizes comes from here; foreign field names stop at this file.
A value that this pack does not implement is refused with a sentence instead of being ignored.
Imports the standard library and its own two neighbours only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .config_checks import check_sizes, refuse_other_models, refuse_unsupported
from .config_fields import ConfigError, Fields, read_json

__all__ = [
    "AlignerConfig",
    "ConfigError",
    "GenerationDefaults",
    "HunyuanImage3Config",
    "VaeConfig",
    "VitConfig",
]

COND_ATTENTIONS = ("joint_full", "full", "full_causal", "causal")
Kind = Literal["base", "instruct", "distil"]


@dataclass(frozen=True)
class VaeConfig:
    """Sizes of the 3D-convolution autoencoder; `block_out_channels` counts from the picture to the latent."""

    block_out_channels: tuple[int, ...]
    in_channels: int
    out_channels: int
    latent_channels: int
    layers_per_block: int
    ffactor_spatial: int
    ffactor_temporal: int
    scaling_factor: float
    shift_factor: float | None

    @property
    def spatial_levels(self) -> int:
        """How many levels halve height and width."""
        return self.ffactor_spatial.bit_length() - 1

    @property
    def temporal_levels(self) -> int:
        """How many of the spatial levels (the ones nearest to the latent) halve time too."""
        return self.ffactor_temporal.bit_length() - 1


@dataclass(frozen=True)
class VitConfig:
    """Sizes of the SigLIP2 tower and of the patches it is given."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    patch_size: int
    num_channels: int
    num_patches: int
    layer_norm_eps: float
    max_num_patches: int

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch."""
        return self.patch_size * self.patch_size * self.num_channels

    @property
    def table_side(self) -> int:
        """Side of the square learned position table."""
        return round(self.num_patches**0.5)


@dataclass(frozen=True)
class AlignerConfig:
    """The MLP from the vision width to the hidden size; `depth` linears with a GELU between them."""

    input_dim: int
    n_embed: int
    depth: int


@dataclass(frozen=True)
class GenerationDefaults:
    """What `generation_config.json` says; an explicit argument of the user wins over each of these."""

    sequence_template: Literal["pretrain", "instruct"]
    diff_infer_steps: int
    diff_guidance_scale: float
    flow_shift: float
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    max_length: int
    drop_think: bool
    bot_task: str
    use_system_prompt: str
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class HunyuanImage3Config:
    """Sizes and rules of one checkpoint. Tuples have one entry per layer."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    moe_intermediate_size: tuple[int, ...]
    shared_intermediate_size: tuple[int, ...]
    num_experts: tuple[int, ...]
    moe_topk: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    rope_type: Literal["2d", "default"]
    image_base_size: int
    patch_embed_hidden_dim: int
    cond_token_attn_type: Literal["joint_full", "full", "full_causal", "causal"]
    cfg_distilled: bool
    use_meanflow: bool
    dtype: Literal["bfloat16", "float32"]
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    image_token_id: int | None
    vae: VaeConfig
    vit: VitConfig
    aligner: AlignerConfig
    generation: GenerationDefaults

    @classmethod
    def from_folder(cls, path: str | Path) -> HunyuanImage3Config:
        """Read `config.json` and `generation_config.json` of a checkpoint folder.

        Raises ConfigError (a ValueError) with one sentence: no such folder or file, not JSON, another
        architecture, a missing or wrongly typed field, sizes that contradict each other, or a feature this
        pack does not implement.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder; give the checkpoint folder that contains config.json."
            )
        return cls.from_dicts(
            read_json(folder / "config.json"), read_json(folder / "generation_config.json"), where=str(folder)
        )

    @classmethod
    def from_dicts(
        cls, config: dict[str, Any], generation: dict[str, Any], *, where: str
    ) -> HunyuanImage3Config:
        """Build from the two parsed files; `where` names the folder in messages. Raises ConfigError."""
        fields = Fields(config, f"{where}/config.json")
        refuse_other_models(fields)
        refuse_unsupported(fields)
        layers = fields.integer("num_hidden_layers")
        widths = fields.per_layer("moe_intermediate_size", layers)
        shared = fields.per_layer("num_shared_expert", layers)
        max_positions = fields.integer("max_position_embeddings")
        vae = _read_vae(fields.section("vae"))
        result = cls(
            hidden_size=fields.integer("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=fields.integer("num_attention_heads"),
            num_key_value_heads=fields.integer("num_key_value_heads"),
            head_dim=fields.integer("attention_head_dim"),
            vocab_size=fields.integer("vocab_size"),
            max_position_embeddings=max_positions,
            moe_intermediate_size=widths,
            shared_intermediate_size=tuple(
                width * count for width, count in zip(widths, shared, strict=True)
            ),
            num_experts=fields.per_layer("num_experts", layers),
            moe_topk=fields.per_layer("moe_topk", layers),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=fields.number("rope_theta"),
            rope_type=fields.word("rope_type", ("2d", "default")),
            image_base_size=fields.integer("image_base_size", default=1024, smallest=256),
            patch_embed_hidden_dim=fields.integer("patch_embed_hidden_dim", default=1024),
            cond_token_attn_type=fields.word("cond_token_attn_type", COND_ATTENTIONS),
            cfg_distilled=fields.flag("cfg_distilled", default=False),
            use_meanflow=fields.flag("use_meanflow", default=False),
            # Newer writers of the folder format call the field dtype.
            dtype=fields.word("torch_dtype" if "torch_dtype" in config else "dtype", ("bfloat16", "float32")),
            bos_token_id=fields.token_id("bos_token_id"),
            eos_token_id=fields.token_id("eos_token_id"),
            pad_token_id=fields.token_id("pad_token_id"),
            image_token_id=fields.token_id("image_token_id"),
            vae=vae,
            vit=_read_vit(fields.section("vit"), fields.section("vit_processor")),
            aligner=_read_aligner(fields.section("vit_aligner")),
            generation=_read_generation(Fields(generation, f"{where}/generation_config.json"), max_positions),
        )
        check_sizes(result, fields)
        return result

    @property
    def kind(self) -> Kind:
        """Which release the folder belongs to, decided by its template and distillation flags."""
        if self.cfg_distilled:
            return "distil"
        return "instruct" if self.generation.sequence_template == "instruct" else "base"


def _read_vae(fields: Fields) -> VaeConfig:
    fields.only("downsample_match_channel", True)
    fields.only("upsample_match_channel", True)
    return VaeConfig(
        block_out_channels=fields.integers("block_out_channels"),
        in_channels=fields.integer("in_channels"),
        out_channels=fields.integer("out_channels"),
        latent_channels=fields.integer("latent_channels"),
        layers_per_block=fields.integer("layers_per_block"),
        ffactor_spatial=fields.integer("ffactor_spatial"),
        ffactor_temporal=fields.integer("ffactor_temporal"),
        scaling_factor=fields.number("scaling_factor"),
        shift_factor=fields.number("shift_factor", positive=False)
        if fields.values.get("shift_factor") is not None
        else None,
    )


def _read_vit(fields: Fields, processor: Fields) -> VitConfig:
    fields.only("hidden_act", "gelu_pytorch_tanh")
    processor.only("image_mean", [0.5, 0.5, 0.5])
    processor.only("image_std", [0.5, 0.5, 0.5])
    processor.only("resample", 2)
    processor.only("patch_size", fields.integer("patch_size"))
    return VitConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_attention_heads=fields.integer("num_attention_heads"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        patch_size=fields.integer("patch_size"),
        num_channels=fields.integer("num_channels"),
        num_patches=fields.integer("num_patches"),
        layer_norm_eps=fields.number("layer_norm_eps"),
        max_num_patches=processor.integer("max_num_patches"),
    )


def _read_aligner(fields: Fields) -> AlignerConfig:
    fields.only("projector_type", "mlp_gelu")
    return AlignerConfig(fields.integer("input_dim"), fields.integer("n_embed"), fields.integer("depth"))


def _read_generation(fields: Fields, max_positions: int) -> GenerationDefaults:
    """Absent sampling fields get the Hugging Face defaults, which the release relies on."""
    eos = fields.values.get("eos_token_id")
    return GenerationDefaults(
        sequence_template=fields.word("sequence_template", ("pretrain", "instruct"), default="pretrain"),
        diff_infer_steps=fields.integer("diff_infer_steps"),
        diff_guidance_scale=fields.number("diff_guidance_scale", positive=False),
        flow_shift=fields.number("flow_shift"),
        do_sample=fields.flag("do_sample", default=False),
        temperature=fields.number("temperature", default=1.0, positive=False),
        top_k=fields.integer("top_k", default=50, smallest=0),
        top_p=fields.number("top_p", default=1.0),
        repetition_penalty=fields.number("repetition_penalty", default=1.0),
        max_length=fields.integer("max_length", default=max_positions),
        drop_think=fields.flag("drop_think", default=False),
        bot_task=str(fields.values.get("bot_task") or "image"),
        use_system_prompt=str(fields.values.get("use_system_prompt") or "None"),
        eos_token_ids=() if eos is None else fields.integers("eos_token_id", smallest=0),
    )
