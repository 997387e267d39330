"""Every tensor of a checkpoint by name with its shape, computed from the configuration alone.

The one list that the sharding table, the synthetic checkpoint writer and the tests are checked against.
Shapes are those of the files (nothing is split over ranks here). Imports the standard library only.

Legend: H hidden size, D head dim, G key/value heads, I expert width, E experts, C latent channels.
"""

from __future__ import annotations

from collections.abc import Iterator

from .config import HunyuanImage3Config, VaeConfig, VitConfig

Shape = tuple[int, ...]
TIMESTEP_FREQUENCIES = 256


def checkpoint_shapes(config: HunyuanImage3Config) -> dict[str, Shape]:
    """All keys of the checkpoint folder, in file order, with their shapes."""
    shapes: dict[str, Shape] = {}
    for group in (
        _trunk(config),
        _timestep_embedders(config),
        _image_projections(config),
        _vision_tower(config.vit),
        _aligner(config),
        _vae_encoder(config.vae),
        _vae_decoder(config.vae),
    ):
        for key, shape in group:
            assert key not in shapes, key
            shapes[key] = shape
    return shapes


def _both(name: str, weight: Shape) -> Iterator[tuple[str, Shape]]:
    """Weight and bias of one layer; the bias has the weight's first dimension."""
    yield f"{name}.weight", weight
    yield f"{name}.bias", weight[:1]


def _trunk(config: HunyuanImage3Config) -> Iterator[tuple[str, Shape]]:
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    yield "model.wte.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.qkv_proj.weight", ((heads + 2 * kv_heads) * dim, hidden)
        yield f"{at}.self_attn.query_layernorm.weight", (dim,)
        yield f"{at}.self_attn.key_layernorm.weight", (dim,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, heads * dim)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.mlp.gate.wg.weight", (config.num_experts[layer], hidden)
        yield from _mlp(f"{at}.mlp.shared_mlp", config.shared_intermediate_size[layer], hidden)
        for expert in range(config.num_experts[layer]):
            yield from _mlp(f"{at}.mlp.experts.{expert}", config.moe_intermediate_size[layer], hidden)
    yield "model.ln_f.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)


def _mlp(name: str, width: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.gate_and_up_proj.weight", (2 * width, hidden)
    yield f"{name}.down_proj.weight", (hidden, width)


def _timestep_embedders(config: HunyuanImage3Config) -> Iterator[tuple[str, Shape]]:
    names = ["timestep_emb", "time_embed", "time_embed_2"]
    names += ["guidance_emb"] * config.cfg_distilled + ["timestep_r_emb"] * config.use_meanflow
    for name in names:
        yield from _both(f"{name}.mlp.0", (config.hidden_size, TIMESTEP_FREQUENCIES))
        yield from _both(f"{name}.mlp.2", (config.hidden_size, config.hidden_size))


def _image_projections(config: HunyuanImage3Config) -> Iterator[tuple[str, Shape]]:
    hidden, inner, latent = config.hidden_size, config.patch_embed_hidden_dim, config.vae.latent_channels
    yield from _both("patch_embed.model.0", (inner, latent, 3, 3))
    yield from _modulated_block("patch_embed.model.1", inner, hidden, hidden)
    yield from _modulated_block("final_layer.model.0", hidden, inner, hidden)
    yield from _both("final_layer.model.1.0", (inner,))
    yield from _both("final_layer.model.1.2", (latent, inner, 3, 3))


def _modulated_block(name: str, source: int, target: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield from _both(f"{name}.in_layers.0", (source,))
    yield from _both(f"{name}.in_layers.2", (target, source, 3, 3))
    yield from _both(f"{name}.emb_layers.1", (2 * target, hidden))
    yield from _both(f"{name}.out_layers.0", (target,))
    yield from _both(f"{name}.out_layers.3", (target, target, 3, 3))
    if source != target:  # otherwise the skip is the identity and has no weights
        yield from _both(f"{name}.skip_connection", (target, source, 1, 1))


def _vision_tower(vit: VitConfig) -> Iterator[tuple[str, Shape]]:
    width, inner = vit.hidden_size, vit.intermediate_size
    yield from _both("vision_model.embeddings.patch_embedding", (width, vit.patch_dim))
    yield "vision_model.embeddings.position_embedding.weight", (vit.num_patches, width)
    for layer in range(vit.num_hidden_layers):
        at = f"vision_model.encoder.layers.{layer}"
        yield from _both(f"{at}.layer_norm1", (width,))
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _both(f"{at}.self_attn.{name}", (width, width))
        yield from _both(f"{at}.layer_norm2", (width,))
        yield from _both(f"{at}.mlp.fc1", (inner, width))
        yield from _both(f"{at}.mlp.fc2", (width, inner))
    yield from _both("vision_model.post_layernorm", (width,))
    # The pooling head is in the files, but nothing uses its output.
    yield "vision_model.head.probe", (1, 1, width)
    yield "vision_model.head.attention.in_proj_weight", (3 * width, width)
    yield "vision_model.head.attention.in_proj_bias", (3 * width,)
    yield from _both("vision_model.head.attention.out_proj", (width, width))
    yield from _both("vision_model.head.layernorm", (width,))
    yield from _both("vision_model.head.mlp.fc1", (inner, width))
    yield from _both("vision_model.head.mlp.fc2", (width, inner))


def _aligner(config: HunyuanImage3Config) -> Iterator[tuple[str, Shape]]:
    width = config.aligner.input_dim
    for linear in range(config.aligner.depth):
        yield from _both(f"vision_aligner.layers.{2 * linear}", (config.aligner.n_embed, width))
        width = config.aligner.n_embed


def _vae_encoder(vae: VaeConfig) -> Iterator[tuple[str, Shape]]:
    widths = vae.block_out_channels
    yield from _conv3("vae.encoder.conv_in", widths[0], vae.in_channels)
    for level, width in enumerate(widths):
        for block in range(vae.layers_per_block):
            yield from _vae_block(f"vae.encoder.down.{level}.block.{block}", width)
        if level < vae.spatial_levels:
            fold = 4 * (2 if level >= vae.spatial_levels - vae.temporal_levels else 1)
            yield from _conv3(f"vae.encoder.down.{level}.downsample.conv", widths[level + 1] // fold, width)
    yield from _vae_middle("vae.encoder.mid", widths[-1])
    yield from _both("vae.encoder.norm_out", (widths[-1],))
    yield from _conv3("vae.encoder.conv_out", 2 * vae.latent_channels, widths[-1])


def _vae_decoder(vae: VaeConfig) -> Iterator[tuple[str, Shape]]:
    widths = vae.block_out_channels[::-1]
    yield from _conv3("vae.decoder.conv_in", widths[0], vae.latent_channels)
    yield from _vae_middle("vae.decoder.mid", widths[0])
    for level, width in enumerate(widths):
        for block in range(vae.layers_per_block + 1):
            yield from _vae_block(f"vae.decoder.up.{level}.block.{block}", width)
        if level < vae.spatial_levels:
            unfold = 4 * (2 if level < vae.temporal_levels else 1)
            yield from _conv3(f"vae.decoder.up.{level}.upsample.conv", widths[level + 1] * unfold, width)
    yield from _both("vae.decoder.norm_out", (widths[-1],))
    yield from _conv3("vae.decoder.conv_out", vae.out_channels, widths[-1])


def _conv3(name: str, target: int, source: int) -> Iterator[tuple[str, Shape]]:
    yield from _both(name, (target, source, 3, 3, 3))


def _vae_block(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    for number in (1, 2):
        yield from _both(f"{name}.norm{number}", (width,))
        yield from _conv3(f"{name}.conv{number}", width, width)


def _vae_middle(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield from _vae_block(f"{name}.block_1", width)
    yield from _both(f"{name}.attn_1.norm", (width,))
    for projection in ("q", "k", "v", "proj_out"):
        yield from _both(f"{name}.attn_1.{projection}", (width, width, 1, 1, 1))
    yield from _vae_block(f"{name}.block_2", width)
