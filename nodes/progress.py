"""From an engine's reports to what the user sees on the node: a bar, a line of text, a live picture."""

from __future__ import annotations

from typing import Any

from . import host_compat
from .latent_preview import PreviewFactors


class NodeProgress:
    """Receives the events of a section on rank 0.

    An event is a dictionary with `kind`, `done` and `total`, and where it applies `text` (what the model has
    written so far) and `latents` ([n, C, h, w], scaled). Unknown fields are left alone, since an engine may
    say more than a node shows. ComfyUI's bar raises when the user has cancelled; the driver turns that into a
    stop of all ranks at their next check.
    """

    def __init__(self, node_id: str | None, preview: PreviewFactors | None = None) -> None:
        self.node_id = node_id
        self.preview = preview
        self._bar: Any = None
        self._kind: str | None = None
        self._kept = ""

    def keep(self, note: str) -> None:
        """A sentence that stays on the node above whatever comes later; empty: none."""
        self._kept = note
        if note:
            host_compat.show_text(note, self.node_id)

    def __call__(self, event: dict[str, Any]) -> None:
        total = event.get("total")
        if total:
            self._advance(event, int(event.get("done", 0)), int(total))
        if event.get("text"):
            lines = [line for line in (self._kept, event["text"]) if line]
            host_compat.show_text("\n".join(lines), self.node_id)

    def _advance(self, event: dict[str, Any], done: int, total: int) -> None:
        kind = event.get("kind")
        if self._bar is None or kind != self._kind:
            self._bar, self._kind = host_compat.progress_bar(total, self.node_id), kind
        picture = None
        if self.preview is not None and event.get("latents") is not None:
            picture = ("JPEG", self.preview.picture(event["latents"]), host_compat.preview_size())
        self._bar.update_absolute(done, total, picture)
