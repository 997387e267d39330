"""How the sums of a picture's step are made: chosen together, with a reason, and never a picture from a sum that lacks a part. Peers' memory is a double
that adds through the ranks' gather; the kernel is tests/kernels' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import engine_of
from specs import ALL_PLANS
from thread_world import run_ranks

from phase_parallel.kernels.kernel_set import EAGER
from phase_parallel.kernels.peer_reduce import Mailboxes, reduce_residual_norm_eager
from phase_parallel.kernels.peer_rows import row_block_bytes
from phase_parallel.models import row_reduction
from phase_parallel.models.hunyuan_image_3.engine import Engine, ImageRequest
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.row_reduction import CAPACITY, GroupRows, RowReduction, choose_row_reduction
from phase_parallel.parallel.collectives import Communicator, Partial
from phase_parallel.parallel.peer_memory import PeerMemory, PeerMemoryError
from phase_parallel.parallel.plan import ParallelPlan
from phase_parallel.parallel.waiting import CollectiveTimeout

CPU = torch.device("cpu")
HIDDEN, EPS = 20, 1e-5
CFG4 = {"name": "hybrid", "world_size": 4, "denoise": "cfg"}


class Peers:
    """Opens on all ranks but ``closed``, adds rightly on all but ``wrong``, and on ``late`` the peer stays away from one sum, the first of all unless
    :attr:`after` says how many come before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, closed: int | None = None, wrong: int | None = None, late: int | None = None):
        self.closed, self.wrong, self.late, self.after = closed, wrong, late, 0
        self.comms: dict[int, Communicator] = {}
        self.opened: list[tuple[int, ...]] = []
        self.programs: set[int] = set()
        self.sums = [0] * 8
        monkeypatch.setattr(row_reduction, "open_peer_memory", self.open)
        monkeypatch.setattr(row_reduction, "reduce_rows", self.reduce)
        monkeypatch.setattr(row_reduction, "_own_programs", lambda comm, kernels, device: 7 + comm.plan.rank)

    def open(self, comm: Communicator, ranks: tuple[int, ...], nbytes: int, device: torch.device) -> PeerMemory:
        assert nbytes == row_block_bytes(CAPACITY, *self.size(comm))
        self.comms[comm.abort_word.tensor.data_ptr()] = comm
        self.opened.append(ranks)
        if comm.plan.rank == self.closed:
            raise PeerMemoryError("its device is far away")
        return PeerMemory(torch.zeros(len(ranks), dtype=torch.int64), torch.zeros(1), None)

    def size(self, comm: Communicator) -> tuple[int, int]:
        return HIDDEN, 4

    def reduce(
        self, boxes: Mailboxes, summand: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor, *,
        capacity: int, timeout_s: float,
    ) -> None:  # fmt: skip
        comm = self.comms[boxes.abort.data_ptr()]  # whose fault ends the waiting
        topology = comm.plan.topology("denoise")
        assert boxes.rank == topology.tp_rank and capacity == CAPACITY
        self.programs.add(boxes.calls.numel())
        total, norm = reduce_residual_norm_eager(torch.stack(comm.gather(summand, topology.tp_ranks, "peers")), residual, weight, eps)
        residual.copy_(total + (1.0 if comm.plan.rank == self.wrong else 0.0))
        normed.copy_(norm)
        self.sums[comm.plan.rank] += 1
        if comm.plan.rank == self.late and self.sums[comm.plan.rank] > self.after:
            boxes.failed.fill_(1)


def choose(plan: ParallelPlan, comm: Communicator, choice: str = "auto") -> tuple[RowReduction, str]:
    return choose_row_reduction(comm, EAGER, HIDDEN, torch.float32, CPU, choice)


def reasons(results: list[tuple[RowReduction, str]]) -> list[str]:
    assert {chosen.name for chosen, _ in results} == {"group"}
    return [reason.removeprefix("process group: peer memory cannot be used, ") for _, reason in results]


class TestChoice:
    @pytest.mark.parametrize(
        ("plan", "reason"),
        [
            ({"name": "single", "world_size": 1}, "one rank: nothing to reduce"),
            ({"name": "replicated", "world_size": 2}, "one rank: nothing to reduce"),
            ({"name": "tp", "world_size": 4}, "process group: peer memory adds up the rows of 2 ranks, and here they are 4"),
        ],
        ids=["single", "replicated", "tp4"],
    )
    def test_other_numbers_of_ranks_open_nothing(self, plan: dict, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
        peers = Peers(monkeypatch)
        assert {why for _, why in run_ranks(choose, **plan)} == {reason} and not peers.opened

    def test_group_asks_for_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peers = Peers(monkeypatch)
        assert set(reasons(run_ranks(lambda plan, comm: choose(plan, comm, "group"), "tp", world_size=2))) == {"process group: chosen"}
        assert not peers.opened

    def test_a_cpu_falls_back_with_the_reason(self) -> None:
        assert set(reasons(run_ranks(choose, **CFG4))) == {"process group: peer memory needs fused kernels and NCCL on every rank"}

    def test_each_pair_opens_its_own_and_all_take_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peers = Peers(monkeypatch)
        results = run_ranks(choose, **CFG4)
        assert {(chosen.name, chosen.recordable, reason) for chosen, reason in results} == {
            ("peer memory", True, "peer memory: its sums passed the self-test on all ranks")
        }
        assert sorted(peers.opened) == [(0, 1), (0, 1), (2, 3), (2, 3)]
        assert peers.programs == {7}, "as many as the rank with the fewest has"

    def test_one_rank_that_cannot_open_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody adds through memory that a peer has not opened."""
        peers = Peers(monkeypatch, closed=2)
        other = "another rank could not open it"
        assert reasons(run_ranks(choose, **CFG4)) == [other, other, "its device is far away", other] and not any(peers.sums)

    @pytest.mark.parametrize("fault", ["wrong", "late"])
    def test_one_rank_with_a_wrong_sum(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        Peers(monkeypatch, **{fault: 1})
        assert "self-test gave a wrong sum" in reasons(run_ranks(choose, **CFG4))[1]


def test_both_ways_make_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    Peers(monkeypatch)
    generator = torch.Generator().manual_seed(4)
    summands, residual = torch.randn(2, 5, HIDDEN, generator=generator), torch.randn(5, HIDDEN, generator=generator)
    weight = torch.randn(HIDDEN, generator=generator)

    def body(plan: ParallelPlan, comm: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        view, found = comm.phase("denoise"), []
        for reduce in (choose(plan, comm)[0], GroupRows(EAGER.residual_norm)):
            comm.ledger.reset()
            found.append(reduce(view, Partial(summands[plan.rank].clone(), "o_proj"), residual.clone(), weight, EPS))
            assert comm.ledger.tail()["entries"] == ["denoise row_reduce o_proj 5x20 torch.float32"]
        return found

    for (total, normed), (want, want_normed) in run_ranks(body, "tp", world_size=2):
        assert torch.equal(total, want) and torch.equal(normed, want_normed)


class EnginePeers(Peers):
    def size(self, comm: Communicator) -> tuple[int, int]:
        return 64, 4


def draw(engine: Engine, steps: int = 3) -> torch.Tensor:
    rows = build_image_rows(
        engine.tokenizer, engine.config, prompt="a kite", system_prompt=None, cot_text=None, cond_images=(), height=128, width=432
    )
    return engine.sample(ImageRequest(rows, steps=steps, guidance=4.0, flow_shift=3.0, seeds=(1,)))


@pytest.mark.parametrize("name", ["tp2", "hybrid4-cfg", "hybrid4-ulysses"])
def test_a_picture_is_that_of_the_process_group(name: str, eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> tuple[torch.Tensor, str]:
        engine = engine_of(eight_ways, plan, comm)
        return draw(engine), engine.model.rows_reason

    want = run_ranks(body, **ALL_PLANS[name])
    peers = EnginePeers(monkeypatch)
    got = run_ranks(body, **ALL_PLANS[name])
    assert all(torch.equal(latent, want[0][0]) for latent, _ in [*got, *want])
    assert all(reason.startswith("peer memory") for _, reason in got) and all(peers.sums[: len(got)])
    assert sorted({ranks for ranks in peers.opened}) == ([(0, 1)] if name == "tp2" else [(0, 1), (2, 3)])


def test_memory_is_opened_once_on_a_communicator(eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = EnginePeers(monkeypatch)

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        first = engine.model.row_reduction()
        draw(engine)
        assert engine.model.row_reduction() is first

    run_ranks(body, "tp", world_size=2)
    assert len(peers.opened) == 2
    run_ranks(body, "tp", world_size=2)
    assert len(peers.opened) == 4, "a new communicator has another abort word, and its peers may be new processes"


LATE = r"^a peer did not join a reduction of the picture's step within 60 s$"


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_a_sum_that_lacks_a_part_makes_no_picture(steps_before: int, eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is the first, a middle or the last step of three."""
    peers = EnginePeers(monkeypatch, late=None)
    begun = []

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        engine.model.row_reduction()
        if plan.rank == 0:
            peers.after = peers.sums[0] + 2 * engine.config.num_hidden_layers * steps_before
            peers.late = 0
        forward = engine.denoiser._forward
        monkeypatch.setattr(engine.denoiser, "_forward", lambda *args: begun.append(plan.rank) or forward(*args))
        draw(engine)

    with pytest.raises(CollectiveTimeout, match=LATE):
        run_ranks(body, "tp", world_size=2)
    assert begun.count(0) == steps_before + 1, "no further step begins"


def test_a_step_of_somebody_elses_sampler_is_looked_at_at_once(eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = EnginePeers(monkeypatch)

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        from phase_parallel.models.hunyuan_image_3.denoise import DenoiseRow
        from phase_parallel.models.hunyuan_image_3.model import StepInputs

        engine = engine_of(eight_ways, plan, comm)
        engine.model.row_reduction()
        peers.late, peers.after = 0, 0
        rows = build_image_rows(
            engine.tokenizer, engine.config, prompt="a kite", system_prompt=None, cot_text=None, cond_images=(), height=128, width=432
        )
        engine.velocity([DenoiseRow(rows.cond, "cond")], torch.zeros(1, engine.config.vae.latent_channels, 8, 27), StepInputs(700.0))

    with pytest.raises(CollectiveTimeout, match=LATE):
        run_ranks(body, "tp", world_size=2)


def test_a_peers_fault_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(monkeypatch)

    def fault() -> None:
        raise ValueError("rank 1 failed in denoise: the disk is full")

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        reduce, _ = choose(plan, comm)
        peers.late = 0
        x = torch.ones(3, HIDDEN)
        reduce(comm.phase("denoise"), Partial(x, "o_proj"), x.clone(), x[0], EPS)
        reduce.require()  # nothing is known before somebody looked
        reduce.follow()
        comm.fault_check = fault
        reduce.require()

    with pytest.raises(ValueError, match="the disk is full"):
        run_ranks(body, "tp", world_size=2)
