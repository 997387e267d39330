"""What happens before the picture: the size is decided, and Instruct checkpoints may write text that guides
it.

Shared by Think / Recaption and by Generate, so that both treat the same widgets alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..models.hunyuan_image_3.operations import text_request
from ..models.hunyuan_image_3.text_generation import prefill_row
from . import size_choices
from .engine_handle import EngineHandle
from .prompts import CHECKPOINT_DEFAULT, check_prompt, system_prompt_text
from .references import References, prepare_references

WRITING_TASKS = {"think + recaption": "think_recaption", "recaption": "recaption", "think": "think"}
RATIO_TASK = "img_ratio"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; 0 and "checkpoint default" stand for the checkpoint's own value."""

    do_sample: str = CHECKPOINT_DEFAULT
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    repetition_penalty: float = 0.0

    def resolve(self, engine: EngineHandle) -> dict[str, Any]:
        """JSON arguments of the text operation, every value decided."""
        own = engine.config.generation
        return {
            "do_sample": own.do_sample
            if self.do_sample == CHECKPOINT_DEFAULT
            else self.do_sample == "sample",
            "temperature": self.temperature or own.temperature,
            "top_k": self.top_k or own.top_k,
            "top_p": self.top_p or own.top_p,
            "repetition_penalty": self.repetition_penalty or own.repetition_penalty,
        }


@dataclass(frozen=True)
class TextWish:
    """The widgets of the text stage. `images` are IMAGEs in order, None where nothing is connected."""

    prompt: str
    task: str
    system_prompt: str
    custom_system_prompt: str
    size: str
    width: int
    height: int
    max_new_tokens: int
    seed: int
    sampling: Sampling
    images: tuple[Any, ...] = ()
    reference_seed: int = 0
    cot_text: str = ""
    """The model's turn as the user gives it: nothing is written, and an automatic size is chosen after reading it."""
    for_encode: bool = False
    """The text goes on to an Encode node, which does not know the task."""


@dataclass(frozen=True)
class TextOutcome:
    """`height` and `width` are sizes of the checkpoint's table; `cot_text` has its tags, `recaption` is the
    readable part.
    """

    cot_text: str
    recaption: str
    height: int
    width: int
    note: str = ""
    """What the user should know: a cut text, a size that became another."""
    speed: str = ""
    """How the text was written and how fast; empty where none was."""


def run_text_stage(
    engine: EngineHandle,
    wish: TextWish,
    *,
    node_id: str | None,
    report: Callable[[dict[str, Any]], None] | None,
) -> TextOutcome:
    """Decide size and text. Raises ValueError with a sentence for texts or settings that the checkpoint
    cannot use.
    """
    check_prompt(engine, wish.prompt)
    references = prepare_references(engine, wish.images, seed=wish.reference_seed)
    size = explicit_size(wish)
    if wish.task in WRITING_TASKS and not wish.cot_text:
        refuse_writing_base(engine, wish.task)
        return _write(engine, wish, WRITING_TASKS[wish.task], size, references, node_id=node_id, report=report)
    if wish.task != "off" and size is None:
        return _write(engine, wish, RATIO_TASK, None, references, node_id=node_id, report=report)
    asked = size or (wish.height, wish.width)
    height, width = engine.snap(*asked)
    return TextOutcome(wish.cot_text, "", height, width, size_note(asked, (height, width)))


def size_note(asked: tuple[int, int] | None, drawn: tuple[int, int]) -> str:
    """A sentence when the size that is drawn is not the one that was asked for; both (height, width)."""
    if asked is None or tuple(asked) == tuple(drawn):
        return ""
    return f"{asked[1]}x{asked[0]} is not a size of this model; the nearest one is drawn: {drawn[1]}x{drawn[0]}."


def speed_line(result: dict[str, Any]) -> str:
    """How a text was written and how fast; empty for a single token, which the prompt already gave. `result` is that of the text operation."""
    steps, measured = len(result["tokens"]) - 1, result["measured"]
    if steps < 1:
        return ""
    # The reasons behind the colons are for the Ranks node.
    ways = [measured[name].partition(":")[0] for name in ("decode", "reduction")]
    return f"AR: {', '.join(ways)}, {steps / measured['decode_seconds']:.1f} tokens/s"


def cut_note(engine: EngineHandle, what: str, max_new_tokens: int, result: dict[str, Any]) -> str:
    """What ended a text that was not finished, and what to do. `result` is that of the text operation."""
    if result["end"] == "stop":
        token = engine.tokenizer.decode(result["tokens"][-1:])
        return f"{what} was ended by the model with {token} before its own closing tag; another seed may give a whole one."
    if result["end"] == "max_new_tokens":
        return f"{what} reached max_new_tokens ({max_new_tokens}) before its end; raise it for the whole text."
    positions = engine.config.max_position_embeddings
    return f"{what} filled the model's {positions} positions before its end; shorten the prompt or use fewer images."


def repair_note(legal: dict[str, Any] | None) -> str:
    """A sentence when the text is not quite what the model wrote. `legal` is that of the text operation, None where nothing was written."""
    if legal is None or not (legal["removed"] or legal["added"]):
        return ""
    shown = ", ".join(legal["removed"][:5]) + (" and more" if len(legal["removed"]) > 5 else "")
    taken_out = [f"control tokens inside it were taken out ({shown})"] if legal["removed"] else []
    closed = ["its tags were closed"] if legal["added"] else []
    return f"So that the text can be used, {' and '.join(taken_out + closed)}."


def instruction_note(engine: EngineHandle, wish: TextWish, cot_text: str) -> str:
    """A sentence when Encode, which goes by the text alone, would take another "dynamic" instruction than the one behind this text."""
    choice = engine.config.generation.use_system_prompt if wish.system_prompt == CHECKPOINT_DEFAULT else wish.system_prompt
    if not wish.for_encode or choice != "dynamic" or picture_task(wish.task, "") == picture_task("off", cot_text):
        return ""
    return "Encode cannot see that a recaption was due: give it system_prompt 'custom' and the same custom_system_prompt, not 'dynamic'."


def picture_task(task: str, cot_text: str) -> str:
    """What "dynamic" goes by, one name for text and picture of one prompt: the task of the widget, else the one that `cot_text` comes from.

    A ratio alone is part of task image. "off" and "auto ratio" say nothing about a text that the user brings.
    """
    parts = [name for name in ("think", "recaption") if f"<{name}>" in cot_text]
    return WRITING_TASKS.get(task) or "_".join(parts) or "image"


def explicit_size(wish: TextWish) -> tuple[int, int] | None:
    """(height, width) that the widgets ask for, or None for "auto"."""
    if wish.size == size_choices.AUTO:
        return None
    if wish.size == size_choices.WIDTH_HEIGHT:
        return wish.height, wish.width
    if wish.size == size_choices.FOLLOW_IMAGE:
        if not wish.images or wish.images[0] is None:
            raise ValueError(
                f"size is '{size_choices.FOLLOW_IMAGE}', but image1 is not connected; connect it or choose "
                "another size."
            )
        return size_choices.image_size(wish.images[0])
    return size_choices.parse_label(wish.size)


def refuse_writing_base(engine: EngineHandle, task: str) -> None:
    if engine.config.kind == "base":
        raise ValueError(
            f"{engine.name} is a base checkpoint, which was not trained for task '{task}'; choose 'off' or "
            "'auto ratio', "
            "or load an Instruct checkpoint."
        )


def _write(
    engine: EngineHandle,
    wish: TextWish,
    task: str,
    size: tuple[int, int] | None,
    references: References,
    *,
    node_id: str | None,
    report: Callable[[dict[str, Any]], None] | None,
) -> TextOutcome:
    args = {
        "prompt": wish.prompt,
        "system_prompt": system_prompt_text(
            engine, wish.system_prompt, wish.custom_system_prompt, picture_task(wish.task, wish.cot_text)
        ),
        "cot_text": wish.cot_text or None,
        "task": task,
        "image_size": "auto" if size is None else f"{size[0]}x{size[1]}",
        "max_new_tokens": 1 if task == RATIO_TASK else wish.max_new_tokens,
        "seed": wish.seed,
        "references": list(references.keys),
        **wish.sampling.resolve(engine),
    }
    prefill_row(engine.tokenizer, engine.config, text_request(args), references.cond_images)  # a row that is too long is refused here
    references.encode(node_id=node_id, report=report)
    result, _ = engine.call("generate_text", args, {}, node_id=node_id, report=report)
    drawn = (int(result["height"]), int(result["width"]))
    notes = [size_note(size, drawn)]
    if result["truncated"]:
        notes.append(cut_note(engine, "The text", wish.max_new_tokens, result))
    if result["cot_text"]:
        notes += [repair_note(result["legal"]), instruction_note(engine, wish, result["cot_text"])]
    note = " ".join(text for text in notes if text)
    return TextOutcome(result["cot_text"] or wish.cot_text, result["recaption"] or "", *drawn, note, speed_line(result))
