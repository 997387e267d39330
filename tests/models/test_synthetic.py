"""Synthetic checkpoints: the folder is complete, spread over shards, reproducible, and its weights behave."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.folder_format import plan_shards
from phase_parallel.models.hunyuan_image_3.keys import checkpoint_shapes
from phase_parallel.models.hunyuan_image_3.sequence import build_text_row, dense_mask, rope_tables
from phase_parallel.models.hunyuan_image_3.synthetic import (
    SyntheticError,
    SyntheticSpec,
    write_checkpoint,
    write_settings,
)
from phase_parallel.models.hunyuan_image_3.text_rules import StageRules, cot_from_tokens, sample_token
from phase_parallel.models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from phase_parallel.models.hunyuan_image_3.vae import Vae

TEXTS = {"prompt": "a cat", "system_prompt": None, "cot_text": None, "cond_images": []}


def read_all(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            tensors |= {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118 - not a dict
    return tensors


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "instruct"
    write_checkpoint(folder, SyntheticSpec(kind="instruct", max_shard_bytes=1 << 20))
    return folder


@pytest.mark.parametrize(
    ("kind", "dtype"), [("base", "bfloat16"), ("instruct", "float32"), ("distil", "bfloat16")]
)
def test_folder_is_complete(tmp_path: Path, kind, dtype) -> None:
    folder = tmp_path / kind
    spec = SyntheticSpec(kind=kind, dtype=dtype, head_dim=8, latent_channels=8, vocab=200, layers=1)
    config = write_checkpoint(folder, spec)
    assert config == HunyuanImage3Config.from_folder(folder)
    assert config.kind == kind
    tokenizer = HunyuanTokenizer.from_folder(folder, config)
    assert len(tokenizer.ratio_ids) == (33 if kind == "base" else 37)
    tensors = read_all(folder)
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == checkpoint_shapes(config)
    for key, tensor in tensors.items():
        wanted = torch.float32 if dtype == "float32" or key.startswith("vae.") else torch.bfloat16
        assert tensor.dtype == wanted, key
        assert tensor.isfinite().all(), key
        assert tensor.float().std() > 0, key
    assert (folder / "system_prompt.py").exists() == (kind != "base")


def test_index_accounts_for_every_tensor_and_spreads_experts(instruct: Path) -> None:
    index = json.loads((instruct / "model.safetensors.index.json").read_text())
    tensors = read_all(instruct)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    files = set(index["weight_map"].values())
    assert files == {file.name for file in instruct.glob("*.safetensors")}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        assert len({file for key, file in index["weight_map"].items() if key.startswith(prefix)}) > 1
    for name, file in index["weight_map"].items():
        with safe_open(instruct / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118 - not a dict


def test_shards_stay_below_the_limit_unless_one_tensor_exceeds_it() -> None:
    size = {"a": 5, "mlp.experts.0.x": 3, "mlp.experts.1.x": 3, "b": 20, "c": 4}
    shards = plan_shards(size, 8)
    assert shards == [["a", "mlp.experts.0.x"], ["b"], ["c", "mlp.experts.1.x"]]


def test_values_follow_the_seed_and_not_the_shards(instruct: Path, tmp_path: Path) -> None:
    spec = SyntheticSpec(kind="instruct", max_shard_bytes=3 << 20)
    progress: list[tuple[int, int]] = []
    write_checkpoint(tmp_path / "same", spec, progress=lambda *counts: progress.append(counts))
    write_checkpoint(tmp_path / "other", replace(spec, seed=1))
    same, other, first = read_all(tmp_path / "same"), read_all(tmp_path / "other"), read_all(instruct)
    assert all(torch.equal(same[key], first[key]) for key in first)
    assert not any(torch.equal(other[key], first[key]) for key in first)
    assert progress[-1][0] == progress[-1][1] == sum(tensor.nbytes for tensor in same.values())


def test_vae_gives_a_picture_that_is_not_flat(instruct: Path) -> None:
    config = HunyuanImage3Config.from_folder(instruct)
    vae = Vae(config.vae).requires_grad_(False)
    weights = read_all(instruct)
    vae.load_state_dict({key[4:]: weights[key] for key in weights if key.startswith("vae.")})
    latent = torch.randn(1, config.vae.latent_channels, 4, 4, generator=torch.Generator().manual_seed(1))
    picture = vae.decode(latent)
    assert picture.isfinite().all()
    assert (picture.std((0, 2, 3)) > 0.2).all()
    assert picture.abs().max() < 10


def text_logits(weights: dict[str, Tensor], config: HunyuanImage3Config, tokens: list[int]) -> Tensor:
    """Plain causal forward of a text row, fp32; logits `[V]` of the last position."""
    weights = {key: weights[key].float() for key in weights if key.startswith(("model.", "lm_head."))}
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    cos, sin = rope_tables(torch.arange(len(tokens)).unsqueeze(1).repeat(1, 2), dim, config.rope_theta)

    def normed(x: Tensor, key: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{key}.weight"], config.rms_norm_eps)

    def rotated(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin

    def mlp(x: Tensor, key: str) -> Tensor:
        up, gate = (x @ weights[f"{key}.gate_and_up_proj.weight"].T).chunk(2, -1)
        return (up * silu(gate)) @ weights[f"{key}.down_proj.weight"].T

    x = weights["model.wte.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        qkv = normed(x, f"{at}.input_layernorm") @ weights[f"{at}.self_attn.qkv_proj.weight"].T
        grouped = qkv.view(len(tokens), kv_heads, heads // kv_heads + 2, dim)
        q = grouped[:, :, :-2].reshape(len(tokens), heads, dim).transpose(0, 1)
        k, v = grouped[:, :, -2].transpose(0, 1), grouped[:, :, -1].transpose(0, 1)
        q = normed(rotated(q), f"{at}.self_attn.query_layernorm")
        k = normed(rotated(k), f"{at}.self_attn.key_layernorm")
        attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = x + attended.transpose(0, 1).reshape(len(tokens), -1) @ weights[f"{at}.self_attn.o_proj.weight"].T
        y = normed(x, f"{at}.post_attention_layernorm")
        share = (y @ weights[f"{at}.mlp.gate.wg.weight"].T).softmax(-1)
        top, chosen = share.topk(config.moe_topk[layer])
        kept = torch.zeros_like(share).scatter(1, chosen, top / top.sum(-1, keepdim=True))
        experts = [
            mlp(y, f"{at}.mlp.experts.{e}") * kept[:, e, None] for e in range(config.num_experts[layer])
        ]
        x = x + mlp(y, f"{at}.mlp.shared_mlp") + sum(experts)
    return (normed(x, "model.ln_f") @ weights["lm_head.weight"].T)[-1]


def generate(
    folder: Path, bot_task: str, row_task: str, *, do_sample: bool
) -> tuple[HunyuanTokenizer, StageRules, list[int]]:
    config = HunyuanImage3Config.from_folder(folder)
    tokenizer = HunyuanTokenizer.from_folder(folder, config)
    weights = read_all(folder)
    row = build_text_row(tokenizer, config, **TEXTS, task=row_task)
    assert not dense_mask(row, config.cond_token_attn_type).triu(1).any()
    rules = StageRules(tokenizer, config, bot_task, need_ratio=True)
    tokens = list(row.tokens)
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        logits = text_logits(weights, config, tokens)
        assert logits.isfinite().all()
        tokens.append(
            sample_token(
                logits,
                tokens,
                rules=rules,
                do_sample=do_sample,
                temperature=0.6,
                top_k=1024,
                top_p=0.95,
                generator=generator,
            )
        )
        if rules.is_stop(tokens[-1]):
            break
    return tokenizer, rules, tokens[len(row) :]


def test_text_stage_ends_by_itself_even_when_sampled(instruct: Path) -> None:
    tokenizer, rules, generated = generate(instruct, "think_recaption", "think", do_sample=True)
    text = cot_from_tokens(tokenizer, "think_recaption", generated)
    assert text.cot_text == "<think>quick.</think><recaption>a dog!</recaption>"
    assert not text.truncated
    assert rules.ratio_index(generated[-1]) == 12


@pytest.mark.parametrize(
    "spec", [SyntheticSpec(auto_ratio=30), SyntheticSpec(hidden=32, layers=6, experts=2, topk=1)]
)
def test_base_auto_ratio_chooses_the_wanted_row(tmp_path: Path, spec: SyntheticSpec) -> None:
    write_checkpoint(tmp_path / "base", spec)
    _, rules, generated = generate(tmp_path / "base", "img_ratio", "img_ratio", do_sample=True)
    assert [rules.ratio_index(token) for token in generated] == [spec.auto_ratio]


def test_wrong_requests_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for spec, sentence in (
        (SyntheticSpec(vocab=50), "vocab 50 is smaller"),
        (SyntheticSpec(auto_ratio=33), "auto_ratio 33 is outside"),
        (SyntheticSpec(heads=6), "num_attention_heads 6 does not divide"),
        (SyntheticSpec(vae_channels=(32, 48, 32, 32, 32)), "block_out_channels 48 does not divide"),
        (SyntheticSpec(topk=9), "moe_topk 9 exceeds num_experts 8"),
    ):
        with pytest.raises(SyntheticError, match=sentence):
            write_settings(tmp_path / "new", spec)
        assert not (tmp_path / "new").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(SyntheticError, match="not an empty folder"):
        write_checkpoint(tmp_path / "full", SyntheticSpec())
    huge = SyntheticSpec(layers=64, hidden=1 << 16, experts=512, expert_width=1 << 16)
    with pytest.raises(SyntheticError, match="GB are free"):
        write_checkpoint(tmp_path / "huge", huge)
    assert not (tmp_path / "huge").exists()
