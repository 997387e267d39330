"""Tokens through the host and tokens on the device are the same tokens. On a CPU the kernels are interpreted, so models and texts are tiny."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from one_token_kernels import few_programs, one_rank_at_a_time
from thread_world import run_ranks

from phase_parallel.kernels import triton_support
from phase_parallel.kernels.next_token import Draw
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions, load_model
from phase_parallel.models.hunyuan_image_3.seeds import seeded_generator
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint
from phase_parallel.models.hunyuan_image_3.text_generation import TextRequest, TextResult, prefill_row
from phase_parallel.models.hunyuan_image_3.text_rules import StageRules, TextStageError
from phase_parallel.models.hunyuan_image_3.token_loop import DeviceLoop, HostLoop, TextJob, TokenLoop, choose_decode
from phase_parallel.models.reduction import GroupReduction
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.faults import Fault, RankFault, SectionCancelled
from phase_parallel.parallel.plan import ParallelPlan
from phase_parallel.parallel.waiting import CollectiveTimeout

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SPEC = SyntheticSpec(
    kind="instruct", layers=1, hidden=32, heads=2, kv_heads=1, head_dim=12, experts=3, topk=2, expert_width=5, latent_channels=4, vit_layers=1
)
ODD = replace(SPEC, layers=2, heads=9, kv_heads=3, experts=5, topk=3, expert_width=7, shared_experts=3)
HYBRID = replace(SPEC, layers=2, heads=6, kv_heads=2, expert_width=6)
GREEDY, SAMPLED = Draw(False), Draw(True, 30.0, 100, 0.99, 1.1)
REQUEST = TextRequest("draw it", None, None, "think_recaption", need_ratio=True, max_new_tokens=60)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        few_programs(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("token_loop")
    specs = {"spec": SPEC, "odd": ODD, "hybrid": HYBRID}
    for name, spec in specs.items():
        write_checkpoint(parent / name, spec)
    return {name: parent / name for name in specs}


@cache
def engine_in(folder: Path) -> Engine:
    return run_ranks(lambda plan, comm: Engine.load(folder, plan, comm, LoadOptions(), device=DEVICE), "single", world_size=1)[0]


@dataclass
class Written:
    """``known``: how many tokens the host knew after the start and after each call of advance."""

    tokens: list[int]
    known: list[int]
    logits: list[torch.Tensor]


def begin(engine: Engine, kind: type, request: TextRequest, draw: Draw, trace: list | None = None) -> tuple[TokenLoop, torch.Tensor]:
    """A loop before its start, and the logits of the prompt's last token."""
    model = engine.model
    row = prefill_row(engine.tokenizer, engine.config, request)
    rules = StageRules(engine.tokenizer, engine.config, request.task, need_ratio=request.need_ratio)
    job = TextJob(row.tokens, request.max_new_tokens, rules, draw, seeded_generator(3))
    kept = model.new_cache(len(row) + request.max_new_tokens, "prefill")
    reduction = () if kind is HostLoop else (GroupReduction(),)
    loop = kind(model, kept, job, *reduction, None if trace is None else trace.append)
    return loop, model.next_logits(model.prefill(row, 0, len(row), kept)[-1:], "prefill")[0]


def write(engine: Engine, kind: type, request: TextRequest, draw: Draw = GREEDY, *, steps: int = 4, traced: bool = False) -> Written:
    logits: list[torch.Tensor] = []
    loop, first = begin(engine, kind, request, draw, logits if traced else None)
    loop.start(first)
    known = [len(loop.tokens)]
    while not loop.done:
        loop.advance(steps)
        known.append(len(loop.tokens))
    loop.advance(steps)
    assert len(loop.tokens) == known[-1], "nothing comes after the end"
    return Written(list(loop.tokens), known, [tensor.cpu() for tensor in logits])


def both(engine: Engine, request: TextRequest, draw: Draw = GREEDY, **settings: object) -> tuple[Written, Written]:
    host, device = (write(engine, kind, request, draw, **settings) for kind in (HostLoop, DeviceLoop))
    assert device.tokens == host.tokens
    assert device.known == host.known
    assert same(device.logits, host.logits)
    return host, device


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(float((a - b).abs().max() / b.abs().max()) < 1e-5 for a, b in zip(got, want, strict=True))


def test_whole_text_with_forced_tags_and_ratio(folders: dict[str, Path]) -> None:
    engine = engine_in(folders["spec"])
    host, _ = both(engine, REQUEST, traced=True, steps=7)
    assert engine.tokenizer.decode(host.tokens).endswith("</recaption><answer><boi><img_size_256><img_ratio_12>")
    assert host.known == [1, 8, 15, 19] and len(host.logits) == 19


def test_groups_of_steps_run_ahead_and_end_at_the_stop_token(folders: dict[str, Path]) -> None:
    """Without a trace the device is one group ahead of the host; the text ends inside a group."""
    request = replace(REQUEST, task="recaption", need_ratio=False)
    engine = engine_in(folders["spec"])
    host, _ = both(engine, request, steps=4)
    assert engine.tokenizer.decode(host.tokens).endswith("</recaption>")
    assert len(host.tokens) < request.max_new_tokens and (len(host.tokens) - 1) % 4


@pytest.mark.parametrize("draw", [SAMPLED, replace(SAMPLED, top_k=0, top_p=1.0), Draw(False, repetition_penalty=1e4)])
def test_sampled_with_penalty_and_cut_at_the_limit(folders: dict[str, Path], draw: Draw) -> None:
    """A prompt that holds the letters of the text, and a task that almost nothing ends."""
    request = replace(REQUEST, prompt="a quick dog!", task="auto", need_ratio=False, max_new_tokens=6)
    host, _ = both(engine_in(folders["spec"]), request, draw, steps=3)
    assert host.known == [1, 4, 6]
    assert host.tokens != write(engine_in(folders["spec"]), HostLoop, request).tokens, "the settings must matter"


def test_no_step_runs_behind_the_last_token_that_the_limit_allows(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a text would wait for it."""
    steps, step = [], DeviceLoop.step
    monkeypatch.setattr(DeviceLoop, "step", lambda self: (steps.append(1), step(self))[1])
    request = replace(REQUEST, prompt="a quick dog!", task="auto", need_ratio=False, max_new_tokens=6)
    assert len(write(engine_in(folders["spec"]), DeviceLoop, request, steps=4).tokens) == 6
    assert len(steps) == 5, "the first token comes from the prompt"


@pytest.mark.parametrize("task", ["img_ratio", "image"])
def test_one_token(folders: dict[str, Path], task: str) -> None:
    host, _ = both(engine_in(folders["spec"]), replace(REQUEST, task=task, max_new_tokens=1), traced=True)
    assert host.known == [1]


def test_odd_sizes(folders: dict[str, Path]) -> None:
    """Nine query heads on three KV heads of 12, five experts of which three are used, widths of 7 and 21."""
    both(engine_in(folders["odd"]), replace(REQUEST, max_new_tokens=4), traced=True)


@pytest.mark.parametrize("kind", [HostLoop, DeviceLoop])
def test_nan_names_the_token(folders: dict[str, Path], kind: type) -> None:
    engine = engine_in(folders["spec"])
    loop, first = begin(engine, kind, REQUEST, GREEDY)
    prompt = len(prefill_row(engine.tokenizer, engine.config, REQUEST))
    with pytest.raises(TextStageError, match=rf"^The logits of token {prompt} contain NaN"):
        loop.start(torch.full_like(first, float("nan")))
    loop, first = begin(engine, kind, REQUEST, GREEDY)
    loop.start(first)
    norm = engine.model.weights["decode"].ln_f
    kept = norm.clone()
    try:
        norm.fill_(float("nan"))
        with pytest.raises(TextStageError, match=rf"^The logits of token {prompt + 1} contain NaN"):
            loop.advance(2)
    finally:
        norm.copy_(kept)


def test_the_fault_behind_a_failed_reduction_is_told(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction that was given up because a peer failed is not called a timeout."""
    engine = engine_in(folders["spec"])
    fault = Fault("failed", (1,), "AR", "token 1 of 60", "the process has ended")

    def told() -> None:
        raise fault.error()

    monkeypatch.setattr(GroupReduction, "failed", torch.ones(1, dtype=torch.int32, device=DEVICE))
    loop, first = begin(engine, DeviceLoop, REQUEST, GREEDY)
    loop.start(first)  # nobody has published anything: the reduction itself must say what it thinks
    monkeypatch.setattr(engine.model.comm, "fault_check", told)
    loop, first = begin(engine, DeviceLoop, REQUEST, GREEDY)
    with pytest.raises(RankFault, match=r"^rank 1 failed in AR \(token 1 of 60\): the process has ended$"):
        loop.start(first)


def test_steps_that_never_end_are_not_waited_for(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that lives and does not come: nobody publishes a fault, so only the limit ends the wait."""
    engine = engine_in(folders["spec"])
    loop, _ = begin(engine, DeviceLoop, REQUEST, GREEDY)
    monkeypatch.setattr(engine.model.comm, "timeout_s", 0.1)
    with pytest.raises(CollectiveTimeout, match=r"^the device did not finish its steps of a text within 0 s$"):
        loop._await(SimpleNamespace(query=lambda: False))


@pytest.mark.parametrize(("error", "want"), [(SectionCancelled("cancelled"), ["finish", "release"]), (OSError("the disk is full"), ["release"])])
def test_a_text_that_is_broken_off_leaves_nothing_under_way(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, error: Exception, want: list[str]
) -> None:
    """A cancel waits for the steps that all ranks have launched; after a fault peers may be missing, so nobody waits."""
    calls: list[str] = []
    for name in ("finish", "release"):
        kept = getattr(DeviceLoop, name)
        monkeypatch.setattr(DeviceLoop, name, lambda loop, name=name, kept=kept: (calls.append(name), kept(loop)))

    def check(done: int, total: int) -> None:
        if done > 4:
            raise error

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        Engine.load(folders["spec"], plan, comm, LoadOptions(decode="graph"), device=DEVICE).generate_text(REQUEST, check=check)

    with pytest.raises(type(error)):
        run_ranks(body, "single", world_size=1)
    assert calls == want


@pytest.mark.parametrize("layout", ["micro_major", "expert_major"])
def test_ranks_with_micro_views_of_either_layout(folders: dict[str, Path], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas decode in one group of two, each with its micro shard of all weights, strided in one of the layouts."""
    if DEVICE.type == "cuda":
        pytest.skip("ranks are threads of one process here; tests with several GPUs are elsewhere")
    one_rank_at_a_time(monkeypatch)
    request = replace(REQUEST, max_new_tokens=3)

    def body(plan: ParallelPlan, comm: Communicator) -> tuple[TextResult, TextResult, list[torch.Tensor], list[torch.Tensor]]:
        traces: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        results = []
        for decode, trace in zip(("eager", "graph"), traces, strict=True):
            engine = Engine.load(folders["hybrid"], plan, comm, LoadOptions(moe_layout=layout, decode=decode), device=DEVICE)
            results.append(engine.generate_text(request, trace=trace.append))
        return *results, *traces

    ranks = run_ranks(body, "hybrid", world_size=2, storage_tp=1)
    alone = write(engine_in(folders["hybrid"]), HostLoop, request, traced=True)
    for host, device, host_logits, device_logits in ranks:
        assert list(host.tokens) == list(device.tokens) == alone.tokens
        assert same(device_logits, alone.logits) and same(host_logits, alone.logits)
        assert all(torch.equal(a, b) for a, b in zip(device_logits, ranks[0][3], strict=True)), "all ranks hold the same bits"
        assert (host.decode, host.reduction) == ("eager: chosen", "process group: decode is eager")
        assert (device.decode, device.reduction) == (
            "steps on the device", "process group: peer memory cannot be used, peers' memory needs CUDA devices"
        )  # fmt: skip


class TestChoice:
    """Where nothing interprets kernels, a CPU has only the eager way."""

    @pytest.fixture(autouse=True)
    def _no_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_support, "interpreting", lambda: False)

    def test_auto_says_why(self) -> None:
        assert choose_decode(CPU) == (False, "eager: no CUDA device")
        assert choose_decode(CPU, "eager") == (False, "eager: chosen")

    def test_eager_kernels_mean_eager_text(self) -> None:
        assert choose_decode(DEVICE, "auto", "eager") == (False, "eager: eager kernels were chosen")

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (LoadOptions(decode="graph"), r"^decode graph cannot run here: no CUDA device; choose decode auto or eager$"),
            (LoadOptions(kernels="fused"), r"^fused kernels cannot run here: no CUDA device; choose kernels auto or eager$"),
            (LoadOptions(reduction="peer"), r"^reduction peer is for tokens that are written on the device, but decode is eager: no CUDA device; choose"),
            (LoadOptions(reduction="flashinfer"), r"^reduction flashinfer is for tokens that are written on the device, but decode is eager: no CUDA"),
            (LoadOptions(moe_backend="flashinfer"), r"^moe_backend flashinfer cannot run here: no CUDA device; or choose moe_backend auto$"),
            (LoadOptions(moe_backend="triton"), r"^moe_backend triton cannot run here: kernels are eager: no CUDA device; choose moe_backend auto$"),
        ],
    )
    def test_refused_before_anything_is_read(self, tmp_path: Path, options: LoadOptions, sentence: str) -> None:
        """The folder is empty, and nobody has looked."""
        with pytest.raises(ValueError, match=sentence):
            run_ranks(lambda plan, comm: load_model(tmp_path, plan, comm, options, device=CPU), "single", world_size=1)

    @pytest.mark.parametrize("name", ["kernels", "decode", "reduction", "moe_backend"])
    def test_unknown_values(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"^unknown {name} 'fast'; choose one of auto, "):
            LoadOptions(**{name: "fast"})
