"""What rank 0 can ask all ranks to do with a HunyuanImage-3.0 checkpoint. JSON and tensors in, JSON and tensors out, equal on every rank.

Every operation names its engine in ``args["engine"]`` and finds it resident or loads it, so a rank that lost its engine (a restart, "free memory")
needs no special case. One engine is resident at a time: two 80B models fit no device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...parallel.checkpoint import first_not_finite
from ...parallel.operations import OperationContext, Tensors, register
from ...parallel.rank_record import CALL
from ...parallel.section import Section
from .denoise import DenoiseRow
from .engine import Engine, ImageRequest
from .loading import LoadOptions
from .model import StepInputs
from .references import PreparedReference
from .sequence import ImageRows
from .text_generation import Sampling, TextRequest
from .token_row import TokenRow
from .topology_choice import DenoiseWay

MODEL = "hunyuan_image_3"
_LOAD_REPORTS = 50


@dataclass(frozen=True)
class EngineArguments:
    """Which engine: the folder, and how its weights are kept and computed. The plan comes with the operation."""

    folder: str
    weight_dtype: str = "auto"
    moe_layout: str = "micro_major"
    moe_path: str = "multi_micro"
    reuse_text: bool = True
    kernels: str = "auto"
    decode: str = "auto"
    reduction: str = "auto"
    moe_backend: str = "auto"

    def options(self) -> LoadOptions:
        return LoadOptions(self.weight_dtype, self.moe_layout, self.moe_path, self.kernels, self.decode, self.reduction, self.moe_backend)


class EngineSlot:
    """The engine that is resident in this process."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._key: object = None

    def get(self, context: OperationContext, arguments: EngineArguments) -> Engine:
        """The engine on every rank: resident on all of them, or loaded by all of them together."""
        comm = context.section.communicator
        key = (arguments, str(context.device))
        # How the plan denoises changes from run to run, on the same weights.
        resident = self._engine is not None and self._key == key and self._engine.model.plan.has_weights_of(context.plan)
        if resident and self._engine.model.comm is not comm and first_not_finite(self._engine.model.resident) is not None:
            resident = False  # a fault lies behind, and these weights were part of it
        # A rank can lose its engine alone, when it fails at the very end of a load; a load is collective, so all ranks repeat it.
        if not all(row[0] for row in comm.control_gather([int(resident)])):
            self.drop(context)
            where = context.cluster.record.where()
            context.section.start_phase("load", "value")
            self._engine = Engine.load(
                arguments.folder,
                context.plan,
                comm,
                arguments.options(),
                device=context.device,
                reuse_text=arguments.reuse_text,
                progress=_load_reports(context),
            )
            self._key = key
            context.cluster.record.note_model(Path(arguments.folder).name)
            context.section.start_phase(where[0] or "section")
        elif self._engine.model.comm is not comm:
            self._engine.connect(comm)
        return self._engine

    def drop(self, context: OperationContext) -> None:
        self._engine, self._key = None, None
        context.cluster.record.note_model("")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


_slot = EngineSlot()


def _load_reports(context: OperationContext) -> Callable[[int, int], None]:
    """Progress of a load. Ranks also meet at every step of it: one may read from a slower disk, and a cancel must not wait for the end."""
    last = [-1]

    def progress(done: int, total: int) -> None:
        share = done * _LOAD_REPORTS // total
        if share != last[0]:
            last[0] = share
            context.section.check(share, _LOAD_REPORTS)
            context.section.report({"kind": "load", "done": share, "total": _LOAD_REPORTS})

    return progress


def _engine(context: OperationContext, args: dict[str, Any]) -> Engine:
    return _slot.get(context, EngineArguments(**args["engine"]))


@register(f"{MODEL}.load")
def load(context: OperationContext, args: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Nothing but the engine; returns what a node shows of it, and as measured, since devices may differ: which kernels run, who computes
    the experts, how text is written, and how a drawing adds up the ranks' parts."""
    engine = _engine(context, args)
    engine.model.row_reduction()  # opens peers' memory while the user waits for the weights anyway
    resident = sum(p.nbytes for p in engine.model.around.parameters())
    backend = {"kernels": engine.kernels_reason, "moe": engine.moe_words, "decode": engine.text.decode_reason, "rows": engine.model.rows_reason}
    return {"plan": context.plan.describe(), "around_bytes": resident, "measured": backend}, {}


@register(f"{MODEL}.encode_references")
def encode_references(context: OperationContext, args: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Conditioning pictures, encoded unless they are kept. args: seed, pictures [{ratio_index, grid}]; tensors: pixels{i} [3, H, W] uint8,
    patches{i} [P, 768] fp32, mask{i} [P] uint8 -> keys, by which later operations name the pictures. The user is told
    how many had to be encoded."""
    engine = _engine(context, args)
    context.section.start_phase("image encode")
    prepared = [
        PreparedReference(
            tensors[f"pixels{i}"], item["ratio_index"], tensors[f"patches{i}"], tensors[f"mask{i}"].bool(), tuple(item["grid"])
        )
        for i, item in enumerate(args["pictures"])
    ]
    before = engine.references.encoded
    keys = engine.references.encode(prepared, args["seed"])
    count = engine.references.encoded - before
    if count:
        context.section.report({"kind": "references", "text": f"{count} reference picture{'s' * (count > 1)} encoded"})
    return {"keys": list(keys)}, {}


def text_request(args: dict[str, Any]) -> TextRequest:
    """The request that the arguments of ``generate_text`` describe."""
    sampling = Sampling(**{name: args[name] for name in Sampling.__dataclass_fields__ if name in args})
    return TextRequest(
        prompt=args["prompt"],
        system_prompt=args["system_prompt"],
        cot_text=args["cot_text"],
        task=args["task"],
        need_ratio=args["image_size"] == "auto",
        max_new_tokens=args["max_new_tokens"],
        sampling=sampling,
    )


def _text_check(section: Section) -> Callable[[int, int], None]:
    """The section's check for one text: the phase before its first token is the prefill."""
    section.start_phase("AR prefill", "token")
    reached = ["AR prefill"]

    def check(done: int, total: int) -> None:
        if done and reached[0] == "AR prefill":
            reached[0] = "AR decode"
            section.start_phase(reached[0], "token")
        section.check(done, total)

    return check


@register(f"{MODEL}.generate_text")
def generate_text(context: OperationContext, args: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """args: prompt, system_prompt, cot_text, task, image_size ("auto", "HxW", or null where no picture follows), max_new_tokens, seed, do_sample,
    temperature, top_k, top_p, repetition_penalty, references (keys) -> the fields of TextResult plus height and width (null without a picture).
    ``cot_text`` is the legal one; a text that was cut also has ``truncated`` set; if it was cut before its size token, one more greedy pass
    chooses the size."""
    engine = _engine(context, args)
    features, cond_images = engine.references.get(args.get("references", ()))
    request = text_request(args)
    auto = request.need_ratio
    pictures = {"features": features, "cond_images": cond_images}
    result = engine.generate_text(request, report=context.section.report, check=_text_check(context.section), **pictures)
    cot_text = None if result.legal is None else result.legal.cot_text
    index = result.ratio_index
    if auto and index is None:
        again = replace(request, cot_text=cot_text, task="img_ratio", sampling=Sampling())
        index = engine.generate_text(again, check=_text_check(context.section), **pictures).ratio_index
    elif args["image_size"] is not None and not auto:
        index = engine.table.parse_image_size(args["image_size"], engine.config.kind)
    height, width = (None, None) if index is None else engine.table.size(index)
    values = asdict(result) | {"cot_text": cot_text}
    measured = {name: values.pop(name) for name in ("prefill_seconds", "decode_seconds", "close_seconds", "decode", "reduction")}
    context.cluster.record.note_text(f"{result.decode}; {result.reduction}", tokens=len(result.tokens), seconds=result.decode_seconds)
    return values | {"height": height, "width": width, "measured": measured}, {}


@register(f"{MODEL}.denoise")
def denoise(context: OperationContext, args: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """One model call of the host's sampler. args: way, rows [{kind, row, references, latent}], sigma, sigma_next, guidance, and place: [steps done,
    all steps] of the sampler's run, or null; tensors: latents [b, C, h, w], which rows name by number -> velocity [n, C, h, w] of the rows;
    prefix_tokens of the first conditional row and reused_tokens of them."""
    engine = _engine(context, args)
    context.section.start_phase("denoise", CALL)
    if args.get("place") is not None:
        context.cluster.record.progress(*args["place"])
    latents = tensors["latents"]
    rows = [
        DenoiseRow(TokenRow.from_json(item["row"]), item["kind"], engine.references.get(item.get("references", ()))[0], item["latent"])
        for item in args["rows"]
    ]
    # Samplers may send the unconditional row first, whose prefix says little about the user's text.
    told = [row for row in rows if row.branch == "cond"] or rows
    way = _go(context, engine, args, first=not (args.get("place") or [0])[0])
    saved = _prefix_saving(context, engine, told[0], way) if told else {}
    after = args.get("sigma_next")
    step = StepInputs(timestep=_fp32(args["sigma"]), timestep_r=None if after is None else _fp32(after), guidance=args.get("guidance"))
    return saved, {"velocity": engine.velocity(rows, latents, step)}


def _go(context: OperationContext, engine: Engine, args: dict[str, Any], *, first: bool) -> str:
    """Denoise as rank 0 has chosen in ``args["way"]``, or else as the plan says; the user is told at the ``first`` call of a run. Returns the words."""
    plan = context.plan
    way = DenoiseWay(**args["way"]) if args.get("way") else DenoiseWay(plan.denoise, plan.attention, reason="the plan's own")
    engine.denoise_as(way)
    context.cluster.record.take_place(engine.model.plan, context.cluster.generation)
    if first:
        context.section.report({"kind": "way", "text": way.words(plan)})
    return way.words(plan)


def _prefix_saving(context: OperationContext, engine: Engine, row: DenoiseRow, way: str) -> dict[str, Any]:
    """How much of the conditional row's prefix is not computed again; the user is told when text generation left it, above the ``way``."""
    total, known = row.row.prefix_length, engine.prefixes.known_tokens(row.row, row.features)
    if 0 < known < total:
        text = f"{known} of {total} prompt tokens reused from the model's text, {total - known} computed"
        context.section.report({"kind": "prefix", "text": f"{text}\n{way}"})
    return {"prefix_tokens": total, "reused_tokens": known}


def _fp32(sigma: float) -> float:
    """1000·σ as the schedule computes it, in fp32."""
    return float(torch.tensor(sigma, dtype=torch.float32) * 1000.0)


@register(f"{MODEL}.sample")
def sample(context: OperationContext, args: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """A whole run of the official loop. args: way, cond, uncond (token rows or null), height, width, ratio_index, steps, guidance, flow_shift, seeds,
    references (keys) -> latents [b, C, h, w], unscaled; prefix_tokens of the conditional row and reused_tokens of them."""
    engine = _engine(context, args)
    uncond = None if args["uncond"] is None else TokenRow.from_json(args["uncond"])
    rows = ImageRows(TokenRow.from_json(args["cond"]), uncond, args["height"], args["width"], args["ratio_index"])
    request = ImageRequest(
        rows=rows,
        steps=args["steps"],
        guidance=args["guidance"],
        flow_shift=args["flow_shift"],
        seeds=tuple(args["seeds"]),
        features=engine.references.get(args.get("references", ()))[0],
    )
    context.section.start_phase("denoise")
    saved = _prefix_saving(context, engine, DenoiseRow(rows.cond, "cond", request.features), _go(context, engine, args, first=True))
    latent = engine.sample(request, check=context.section.check, trace=engine.previews(request, context.section.report))
    return saved, {"latents": engine.unscale(latent)}


@register(f"{MODEL}.vae_decode")
def vae_decode(context: OperationContext, args: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """latents [b, C, h, w] unscaled -> pixels [b, 3, H, W] in [-1, 1], not clamped. What does not fit in the ranks' memory gives no pixels but the
    tile to take instead, see ``VaeRoom.instead``. args: tile, set when the latents are one, which is then tried whatever its size."""
    engine = _engine(context, args)
    if not args.get("tile") and (instead := engine.vae_room(*tensors["latents"].shape[2:]).instead()):
        return instead, {}
    context.section.start_phase("VAE decode", "block")
    return {}, {"pixels": engine.vae_decode(tensors["latents"], check=context.section.check)}


@register(f"{MODEL}.vae_encode")
def vae_encode(context: OperationContext, args: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """pixels [b, 3, H, W] in [-1, 1] -> latents [b, C, h, w]: the posterior mean, unscaled. Tiles as in ``vae_decode``."""
    engine = _engine(context, args)
    height, width = (side // engine.config.vae.ffactor_spatial for side in tensors["pixels"].shape[2:])
    if not args.get("tile") and (instead := engine.vae_room(height, width).instead()):
        return instead, {}
    context.section.start_phase("VAE encode")
    return {}, {"latents": engine.vae_encode(tensors["pixels"])[0]}


@register(f"{MODEL}.unload")
def unload(context: OperationContext, args: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Free the resident engine of every rank; the next operation loads again."""
    _slot.drop(context)
    return {}, {}
