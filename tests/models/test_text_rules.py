"""The text stage: golden logits replayed to golden tokens, the state machine event by event, the sampler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.seeds import seeded_generator
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_settings
from phase_parallel.models.hunyuan_image_3.text_rules import (
    COT_TASKS,
    StageRules,
    TextStageError,
    cot_from_tokens,
    keep_recaption,
    legal_cot,
    sample_token,
)
from phase_parallel.models.hunyuan_image_3.tokenizer import HunyuanTokenizer

Model = tuple[HunyuanTokenizer, HunyuanImage3Config]


def load(folder: Path) -> Model:
    config = HunyuanImage3Config.from_folder(folder)
    return HunyuanTokenizer.from_folder(folder, config), config


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("settings") / "instruct"
    write_settings(folder, SyntheticSpec(kind="instruct"))
    return load(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("settings") / "base"
    write_settings(folder, SyntheticSpec(kind="base"))
    return load(folder)


def test_golden_logits_give_golden_tokens_text_and_ratio(golden_dir: Path) -> None:
    seen = 0
    for folder in sorted((golden_dir / "cases").iterdir()):
        spec = json.loads((folder / "case.json").read_text())
        if spec.get("max_new_tokens") is None:
            continue
        seen += 1
        tensors = load_file(folder / "expected.safetensors")
        model = load(golden_dir / "checkpoints" / spec["checkpoint"])
        task, expected = spec["bot_task"], spec["expected"]
        rules = StageRules(*model, task, need_ratio=spec["image_size"] == "auto")
        prompt = tensors["ar.prompt_tokens"].tolist()
        generated: list[int] = []
        for logits in tensors["ar.logits"]:
            assert not (generated and rules.is_stop(generated[-1])), folder.name
            generated.append(sample_token(logits, prompt + generated, rules=rules, do_sample=False))
        assert generated == tensors["ar.generated_tokens"].tolist(), folder.name
        assert rules.is_stop(generated[-1]), folder.name
        if "generated_text" in expected:
            assert model[0].decode(generated) == expected["generated_text"], folder.name
        if task in COT_TASKS:
            cot = cot_from_tokens(model[0], task, generated)
            assert cot.cot_text == expected["cot_text"], folder.name
            assert not cot.truncated
        if "ratio_index" in expected:
            assert rules.ratio_index(generated[-1]) == expected["ratio_index"], folder.name
            assert tensors["image_ratio.index"].item() == expected["ratio_index"], folder.name
    assert seen


def drive(model: Model, task: str, *, need_ratio: bool, first: str, wishes: str) -> str:
    """Decode greedily while the model wishes for the tokens of a text, one a step; rules may overrule it."""
    tokenizer, config = model
    rules = StageRules(*model, task, need_ratio=need_ratio)
    tokens = tokenizer.encode(first)
    start = len(tokens)
    for wish in tokenizer.encode(wishes):
        logits = torch.zeros(config.vocab_size)
        logits[wish] = 5.0
        tokens.append(sample_token(logits, tokens, rules=rules, do_sample=False))
        if rules.is_stop(tokens[-1]):
            break
    return tokenizer.decode(tokens[start:])


@pytest.mark.parametrize(
    ("task", "need_ratio", "wishes", "written"),
    [
        ("think", False, "ab</think>cd", "ab</think>"),
        ("think", False, "ab</recaption>cd", "ab</recaption>"),
        ("recaption", False, "ab</think>c</recaption>d", "ab</think>c</recaption>"),
        ("think_recaption", False, "a</think>xb</recaption>c", "a</think><recaption>b</recaption>"),
        # The forced tokens replace four wishes; then the best ratio token wins over a better other token.
        ("recaption", True, "a</recaption>xxxxy", "a</recaption><answer><boi><img_size_256><img_ratio_0>"),
        ("think", True, "a</think>xxxx", "a</think><answer><boi><img_size_256><img_ratio_0>"),
        (
            "think_recaption",
            True,
            "a</think>xb</recaption>xxx<img_ratio_35>",
            "a</think><recaption>b</recaption><answer><boi><img_size_256><img_ratio_35>",
        ),
        # Each event counts once: a second closing tag changes nothing.
        (
            "think_recaption",
            False,
            "a</think>xb</think>cd</recaption>",
            "a</think><recaption>b</think>cd</recaption>",
        ),
        # eos alone does not stop a think or recaption text.
        ("recaption", False, "a<|endoftext|>b</recaption>", "a<|endoftext|>b</recaption>"),
        # A ratio token that comes early ends the text.
        ("recaption", True, "a<img_ratio_3>b", "a<img_ratio_3>"),
        ("auto", False, "hi<|endoftext|>x", "hi<|endoftext|>"),
    ],
)
def test_stages(instruct: Model, task: str, need_ratio: bool, wishes: str, written: str) -> None:
    first = "<recaption>" if task == "recaption" else "<think>"
    assert drive(instruct, task, need_ratio=need_ratio, first=first, wishes=wishes) == written


@pytest.mark.parametrize("task", ["image", "img_ratio"])
def test_ratio_tasks_take_one_token(instruct: Model, base: Model, task: str) -> None:
    first = "<boi><img_size_256>"
    assert drive(instruct, task, need_ratio=True, first=first, wishes="xyz") == "<img_ratio_0>"
    assert drive(base, task, need_ratio=True, first=first, wishes="xyz") == "x"  # base: the whole vocabulary


def test_forcing_sets_one_logit(instruct: Model) -> None:
    tokenizer, config = instruct
    rules = StageRules(*instruct, "think_recaption", need_ratio=False)
    logits = torch.randn(config.vocab_size)
    assert rules.process(logits, tokenizer.special.think) is logits
    forced = rules.process(logits, tokenizer.special.think_end)
    assert forced[tokenizer.special.recaption] == 0
    assert (forced == torch.finfo(torch.float32).min).sum() == config.vocab_size - 1
    assert rules.process(logits, tokenizer.special.recaption) is logits


def test_ratio_index(instruct: Model, base: Model) -> None:
    tokenizer = instruct[0]
    rules = StageRules(*instruct, "recaption", need_ratio=True)
    assert [rules.ratio_index(token) for token in tokenizer.ratio_ids] == list(range(37))
    assert rules.ratio_index(tokenizer.special.boi) is None
    base_rules = StageRules(*base, "img_ratio", need_ratio=True)
    assert base_rules.ratio_index(base[0].ratio_ids[5]) == 5
    assert base_rules.ratio_index(base[0].special.boi) == 16


def test_tasks_that_do_not_exist_are_refused(instruct: Model, base: Model) -> None:
    with pytest.raises(TextStageError, match='task "paint" is unknown; choose one of auto, image'):
        StageRules(*instruct, "paint", need_ratio=False)
    with pytest.raises(TextStageError, match="needs an Instruct checkpoint"):
        StageRules(*base, "think", need_ratio=False)
    with pytest.raises(TextStageError, match="has no text stage"):
        StageRules(*instruct, "image", need_ratio=False)
    with pytest.raises(TextStageError, match="writes no assistant text"):
        cot_from_tokens(instruct[0], "image", [])


def test_cot_text(instruct: Model) -> None:
    tokenizer = instruct[0]

    def cot(task: str, text: str) -> tuple[str, str | None, bool]:
        found = cot_from_tokens(tokenizer, task, tokenizer.encode(text))
        return found.cot_text, found.recaption, found.truncated

    whole = "a</think><recaption>b</recaption>"
    assert cot("think_recaption", whole + "<answer><boi>") == ("<think>" + whole, "b", False)
    assert cot("think", whole) == ("<think>a</think>", None, False)
    assert cot("recaption", "b</recaption>c") == ("<recaption>b</recaption>", "b", False)
    assert cot("think_recaption", "a</think><recaption>b") == ("<think>a</think><recaption>b", "b", True)
    assert cot("think", "abc") == ("<think>abc", None, True)
    assert keep_recaption("<think>a</think><recaption>b</recaption>") == "<recaption>b</recaption>"
    assert keep_recaption("<think>a</think>") == "<think>a</think>"


def draws(logits: Tensor, count: int = 400, **settings: float) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {sample_token(logits, [0], do_sample=True, generator=generator, **settings) for _ in range(count)}


def test_sampler_keeps_what_the_settings_allow() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert draws(logits) == {0, 1, 2, 3}
    assert draws(logits, top_k=2) == {0, 1}
    assert draws(logits, top_p=0.6) == {0, 1}  # 0.5 does not reach 0.6, so the next one stays
    assert draws(logits, top_p=0.01) == {0}
    assert draws(logits, temperature=0.01) == {0}
    assert draws(logits, top_k=99) == {0, 1, 2, 3}


def test_sampler_repeats_with_its_seed() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))

    def run(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [sample_token(logits, [0], do_sample=True, generator=generator) for _ in range(20)]

    assert run(1) == run(1) != run(2)


def test_repetition_penalty_comes_before_the_rules(instruct: Model) -> None:
    logits = torch.tensor([2.0, 1.5, -1.0])
    assert sample_token(logits, [0], do_sample=False) == 0
    assert sample_token(logits, [0], do_sample=False, repetition_penalty=2.0) == 1
    negative = torch.tensor([-1.0, -1.5])
    assert sample_token(negative, [0], do_sample=False, repetition_penalty=2.0) == 1
    tokenizer, config = instruct
    rules = StageRules(*instruct, "img_ratio", need_ratio=True)
    wanted = torch.zeros(config.vocab_size)
    first, second = tokenizer.ratio_ids[:2]
    wanted[first], wanted[second] = 3.0, 2.0
    seen = [first, tokenizer.special.img_size]
    assert sample_token(wanted, seen, rules=rules, do_sample=False, repetition_penalty=2.0) == second


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": 0.0}, "temperature is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
    ],
)
def test_wrong_sampler_settings(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(TextStageError, match=sentence):
        sample_token(torch.zeros(4), [0], do_sample=True, **settings)


def test_nan_logits_are_an_error() -> None:
    with pytest.raises(TextStageError, match="logits of token 2 contain NaN"):
        sample_token(torch.tensor([0.0, float("nan")]), [0, 1], do_sample=False)


def test_auto_stops_at_the_files_end_tokens(instruct: Model) -> None:
    tokenizer, config = instruct
    other = replace(config, generation=replace(config.generation, eos_token_ids=(3,)))
    rules = StageRules(tokenizer, other, "auto", need_ratio=False)
    assert rules.is_stop(3)
    assert not rules.is_stop(tokenizer.special.eos)


def expected_probabilities(logits: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The definition in fp64, token by token: the likeliest `top_k`, then the fewest of them that reach `top_p`."""
    order = sorted(range(len(logits)), key=lambda token: -float(logits[token]))[:top_k]
    weights = [float((logits[token].double() / temperature).exp()) for token in order]
    kept, reached = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if reached >= top_p:
            break
        kept.append((token, weight))
        reached += weight / sum(weights)
    probabilities = torch.zeros(len(logits), dtype=torch.float64)
    for token, weight in kept:
        probabilities[token] = weight / sum(weight for _, weight in kept)
    return probabilities


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_k": 12, "top_p": 1.0},
        {"temperature": 0.6, "top_k": 12, "top_p": 0.95},
        {"temperature": 1.7, "top_k": 5, "top_p": 0.9},
    ],
)
def test_ten_thousand_draws_follow_the_definition(settings: dict[str, float]) -> None:
    """Chi-square of the counts; 0.999 quantile by Wilson and Hilferty. Nothing outside the kept tokens is ever drawn."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(9)) * 1.5
    expected = expected_probabilities(logits, **settings)
    draws = 10_000
    generator = torch.Generator().manual_seed(11)
    counts = torch.zeros(12, dtype=torch.float64)
    for _ in range(draws):
        counts[sample_token(logits, [0], do_sample=True, generator=generator, **settings)] += 1
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = expected[possible] * draws
    statistic = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    freedom = int(possible.sum()) - 1
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.0902 * spread**0.5) ** 3


def test_seeds_draw_different_texts_and_the_same_one_twice() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(9))

    def text(seed: int) -> tuple[int, ...]:
        generator = seeded_generator(seed)
        return tuple(sample_token(logits, [0], do_sample=True, generator=generator) for _ in range(40))

    assert len({text(seed) for seed in (0, 1, 42, 2**40)}) == 4
    assert text(42) == text(42)


WHOLE = "<think>a</think><recaption>b</recaption>"


@pytest.mark.parametrize(
    ("task", "written", "legal", "recaption"),
    [
        ("think", "<think>it is", "<think>it is</think>", None),
        ("think", "<think>it is</think>", "<think>it is</think>", None),
        ("think", "<think></think>", "<think></think>", None),
        ("think", "<think>ts dss</recaption></think>", "<think>ts dss</think>", None),
        ("think", "<think>ts</recaption>", "<think>ts</think>", None),
        ("think", "<think>a<recaption>b<img_ratio_3>", "<think>ab</think>", None),
        ("think", "<think>a</think>b", "<think>ab</think>", None),
        ("think_recaption", WHOLE, WHOLE, "b"),
        ("think_recaption", "<think> a\n</think>\n<recaption> b </recaption>", "<think> a\n</think>\n<recaption> b </recaption>", " b "),
        ("think_recaption", "<think>a</think><recaption>b", WHOLE, "b"),
        ("think_recaption", "<think>a", "<think>a</think>", None),
        ("think_recaption", "<think>a<recaption>b", WHOLE, "b"),
        ("think_recaption", "<think>a<recaption>b</recaption>", WHOLE, "b"),
        ("think_recaption", "<think>a<recaption>a</think><recaption>b", "<think>aa</think><recaption>b</recaption>", "b"),
        ("think_recaption", "<think>a</recaption>", "<think>a</think>", None),
        ("think_recaption", "<think>a<boi></think><recaption></think>b<answer></recaption>", WHOLE, "b"),
        ("recaption", "<recaption>", "<recaption></recaption>", ""),
        ("recaption", "<recaption>a</think><think>b</recaption>", "<recaption>ab</recaption>", "ab"),
        ("recaption", "<recaption>a<|endoftext|>b", "<recaption>ab</recaption>", "ab"),
        ("recaption", "<recaption>a<bo<boi>i>b<thi<boi>nk></recaption>", "<recaption>ab</recaption>", "ab"),
        ("recaption", "<recaption>1 < 2 > <b> <img_ratio_99></recaption>", "<recaption>1 < 2 > <b> <img_ratio_99></recaption>",
         "1 < 2 > <b> <img_ratio_99>"),
    ],
)  # fmt: skip
def test_written_text_becomes_legal(instruct: Model, task: str, written: str, legal: str, recaption: str | None) -> None:
    found = legal_cot(instruct[0], task, written)
    assert (found.cot_text, found.recaption) == (legal, recaption)
    assert bool(found.removed or found.added) == (legal != written)
    again = legal_cot(instruct[0], task, legal)
    assert again.cot_text == legal and not again.removed and not again.added


def test_what_was_changed_is_named(instruct: Model) -> None:
    found = legal_cot(instruct[0], "think_recaption", "<think>a<boi>b<boi></recaption>")
    assert (found.removed, found.added) == (("<boi>", "</recaption>"), ("</think>",))
