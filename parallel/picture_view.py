"""What the VAE may communicate: the collectives of a picture whose rows are spread over all ranks of the plan.

As in a phase of the transformer, every call names a role and a site, the ledger keeps it, and a role that is not the VAE's is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from .collectives import Communicator
from .ledger import Role, exactly
from .waiting import CollectiveError

PICTURE_ROLES: frozenset[Role] = frozenset({"halo_gather", "norm_gather", "kv_gather", "picture_gather"})
PHASE = "vae"


class PictureView:
    """All ranks of the plan, from the picture's top to its bottom."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.ranks = comm.plan.picture_ranks

    @property
    def rank(self) -> int:
        return self.comm.plan.rank

    def gather(self, role: Role, tensor: torch.Tensor, site: str) -> list[torch.Tensor]:
        """``tensor``, of one shape on all ranks, from each of them, in the order of ``ranks``."""
        if role not in PICTURE_ROLES:
            raise CollectiveError(f"{site}: role {role} does not belong to the VAE; its roles are {', '.join(sorted(PICTURE_ROLES))}")
        self.comm.ledger.record(PHASE, role, site, tensor.shape, str(tensor.dtype), self.ranks)
        return self.comm.gather(tensor.contiguous(), self.ranks, site)

    def forward(self, expected: Mapping[Role, int], name: str) -> AbstractContextManager[None]:
        """Body must make exactly ``expected`` collectives of each role; another number raises, naming the roles."""
        return exactly(self.comm.ledger, expected, name)

    def await_device(self, what: str) -> None:
        """Before the host reads a picture that peers took part in; looks for their faults."""
        self.comm.await_device(what)
