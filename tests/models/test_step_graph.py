"""When a step is recorded, what a replay reads, when a record is dropped. The graph is a double that launches again: what it does on a device is
tests/models/test_gpu_denoise.py's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import engine_of
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3 import denoise, step_graph
from phase_parallel.models.hunyuan_image_3.denoise import Denoiser, DenoiseRow, sample
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.model import StepInputs
from phase_parallel.models.hunyuan_image_3.schedule import flow_sigmas
from phase_parallel.models.hunyuan_image_3.sequence import ImageRows, build_image_rows
from phase_parallel.models.hunyuan_image_3.step_graph import why_not_recorded
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.ledger import Ledger
from phase_parallel.parallel.plan import ParallelPlan, make_plan


class Launcher:
    """In the place of a CUDA graph: a replay launches again and writes the result where the first one lies."""

    def __init__(self, launch: Callable[[], torch.Tensor], result: torch.Tensor):
        self._launch, self._result = launch, result

    def replay(self) -> None:
        self._result.copy_(self._launch())


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every pool that a step was recorded into."""
    found: list[object] = []

    def record(launch: Callable[[], torch.Tensor], pool: object) -> tuple[Launcher, torch.Tensor]:
        found.append(pool)
        result = torch.empty_like(launch())  # nothing is computed while a graph is recorded
        return Launcher(launch, result.fill_(float("nan"))), result

    monkeypatch.setattr(step_graph, "record_graph", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(found) + 1))
    monkeypatch.setattr(denoise, "why_not_recorded", lambda model, alone: None)
    return found


def engine_on(folder: Path) -> Engine:
    return run_ranks(lambda plan, comm: engine_of(folder, plan, comm), "single", world_size=1)[0]


def rows_of(engine: Engine, prompt: str = "a kite") -> ImageRows:
    return build_image_rows(
        engine.tokenizer, engine.config, prompt=prompt, system_prompt=None, cot_text=None, cond_images=(), height=128, width=432
    )


def noise_of(engine: Engine, count: int = 1) -> torch.Tensor:
    return torch.randn(count, engine.config.vae.latent_channels, 8, 27, generator=torch.Generator().manual_seed(3))


def draw(denoiser: Denoiser, engine: Engine, rows: ImageRows, **changes: object) -> list[torch.Tensor]:
    """The latent and the velocities of every step."""
    found: list[torch.Tensor] = []

    def keep(index: int, step: denoise.StepTrace) -> None:
        found.extend((step.pred_cond, *(() if step.pred_uncond is None else (step.pred_uncond,))))

    settings = {"guidance": 4.0} | changes
    return [sample(denoiser, rows.cond, rows.uncond, noise_of(engine), flow_sigmas(4, 3.0), trace=keep, **settings), *found]


@pytest.mark.parametrize("mode", ["batched", "serial"])
def test_replays_draw_the_same_picture(mode: str, eight_ways: Path, records: list[object]) -> None:
    """Every velocity is a tensor of its own: a later step must not change it."""
    engine = engine_on(eight_ways)
    want = draw(Denoiser(engine.model, engine.prefixes, cfg_mode=mode, graphs=False), engine, rows_of(engine))
    assert not records
    got = draw(Denoiser(engine.model, engine.prefixes, cfg_mode=mode), engine, rows_of(engine))
    assert len(records) == 1, "one record for all steps from the second on"
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_embedded_guidance_is_an_input_of_a_record(distil: Path, records: list[object]) -> None:
    engine = engine_on(distil)
    (row,) = [DenoiseRow(rows_of(engine).cond, "cond")]
    plain, recording = Denoiser(engine.model, engine.prefixes, graphs=False), Denoiser(engine.model, engine.prefixes)
    for step in (StepInputs(700.0, 500.0, 2.5), StepInputs(700.0, 500.0, 2.5), StepInputs(500.0, 300.0, 6.0), StepInputs(300.0, 100.0, 6.0)):
        assert torch.equal(recording.velocity([row], noise_of(engine), step), plain.velocity([row], noise_of(engine), step))
    assert len(records) == 1


def test_first_step_of_other_rows_is_not_recorded(eight_ways: Path, records: list[object]) -> None:
    """It compiles and plans, which must not happen while a graph is recorded."""
    engine = engine_on(eight_ways)
    denoiser, step = Denoiser(engine.model, engine.prefixes), StepInputs(700.0)
    made = []
    for prompt in ("a kite", "a boat", "a kite", "a boat", "a kite"):
        denoiser.velocity([DenoiseRow(rows_of(engine, prompt).cond, "cond")], noise_of(engine), step)
        made.append(len(records))
    assert made == [0, 0, 1, 2, 2], "two texts in turn, as a host with two models sends them"
    denoiser.velocity([DenoiseRow(rows_of(engine).cond, "cond")], noise_of(engine, 2), step)
    assert len(records) == 2, "latents of another shape are another step"
    assert len(set(records)) == 1, "all share their memory"


def test_records_end_with_the_prefixes_they_read(eight_ways: Path, records: list[object]) -> None:
    engine = engine_on(eight_ways)
    denoiser, step = Denoiser(engine.model, engine.prefixes), StepInputs(700.0)

    def velocity(prompt: str) -> torch.Tensor:
        return denoiser.velocity([DenoiseRow(rows_of(engine, prompt).cond, "cond")], noise_of(engine), step)

    want = velocity("a kite")
    velocity("a kite")
    for number in range(4):  # as many rows as are kept
        velocity(f"boat {number}")
    assert [blocks[0].row for blocks, _ in denoiser._graphs._steps.values()] == [rows_of(engine, f"boat {number}").cond for number in range(4)]
    assert torch.equal(velocity("a kite"), want) and len(records) == 1
    velocity("a kite")
    assert records == [(0, 1), (0, 2)], "memory whose last record has ended is not recorded into again"
    denoiser.release()
    assert not denoiser._graphs._steps


def test_a_new_generation_of_groups_starts_without_records(eight_ways: Path, records: list[object]) -> None:
    engine = engine_on(eight_ways)
    rows = [DenoiseRow(rows_of(engine).cond, "cond")]
    for _ in range(2):
        engine.velocity(rows, noise_of(engine), StepInputs(700.0))
    assert len(records) == 1
    engine.connect(engine.model.comm)
    assert not engine.denoiser._graphs._steps


@pytest.mark.parametrize("recorded", [True, False])
def test_a_rank_alone_gives_up_its_records_where_memory_ends(
    recorded: bool, eight_ways: Path, records: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture that fits alone, but not beside what earlier ones recorded; without records nothing is left to give up."""
    engine = engine_on(eight_ways)
    denoiser = Denoiser(engine.model, engine.prefixes, graphs=recorded)
    first = draw(denoiser, engine, rows_of(engine))
    assert bool(records) == recorded
    prepare, calls = denoiser.prepare, []

    def full_at_first(rows: object) -> object:
        calls.append(rows)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return prepare(rows)

    monkeypatch.setattr(denoiser, "prepare", full_at_first)
    if not recorded:
        with pytest.raises(torch.OutOfMemoryError):
            draw(denoiser, engine, rows_of(engine))
        return
    before = len(records)
    again = draw(denoiser, engine, rows_of(engine))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(records) == before + 1, "the steps are recorded anew"


def test_the_host_waits_for_peers_before_it_records(eight_ways: Path, records: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording waits for the device without a limit."""
    engine = engine_on(eight_ways)
    waited = []
    monkeypatch.setattr(engine.model.comm, "await_device", lambda what: waited.append((what, len(records))))
    denoiser = Denoiser(engine.model, engine.prefixes)
    for _ in range(3):
        denoiser.velocity([DenoiseRow(rows_of(engine).cond, "cond")], noise_of(engine), StepInputs(700.0))
    assert waited == [("a step of the picture", 0)]


def test_on_a_cpu_nothing_is_recorded(eight_ways: Path) -> None:
    engine = engine_on(eight_ways)
    assert why_not_recorded(engine.model) == "no CUDA device" and not engine.denoiser.records


TOKENS, SUMMANDS = "the process group exchanges the tokens of a step inside it", "the process group adds up the summands of a step inside it"


@pytest.mark.parametrize(
    ("plan", "by_group", "through_peers"),
    [
        (make_plan("single", world_size=1), None, None),
        (make_plan("replicated", world_size=2, denoise="cfg"), None, None),  # branches are exchanged behind the step
        (make_plan("replicated", world_size=2, denoise="sp"), TOKENS, TOKENS),
        (make_plan("tp", world_size=2), SUMMANDS, None),
        (make_plan("hybrid", world_size=4, denoise="cfg"), SUMMANDS, None),
        (make_plan("hybrid", world_size=4, denoise="sp"), TOKENS, TOKENS),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelPlan) else "",
)
def test_steps_with_a_process_group_inside_are_not_recorded(plan: ParallelPlan, by_group: str | None, through_peers: str | None) -> None:
    for recordable, reason in ((False, by_group), (True, through_peers)):
        weights = {"denoise": SimpleNamespace(kernels=SimpleNamespace(name="fused"))}
        rows = SimpleNamespace(recordable=recordable)
        model = SimpleNamespace(device=torch.device("cuda"), plan=plan, weights=weights, row_reduction=lambda rows=rows: rows)
        assert why_not_recorded(model) == reason
        assert why_not_recorded(model, alone=True) is None


@pytest.mark.parametrize(("name", "ranks"), [("replicated", 2), ("hybrid", 4)])
def test_one_branch_replays_while_the_other_is_new(
    name: str, ranks: int, eight_ways: Path, records: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another text with the same negative one: what the ranks compare must not tell a replay from a step that was launched."""
    record, replay, replaying = Ledger.record, Launcher.replay, threading.local()

    def silent_replay(self: Launcher) -> None:  # what a graph launches is no call of Python
        replaying.now = True
        replay(self)
        replaying.now = False

    def silent_record(self: Ledger, *entry: object, **more: object) -> None:
        if getattr(replaying, "now", False):
            self.counts[entry[1]] += 1
        else:
            record(self, *entry, **more)

    monkeypatch.setattr(Launcher, "replay", silent_replay)
    monkeypatch.setattr(Ledger, "record", silent_record)

    def work(plan: ParallelPlan, comm: Communicator) -> list[tuple[int, int]]:
        engine, digests, lengths = engine_of(eight_ways, plan, comm), [], []
        for prompt in ("a kite", "a boat"):
            rows = [DenoiseRow(rows_of(engine, prompt).cond, "cond"), DenoiseRow(rows_of(engine).uncond, "uncond")]
            for _ in range(3):
                engine.denoiser.velocity(rows, noise_of(engine), StepInputs(700.0))
                digests.append(comm.ledger.digest())
                lengths.append(comm.ledger.tail()["first"] + len(comm.ledger.tail()["entries"]))
            sums = 2 * engine.config.num_hidden_layers if plan.topology("denoise").tp_size > 1 else 0
            assert lengths[-1] - lengths[-2] == lengths[-2] - lengths[-3] == sums + 1, "recorded and replayed, it says the sums and the branches' gather"
        return digests

    digests = run_ranks(work, name, world_size=ranks, denoise="cfg")
    assert all(other == digests[0] for other in digests)
