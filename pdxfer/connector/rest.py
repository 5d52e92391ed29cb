"""On CPU: let vLLM's processes sleep between steps instead of spinning on their shared-memory queues.

vLLM's queue readers busy-loop for a second after each message. An engine that steps while a request waits for its KV
therefore burns a whole core, on a CPU host the very core that router, proxy, senders and the neighbour's scheduler run
on. Here that second is spent in short sleeps, ended by the writer's notification. They stay short because vLLM's
notifications may be dropped (a PUB socket with room for one), which its own spinning hides. Hosts with accelerators
keep vLLM's behaviour.
"""

import time

SPIN_S = 0.0005
"""A reader spins this long before it begins to sleep."""
NAP_MS = 1
"""Longest sleep without looking at the queue, while vLLM would spin."""


def rest_between_steps() -> None:
    """Change all queue readers of this process, also those that exist already. Idempotent."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or getattr(SpinCondition, "rests", False):
        return
    wait = SpinCondition.wait

    def wait_briefly(self: SpinCondition, timeout_ms: int | None = None) -> None:
        spins_for = self.busy_loop_s
        if not SPIN_S < time.monotonic() - self.last_read <= spins_for:
            wait(self, timeout_ms)
            return
        self.busy_loop_s = 0
        try:
            wait(self, NAP_MS)
        finally:
            self.busy_loop_s = spins_for

    SpinCondition.wait = wait_briefly
    SpinCondition.rests = True
