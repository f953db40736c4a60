"""Environment variables that a recipe or `submit --env` gives to every worker, and which of them are refused.

    cluster: {environment: {NCCL_SOCKET_IFNAME: eth1, NCCL_DEBUG: INFO}}
    python -m jobs submit RECIPE --env NCCL_DEBUG=INFO

Ray shows the environment of a job to whoever lists the jobs, and a recipe is kept in many places: secrets belong to the
nodes. What tells a worker its place in the group is set by Patchline alone, and so is what glibc's malloc reads when a
process starts (`MALLOC`).
"""

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# KEY and TOKEN as words: TOKENIZERS_PARALLELISM is none.
SECRET_NAME = re.compile(r"SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)(API|ACCESS|AUTH)?(KEY|TOKEN)S?(_|$)", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b(AKIA|ASIA)[0-9A-Z]{16}\b"  # an access key of AWS
    r"|\b(ghp|gho|ghs|github_pat|glpat|hf|sk|xox[abp])[-_][A-Za-z0-9_-]{16,}"  # GitHub, GitLab, Hugging Face, …
    r"|\beyJ[A-Za-z0-9_-]{8,}\.eyJ"  # a JSON web token
    r"|://[^/\s:@]*:[^/\s@]+@"  # a password in an address
)
# Set for every worker by its rank (worker_group.RankInfo), so that a value for all of them would break the group.
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")

# For workers on CPUs, which keep the memory that a step frees (keep_freed_memory in pipeline/process_group.py):
# - One arena for all threads. Under Ray the loop is not in the main thread, and another thread's heaps hold 64 MB at
#   most: whatever is larger goes back to the kernel at once, whatever mallopt was told.
# - No thread sets freed pieces aside. Torch asks for aligned memory, of which malloc cuts off the ends, some 64 bytes.
#   Set aside, they pass for used: a large piece that is freed stays apart from its neighbours, and has some bytes too
#   few for the next request of its own size. The heap then grows by whole tensors every few steps.
TUNABLES = "GLIBC_TUNABLES"
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


def complaint(environment: Mapping[str, str]) -> str:
    """Say which variable may not be given to workers, why, and what to do instead; "" where all may."""
    for name, value in environment.items():
        if not NAME.fullmatch(name):
            return f"{name!r} is no name of a variable\n  expected letters, digits and _, for example NCCL_DEBUG"
        if name in OURS:
            return f"{name} is set for every worker by its rank\n  leave it out"
        if name in MALLOC:
            return f"{name} is set for workers on CPUs by Patchline\n  leave it out; on GPUs that of the node holds"
        # The value is not repeated: this message is printed and kept.
        reason = "its name" if SECRET_NAME.search(name) else ""
        if SECRET_VALUE.search(value):
            reason = "its value"
        if reason:
            return (
                f"{name} looks like a secret by {reason}: it would be shown in clear to whoever lists the jobs\n"
                "  secrets belong to the nodes: their environment, instance role or mounted files\n"
                "  leave it out here; workers have the environment of their node"
            )
    return ""
