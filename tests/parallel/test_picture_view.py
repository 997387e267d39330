"""What the VAE may communicate."""

from __future__ import annotations

import pytest
import torch
from thread_world import run_ranks

from phase_parallel.parallel.collectives import CollectiveError, Communicator
from phase_parallel.parallel.ledger import ROLES
from phase_parallel.parallel.picture_view import PICTURE_ROLES, PictureView
from phase_parallel.parallel.plan import ParallelPlan


def test_it_owns_its_roles_and_no_others() -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        view = PictureView(comm)
        for role in ROLES:
            if role in PICTURE_ROLES:
                view.gather(role, torch.ones(2), "site")
                assert comm.ledger.counts[role] == 1
            else:
                with pytest.raises(CollectiveError, match=rf"^site: role {role} does not belong to the VAE; its roles are halo_gather, "):
                    view.gather(role, torch.ones(2), "site")
                assert role not in comm.ledger.counts

    run_ranks(body, "single", world_size=1)


@pytest.mark.parametrize(("plan", "ranks"), [("tp", 3), ("hybrid", 4), ("replicated", 4)])
def test_all_ranks_of_a_plan_meet_in_their_order(plan: str, ranks: int) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> list[int]:
        return [int(t) for t in PictureView(comm).gather("halo_gather", torch.tensor([plan.rank]), "site")]

    assert run_ranks(body, plan, world_size=ranks) == [list(range(ranks))] * ranks


def test_ranks_at_another_site_differ_in_the_ledger() -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> tuple[int, int]:
        PictureView(comm).gather("halo_gather", torch.ones(1), f"vae.decoder.conv{plan.rank}")
        return comm.ledger.digest()

    assert len(set(run_ranks(body, "tp", world_size=2))) == 2
