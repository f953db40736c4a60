"""What glibc's malloc is told when the process of a worker on CPUs starts."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jobs.cluster_config import MALLOC_VARIABLE as TUNABLES

# For workers on CPUs, which keep the memory that a step frees (keep_freed_memory in pipeline/process_group.py):
# - One arena for all threads. Under Ray the loop is not in the main thread, and another thread's heaps hold 64 MB at
#   most: whatever is larger goes back to the kernel at once, whatever mallopt was told.
# - No thread sets freed pieces aside. Torch asks for aligned memory, of which malloc cuts off the ends, some 64 bytes.
#   Set aside, they pass for used: a large piece that is freed stays apart from its neighbours, and has some bytes too
#   few for the next request of its own size. The heap then grows by whole tensors every few steps.
MALLOC = {TUNABLES: "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"}

_changing_environment = threading.Lock()


@contextmanager
def malloc_set() -> Iterator[None]:
    """Have processes that the block starts find `MALLOC`, after what the user has set there: malloc takes the last."""
    with _changing_environment:
        theirs = os.environ.get(TUNABLES)
        os.environ[TUNABLES] = f"{theirs}:{MALLOC[TUNABLES]}" if theirs else MALLOC[TUNABLES]
        try:
            yield
        finally:
            if theirs:
                os.environ[TUNABLES] = theirs
            else:
                os.environ.pop(TUNABLES, None)


def forget_malloc() -> None:
    """Take `MALLOC` out of this process's environment: malloc has read it, and what it starts has no use of it."""
    if os.environ.get(TUNABLES) == MALLOC[TUNABLES]:
        del os.environ[TUNABLES]
