"""How a decode step's reduction is chosen: together, with a reason, and without peers' memory where there is none."""

from __future__ import annotations

import threading

import pytest
import torch
from one_token_kernels import one_rank_at_a_time
from thread_world import run_ranks

from phase_parallel.kernels.peer_gather import gather_bytes, gathered
from phase_parallel.kernels.peer_reduce import Mailboxes
from phase_parallel.kernels.residual_norm import residual_norm_eager
from phase_parallel.models import decode_head, flashinfer_reduction, reduction
from phase_parallel.models.flashinfer_reduction import open_flashinfer_reduction
from phase_parallel.models.reduction import GroupReduction, PeerReduction, Reduction, choose_reduction, why_not_reduction
from phase_parallel.parallel import peer_memory
from phase_parallel.parallel.abort_word import AbortWord
from phase_parallel.parallel.collectives import Communicator, Partial
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.peer_memory import Openings, PeerMemory, PeerMemoryError
from phase_parallel.parallel.plan import ParallelPlan
from phase_parallel.parallel.waiting import CollectiveError, CollectiveTimeout

pytest.importorskip("triton")
CPU = torch.device("cpu")
HIDDEN, VOCAB, EPS = 20, 60, 1e-5
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are threads with CPU tensors, which need Triton's interpreter")


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has opened peers' memory yet."""
    monkeypatch.setattr(peer_memory, "_openings", Openings())


def choose(plan: ParallelPlan, comm: Communicator, choice: str = "auto") -> tuple[Reduction, str]:
    return choose_reduction(comm, HIDDEN, VOCAB, torch.float32, CPU, choice)


@needs_interpreter
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_group_reduction(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank_at_a_time(monkeypatch)
    generator = torch.Generator().manual_seed(4)
    summands = torch.randn(ranks, HIDDEN, generator=generator)
    residual, weight = torch.randn(HIDDEN, generator=generator), torch.randn(HIDDEN, generator=generator)

    def body(plan: ParallelPlan, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        mine, normed = residual.clone(), torch.full((HIDDEN,), float("nan"))
        GroupReduction()(comm.phase("decode"), Partial(summands[plan.rank].clone(), "o_proj"), mine, weight, EPS, normed)
        assert dict(comm.ledger.counts) == {"row_reduce": 1}
        return mine, normed

    name = "single" if ranks == 1 else "tp"
    want_total, want_normed = residual_norm_eager(summands.sum(0), residual, weight, EPS)
    for total, normed in run_ranks(body, name, world_size=ranks):
        torch.testing.assert_close(total, want_total)
        torch.testing.assert_close(normed, want_normed)


def test_a_reduced_tensor_is_not_reduced_again() -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        x = torch.zeros(HIDDEN)
        GroupReduction()(comm.phase("decode"), x, x, x, EPS, x)

    with pytest.raises(CollectiveError, match="row_reduce got a Tensor, not a partial product"):
        run_ranks(body, "tp", world_size=2)


class TestChoice:
    def test_one_rank(self) -> None:
        ((chosen, reason),) = run_ranks(choose, "single", world_size=1)
        assert chosen.name == "group" and reason == "one rank: nothing to reduce"

    def test_group_asks_for_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reduction, "open_peer_memory", None)
        results = run_ranks(lambda plan, comm: choose(plan, comm, "group"), "tp", world_size=2)
        assert {(chosen.name, reason) for chosen, reason in results} == {("group", "process group: chosen")}

    def test_a_cpu_falls_back_with_the_reason(self) -> None:
        results = run_ranks(choose, "hybrid", world_size=4)
        wanted = ("group", "process group: peer memory cannot be used, peers' memory needs CUDA devices")
        assert {(chosen.name, reason) for chosen, reason in results} == {wanted}

    def test_peer_is_refused_on_a_cpu(self) -> None:
        with pytest.raises(PeerMemoryError, match=r"^peer memory cannot be used: peers' memory needs CUDA devices; choose reduction auto or group$"):
            run_ranks(lambda plan, comm: choose(plan, comm, "peer"), "tp", world_size=2)


    def test_flashinfer_is_refused_on_a_cpu(self) -> None:
        sentence = r"^FlashInfer's all-reduce cannot be used: no CUDA device; choose reduction auto or group$"
        with pytest.raises(PeerMemoryError, match=sentence):
            run_ranks(lambda plan, comm: choose(plan, comm, "flashinfer"), "tp", world_size=2)

    def test_flashinfer_is_never_taken_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reduction, "open_flashinfer_reduction", lambda *arguments: pytest.fail("it was opened"))
        Peers(monkeypatch, closed=0).run()

    def test_known_before_a_load(self) -> None:
        assert why_not_reduction(CPU, "flashinfer") == "FlashInfer's all-reduce cannot be used: no CUDA device; or choose reduction auto"
        assert why_not_reduction(CPU, "auto") is None and why_not_reduction(CPU, "peer") is None


class Peers:
    """Stands for peers' memory: opens on all ranks but ``closed``, adds rightly on all but ``wrong``, and completes the logits on all but ``gap``."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, closed: int | None = None, wrong: int | None = None, late: int | None = None, gap: int | None = None
    ):
        self.closed, self.wrong, self.late, self.gap = closed, wrong, late, gap
        self.blocks: dict[int, torch.Tensor] = {}
        self.comms: dict[int, Communicator] = {}
        self.sums = 0
        monkeypatch.setattr(reduction, "open_peer_memory", self.open)
        monkeypatch.setattr(reduction, "reduce_residual_norm", self.reduce)
        monkeypatch.setattr(decode_head, "gemv_gather", self.gather)

    def open(self, comm: Communicator, ranks: tuple[int, ...], nbytes: int, device: torch.device) -> PeerMemory:
        self.comms[comm.plan.logical_tp_rank] = comm
        if comm.plan.rank == self.closed:
            raise PeerMemoryError("its device is far away")
        block = self.blocks[comm.plan.logical_tp_rank] = torch.zeros(nbytes, dtype=torch.uint8)
        return PeerMemory(torch.zeros(len(ranks), dtype=torch.int64), block, None)

    def gather(self, boxes: Mailboxes, x: torch.Tensor, weight: torch.Tensor, first: int, *, timeout_s: float) -> None:
        comm = self.comms[boxes.rank]
        assert boxes.abort is comm.abort_word.tensor, "a fault must end the waiting"
        whole = torch.cat(comm.gather(weight @ x, comm.plan.topology("decode").tp_ranks, "peers"))
        if comm.plan.rank == self.gap:
            whole = whole.roll(1)
        gathered(self.blocks[boxes.rank][-gather_bytes(VOCAB) :])[: whole.numel()] = whole

    def reduce(self, boxes: Mailboxes, summand: torch.Tensor, residual: torch.Tensor, *rest: object, timeout_s: float) -> None:
        comm = self.comms[boxes.rank]
        self.sums += 1
        assert boxes.abort is comm.abort_word.tensor, "a fault must end the waiting"
        total = torch.stack(comm.gather(summand, comm.plan.topology("decode").tp_ranks, "peers")).sum(0)
        residual += total + (1.0 if comm.plan.rank == self.wrong else 0.0)
        if comm.plan.rank == self.late:
            boxes.failed.fill_(1)

    def run(self, choice: str = "auto") -> list[tuple[Reduction, str]]:
        return run_ranks(lambda plan, comm: choose(plan, comm, choice), "hybrid", world_size=4)


def reasons(results: list[tuple[Reduction, str]]) -> list[str]:
    return [reason.removeprefix("process group: peer memory cannot be used, ") for _, reason in results]


class TestAgreement:
    def test_all_take_it_where_it_works_on_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results = Peers(monkeypatch).run()
        assert {chosen.name for chosen, _ in results} == {"peer memory"}
        assert {reason for _, reason in results} == {"peer memory: its sums passed the self-test on all ranks"}

    def test_one_rank_that_cannot_open_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody adds through memory that a peer has not opened."""
        peers = Peers(monkeypatch, closed=2)
        results = peers.run()
        assert {chosen.name for chosen, _ in results} == {"group"} and peers.sums == 0
        other = "another rank could not open it"
        assert reasons(results) == [other, other, "its device is far away", other]

    @pytest.mark.parametrize("fault", ["wrong", "late", "gap"])
    def test_one_rank_with_a_wrong_sum(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        results = Peers(monkeypatch, **{fault: 1}).run()
        assert {chosen.name for chosen, _ in results} == {"group"}
        assert "self-test gave a wrong sum" in reasons(results)[1]

    def test_peer_that_was_asked_for_fails_on_all_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peers = Peers(monkeypatch, closed=3)
        said: list[str] = []

        def body(plan: ParallelPlan, comm: Communicator) -> None:
            try:
                choose(plan, comm, "peer")
            except PeerMemoryError as error:
                said.append(str(error))

        run_ranks(body, "hybrid", world_size=4)
        assert len(said) == 4 and peers.sums == 0
        assert all(sentence.startswith("peer memory cannot be used: ") and sentence.endswith("; choose reduction auto or group") for sentence in said)


class Rendezvous:
    """Stands for the allocator and PyTorch's rendezvous, with each rank's count as in a process of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.here = threading.local()
        self.openings = [Openings() for _ in range(4)]
        self.blockless: set[int] = set()
        self.breaks: set[int] = set()
        self.met: list[int] = []
        monkeypatch.setattr(peer_memory, "process_openings", lambda: self.openings[self.here.rank])
        monkeypatch.setattr(peer_memory, "_allocate", self.allocate)
        monkeypatch.setattr(peer_memory, "_meet_peers", self.meet)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.here.rank in self.blockless:
            raise PeerMemoryError("out of memory")
        return torch.zeros(nbytes, dtype=torch.uint8)

    def meet(self, comm: Communicator, ranks: tuple[int, ...], block: torch.Tensor) -> tuple[object, torch.Tensor]:
        self.met.append(self.here.rank)
        if self.here.rank in self.breaks:
            raise PeerMemoryError("the driver broke")
        return None, torch.zeros(len(ranks), dtype=torch.int64)

    def open(self) -> list[str]:
        """What each rank of four says, nothing when it has opened its peers' memory; and they can still talk to each other."""

        def body(plan: ParallelPlan, comm: Communicator) -> str:
            self.here.rank = plan.rank
            said = ""
            try:
                assert peer_memory.open_peer_memory(comm, plan.topology("decode").tp_ranks, 8, CPU).block.numel() == 8
            except PeerMemoryError as error:
                said = str(error)
            assert comm.control_gather([plan.rank]) == [[0], [1], [2], [3]], "every rank has made the same gathers"
            return said

        self.met.clear()
        return run_ranks(body, "hybrid", world_size=4)


class TestOpening:
    """Nobody enters PyTorch's rendezvous where a peer would stay away, or where it would look for it under another number."""

    GONE = "opening it broke off on {} before, and only a restart of the ranks brings it back"

    def test_again_and_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = Rendezvous(monkeypatch)
        for _ in range(3):
            assert world.open() == [""] * 4 and sorted(world.met) == [0, 1, 2, 3]

    def test_a_rank_without_a_block_keeps_all_away_and_disturbs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = Rendezvous(monkeypatch)
        world.blockless = {2}
        other = "rank 2 could not prepare it"
        assert world.open() == [other, other, "out of memory", other] and world.met == []
        world.blockless = set()
        assert world.open() == [""] * 4

    def test_a_rank_that_broke_off_inside_keeps_all_away_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = Rendezvous(monkeypatch)
        world.breaks = {1}
        assert world.open() == ["", "the driver broke", "", ""]
        world.breaks = set()
        assert world.open() == [self.GONE.format("rank 1")] * 4 and world.met == []

    def test_a_rank_that_did_not_come_keeps_all_away_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It learnt of a fault when the others were on their way already."""
        world = Rendezvous(monkeypatch)
        world.open()
        world.openings[3].begun = world.openings[3].ended = 0
        assert world.open() == [self.GONE.format("rank 3")] * 4 and world.met == []

    def test_auto_says_so_and_takes_the_process_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = Rendezvous(monkeypatch)
        world.openings[0].begun = 1

        def body(plan: ParallelPlan, comm: Communicator) -> tuple[Reduction, str]:
            world.here.rank = plan.rank
            return choose(plan, comm)

        results = run_ranks(body, "hybrid", world_size=4)
        said = self.GONE.format("ranks 0, 1, 2 and 3")
        assert {(chosen.name, reason) for chosen, reason in results} == {("group", f"process group: peer memory cannot be used, {said}")}


class FlashInferKernel:
    """Stands for FlashInfer's module: one workspace a rank, and a fused all-reduce that adds through the ranks' gather."""

    class AllReduceFusionPattern:
        kARResidualRMSNorm = 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, closed: int | None = None, wrong: int | None = None):
        self.closed, self.wrong, self.workspaces, self.comms = closed, wrong, [], {}
        one_rank_at_a_time(monkeypatch)
        monkeypatch.setattr(flashinfer_reduction, "why_not_flashinfer_reduction", lambda device: None)
        monkeypatch.setattr(flashinfer_reduction, "function", lambda module, name: getattr(self, name))
        monkeypatch.setattr(flashinfer_reduction.dist, "get_group_rank", lambda group, rank: rank)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(ProcessGroups, "for_ranks", lambda groups, ranks: object())

    def trtllm_create_ipc_workspace_for_all_reduce_fusion(self, **options: object) -> tuple[object, torch.Tensor, dict]:
        self.workspaces.append(options)
        if options["tp_rank"] == self.closed:
            raise RuntimeError("no peer access\nand a trace")
        return object(), torch.zeros(1), {}

    def trtllm_allreduce_fusion(
        self, *, allreduce_in: torch.Tensor, world_rank: int, residual_in: torch.Tensor, residual_out: torch.Tensor, norm_out: torch.Tensor,
        rms_gamma: torch.Tensor, rms_eps: float, use_oneshot: bool, fp32_acc: bool, hidden_dim: int, token_num: int, **rest: object,
    ) -> None:  # fmt: skip
        assert use_oneshot and fp32_acc and (token_num, hidden_dim) == (1, HIDDEN) and residual_in is residual_out
        comm = self.comms[world_rank]
        total = torch.stack(comm.gather(allreduce_in, comm.plan.topology("decode").tp_ranks, "peers")).sum(0)
        sum_, norm = residual_norm_eager(total + (1.0 if world_rank == self.wrong else 0.0), residual_in, rms_gamma, rms_eps)
        residual_out.copy_(sum_)
        norm_out.copy_(norm)

    def run(self) -> list[tuple[Reduction, str]]:
        def body(plan: ParallelPlan, comm: Communicator) -> tuple[Reduction, str]:
            self.comms[plan.rank] = comm
            return choose(plan, comm, "flashinfer")

        return run_ranks(body, "tp", world_size=2)


class TestFlashInfer:
    def test_all_ranks_take_it_after_its_self_test(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = FlashInferKernel(monkeypatch)
        results = kernel.run()
        assert {chosen.name for chosen, _ in results} == {"FlashInfer"}
        assert {reason for _, reason in results} == {"FlashInfer: its sums passed the self-test on all ranks"}
        for options in kernel.workspaces:
            assert options["use_symm_dev_mem"] is False, "its own device memory would not go through PyTorch's symmetric memory"
            assert options["use_fp32_lamport"] is True and options["tp_size"] == 2

    @pytest.mark.parametrize(
        ("fault", "reasons"),
        [("closed", {"no peer access", "another rank could not open it"}), ("wrong", {"its self-test gave a wrong sum"})],
    )
    def test_what_fails_on_one_rank_is_refused_on_all(self, fault: str, reasons: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = FlashInferKernel(monkeypatch, **{fault: 1})
        said: list[str] = []

        def body(plan: ParallelPlan, comm: Communicator) -> None:
            kernel.comms[plan.rank] = comm
            try:
                choose(plan, comm, "flashinfer")
            except PeerMemoryError as error:
                said.append(str(error))

        run_ranks(body, "tp", world_size=2)
        assert len(said) == 2
        found = {s.removeprefix("FlashInfer's all-reduce cannot be used: ").removesuffix("; choose reduction auto or group") for s in said}
        assert reasons <= found

    def test_a_rank_without_it_keeps_all_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As its own process knows it: it is not built there."""
        kernel, here = FlashInferKernel(monkeypatch), threading.local()
        monkeypatch.setattr(flashinfer_reduction, "why_not_flashinfer_reduction", lambda device: "it is not built" if here.rank else None)

        def body(plan: ParallelPlan, comm: Communicator) -> str:
            here.rank = plan.rank
            try:
                choose(plan, comm, "flashinfer")
            except PeerMemoryError as error:
                return str(error)
            return ""

        tail = "; choose reduction auto or group"
        said = [sentence.removeprefix("FlashInfer's all-reduce cannot be used: ").removesuffix(tail) for sentence in run_ranks(body, "tp", world_size=2)]
        assert said == ["rank 1 could not prepare it", "it is not built"] and kernel.workspaces == []

    def test_sizes_that_it_has_no_kernel_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FlashInferKernel(monkeypatch)
        with pytest.raises(PeerMemoryError, match=r"^the kernel takes 2, 4, 8, 16 ranks, not 3$"):
            open_flashinfer_reduction(None, (0, 1, 2), HIDDEN, torch.float32, CPU)
        with pytest.raises(PeerMemoryError, match=r"^the kernel takes rows in multiples of 16 bytes, not 40$"):
            open_flashinfer_reduction(None, (0, 1), HIDDEN, torch.bfloat16, CPU)


def test_a_peer_that_stayed_away_is_a_timeout() -> None:
    memory = PeerMemory(torch.zeros(2, dtype=torch.int64), torch.zeros(8), None)
    chosen = PeerReduction(memory, 0, 4, timeout_s=7.0, abort=AbortWord(pinned=False))
    chosen.require(int(chosen.failed))
    chosen._boxes.failed.fill_(1)
    with pytest.raises(CollectiveTimeout, match=r"^a peer did not join a reduction of the decode step within 7 s$"):
        chosen.require(int(chosen.failed))
