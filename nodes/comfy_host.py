"""What the control code asks of the ComfyUI it runs in. The names used here exist in all supported hosts."""

from __future__ import annotations

from typing import Protocol

import torch


class Host(Protocol):
    """Tests bring their own."""

    interruption: type[BaseException]
    """What ComfyUI raises, and expects, when the user cancels."""

    def running_prompt(self) -> str | None:
        """Id of the prompt that is being executed, None between prompts."""

    def cancelled(self) -> bool:
        """Has the user asked to stop the running prompt?"""

    def clear_cancel(self) -> None:
        """The wish has been fulfilled."""


class ComfyHost:
    """The ComfyUI of this process. Made on first use, because tests import the pack without a ComfyUI."""

    def __init__(self) -> None:
        import comfy.model_management
        from server import PromptServer

        self._management = comfy.model_management
        self._server = PromptServer.instance
        self.interruption = comfy.model_management.InterruptProcessingException

    def running_prompt(self) -> str | None:
        queue = self._server.prompt_queue
        with queue.mutex:
            # (number, prompt id, …); later hosts append fields.
            running = [item[1] for item in queue.currently_running.values()]
        return running[0] if running else None

    def cancelled(self) -> bool:
        return self._management.processing_interrupted()

    def clear_cancel(self) -> None:
        self._management.interrupt_current_processing(False)

    def device(self) -> torch.device:
        return self._management.get_torch_device()
