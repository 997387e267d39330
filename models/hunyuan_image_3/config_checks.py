"""What a configuration must satisfy: the right model, implemented features, sizes that fit.

Imports the standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config_fields import ConfigError, Fields

if TYPE_CHECKING:
    from .config import HunyuanImage3Config, VaeConfig

ARCHITECTURE = "HunyuanImage3ForCausalMM"
GROUP_NORM_GROUPS = 32


# What would change the arithmetic; an absent field means the value that the release has.
_ONLY = {
    "use_mla": False,
    "use_cla": False,
    "add_classification_head": False,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "group_limited_greedy": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "use_mixed_mlp_moe": True,
    "norm_topk_prob": True,
    "norm_type": "rms",
    "hidden_act": "silu",
    "moe_layer_num_skipped": 0,
    "patch_size": 1,
    "img_proj_type": "unet",
    "cond_image_type": "vae_vit",
    "vae_type": "hunyuan-image-vae-v1",
}


def refuse_other_models(fields: Fields) -> None:
    """Raise ConfigError for another architecture and for quantised files."""
    architectures = fields.values.get("architectures") or []
    if ARCHITECTURE not in architectures and fields.values.get("model_type") != "hunyuan_image_3_moe":
        found = architectures or fields.values.get("model_type") or "nothing"
        raise ConfigError(
            f"{fields.where} describes {found}, but this pack runs {ARCHITECTURE}; "
            "choose a HunyuanImage-3.0 folder."
        )
    if fields.values.get("quantization_config") is not None:
        raise ConfigError(
            f"{fields.where} has a quantization_config, but quantised checkpoints are not supported; "
            "use the bfloat16 release."
        )


def refuse_unsupported(fields: Fields) -> None:
    """Raise ConfigError for features that this pack does not implement."""
    for name, only in _ONLY.items():
        fields.only(name, only)
    scaling = fields.values.get("routed_scaling_factor")
    if scaling not in (None, False, 1):
        fields.refuse("routed_scaling_factor", scaling, "false")
    rope = fields.values.get("rope_scaling")
    if rope is not None and (not isinstance(rope, dict) or rope.get("type") != "custom"):
        fields.refuse("rope_scaling", rope, "type custom")
    if fields.flag("use_meanflow", default=False) and not fields.flag("cfg_distilled", default=False):
        raise ConfigError(
            f"{fields.where} sets use_meanflow without cfg_distilled, which no release does; "
            "set both or none."
        )


def check_sizes(config: HunyuanImage3Config, fields: Fields) -> None:
    """Raise ConfigError for sizes that contradict each other; they would fail deep inside a network."""
    vae, vit, aligner = config.vae, config.vit, config.aligner
    fields.only("vae_downsample_factor", [vae.ffactor_spatial] * 2)
    fields.only("vit_downsample_factor", [vit.patch_size] * 2)
    groups = ("the group norm groups", GROUP_NORM_GROUPS)
    kv_heads = ("num_key_value_heads", config.num_key_value_heads)
    vit_heads = ("vit.num_attention_heads", vit.num_attention_heads)
    moments = ("2 * vae.latent_channels", 2 * vae.latent_channels)
    divides = [
        ("num_attention_heads", config.num_attention_heads, *kv_heads),
        ("attention_head_dim", config.head_dim, "the two rotary halves", 2),
        ("image_base_size", config.image_base_size, "the steps of the size table", 16),
        ("the size table's alignment", 16, "vae.ffactor_spatial", vae.ffactor_spatial),
        ("hidden_size", config.hidden_size, *groups),
        ("patch_embed_hidden_dim", config.patch_embed_hidden_dim, *groups),
        ("vit.hidden_size", vit.hidden_size, *vit_heads),
        ("vae.block_out_channels[-1]", vae.block_out_channels[-1], *moments),
        *(("vae.block_out_channels", width, *groups) for width in vae.block_out_channels),
    ]
    for name, value, by_name, by in divides:
        if value % by:
            raise ConfigError(
                f"{fields.where}: {name} {value} does not divide by {by_name} ({by}); the file is damaged."
            )
    levels = len(vae.block_out_channels)
    equal = [
        ("vit_aligner.n_embed", aligner.n_embed, "hidden_size", config.hidden_size),
        ("vit_aligner.input_dim", aligner.input_dim, "vit.hidden_size", vit.hidden_size),
        ("vit.num_patches", vit.num_patches, "a square number", vit.table_side**2),
        ("vae.ffactor_spatial", vae.ffactor_spatial, "a power of two", 2**vae.spatial_levels),
        ("vae.ffactor_temporal", vae.ffactor_temporal, "a power of two", 2**vae.temporal_levels),
        ("levels in vae.block_out_channels", levels, "log2(ffactor_spatial) + 1", vae.spatial_levels + 1),
    ]
    for name, value, other_name, other in equal:
        if value != other:
            raise ConfigError(
                f"{fields.where}: {name} {value} must equal {other_name} ({other}); the file is damaged."
            )
    for layer, (experts, topk) in enumerate(zip(config.num_experts, config.moe_topk, strict=True)):
        if topk > experts:
            raise ConfigError(
                f"{fields.where}: moe_topk {topk} exceeds num_experts {experts} in layer {layer}; "
                "the file is damaged."
            )
    _check_vae_folds(vae, fields)


def _check_vae_folds(vae: VaeConfig, fields: Fields) -> None:
    """Down- and up-sampling move space and time into channels; the widths on both sides must fit that."""
    widths = vae.block_out_channels
    for level in range(vae.spatial_levels):
        fold = 4 * (2 if level >= vae.spatial_levels - vae.temporal_levels else 1)
        near, far = widths[level], widths[level + 1]
        if far % fold or fold * near % far:
            raise ConfigError(
                f"{fields.where}: vae.block_out_channels {near} then {far} do not fit a space-to-channel "
                f"fold of {fold}; "
                "the file is damaged."
            )
