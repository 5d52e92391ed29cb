"""CPU affinity of our own threads.

vLLM pins its compute thread (VLLM_CPU_OMP_THREADS_BIND) and threads started later inherit that mask; ours must not
compete for that one core. Only the calling thread is changed, never the caller's process or vLLM's threads.
"""

import logging
import os

log = logging.getLogger(__name__)


def unpin_current_thread() -> None:
    """Let this thread run on every CPU the container allows (the kernel clips the mask to the cpuset)."""
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except (OSError, AttributeError) as error:
        log.debug("CPU affinity of our thread stays as inherited: %s", error)
