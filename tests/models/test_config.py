"""The configuration: what the golden folders say, and one sentence for everything that is not supported."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from phase_parallel.models.hunyuan_image_3.config import ConfigError, HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_settings


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("settings") / "instruct"
    write_settings(folder, SyntheticSpec(kind="instruct", heads=8, head_dim=16, hidden=64))
    return tuple(
        json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")
    )


def read(files: tuple[dict[str, Any], dict[str, Any]], **changes: Any) -> HunyuanImage3Config:
    """The configuration after changes; None removes a field, `vae__x` means field x of section vae."""
    config, generation = copy.deepcopy(files)
    for name, value in changes.items():
        section, _, inner = name.rpartition("__")
        target = generation if section == "generation" else config[section] if section else config
        target[inner] = value
        if value is None:
            del target[inner]
    return HunyuanImage3Config.from_dicts(config, generation, where="folder")


def test_golden_folders(golden_dir: Path) -> None:
    folders = sorted((golden_dir / "checkpoints").iterdir())
    assert folders
    kinds = {}
    for case in (golden_dir / "cases").iterdir():
        spec = json.loads((case / "case.json").read_text())
        kinds[spec["checkpoint"]] = spec["kind"]
    for folder in folders:
        config = HunyuanImage3Config.from_folder(folder)
        assert config.kind == kinds.get(folder.name, config.kind)
        assert len(config.num_experts) == len(config.moe_topk) == config.num_hidden_layers
        assert config.generation.temperature == 0.6


def test_lists_and_numbers_per_layer(files) -> None:
    config = read(files, moe_intermediate_size=[48, 96], num_shared_expert=2, moe_topk=1, num_experts=[8, 4])
    assert config.moe_intermediate_size == (48, 96)
    assert config.shared_intermediate_size == (96, 192)
    assert config.moe_topk == (1, 1)
    assert config.num_experts == (8, 4)


def test_head_dim_is_not_derived_from_the_hidden_size(files) -> None:
    assert read(files, attention_head_dim=32).head_dim == 32


def test_absent_fields_with_a_meaning(files) -> None:
    config = read(files, image_base_size=None, hidden_size=64, cfg_distilled=None, rope_scaling=None)
    assert config.image_base_size == 1024
    assert not config.cfg_distilled
    assert config.generation.repetition_penalty == 1.0
    assert read(files, generation__sequence_template=None).kind == "base"
    assert read(files, generation__max_length=None).generation.max_length == 4096
    assert read(files, generation__eos_token_id=7).generation.eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            "describes .*Llama.*; choose a HunyuanImage",
        ),
        ({"quantization_config": {"bits": 4}}, "quantised checkpoints are not supported"),
        ({"hidden_size": None}, "has no field hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"cond_token_attn_type": None}, "has no field cond_token_attn_type"),
        ({"cond_token_attn_type": "half"}, "only joint_full or full or full_causal or causal"),
        ({"vae": None}, "has no field vae"),
        ({"vae__latent_channels": None}, "config.json: vae has no field latent_channels"),
        ({"use_mla": True}, "use_mla is True, but only False is supported"),
        ({"use_cla": True}, "use_cla"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"moe_layer_num_skipped": 1}, "moe_layer_num_skipped"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"rope_type": "3d"}, "only 2d or default"),
        ({"torch_dtype": "float8"}, "only bfloat16 or float32"),
        ({"use_meanflow": True}, "use_meanflow without cfg_distilled"),
        ({"moe_topk": [3]}, "one entry for each of the 2 layers"),
        ({"moe_topk": [3, 9]}, "moe_topk 9 exceeds num_experts 8 in layer 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 does not divide by num_key_value_heads"),
        ({"vit_aligner__n_embed": 32}, "n_embed 32 must equal hidden_size"),
        ({"vit__num_patches": 15}, "num_patches 15 must equal a square number"),
        ({"vae__ffactor_spatial": 12}, "vae_downsample_factor"),
        ({"vae__block_out_channels": [32, 32, 32]}, "must equal log2"),
        ({"vae__block_out_channels": [32, 32, 32, 32, 96]}, "fold of 8"),
        ({"rms_norm_eps": float("nan")}, "a finite number"),
        ({"rope_theta": 0}, "a number above zero"),
        ({"image_base_size": 128}, "a whole number from 256"),
        ({"vit_processor__image_mean": [0.4, 0.4, 0.4]}, "image_mean"),
        ({"generation__flow_shift": None}, "generation_config.json has no field flow_shift"),
        ({"generation__sequence_template": "chat"}, "only pretrain or instruct"),
    ],
)
def test_refusals_name_the_field(files, changes, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        read(files, **changes)
    assert str(caught.value).endswith(".")


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        HunyuanImage3Config.from_folder(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        HunyuanImage3Config.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"is not valid JSON \(line 1\)"):
        HunyuanImage3Config.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="does not contain a JSON object"):
        HunyuanImage3Config.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        HunyuanImage3Config.from_folder(tmp_path)
