"""Environment variables that a recipe or `submit --env` gives to every worker, and which of them are refused.

    cluster: {environment: {NCCL_SOCKET_IFNAME: eth1, NCCL_DEBUG: INFO}}
    python -m jobs submit RECIPE --env NCCL_DEBUG=INFO

Ray shows the environment of a job to whoever lists the jobs, and a recipe is kept in many places: secrets belong to the
nodes. What tells a worker its place in the group is set by Patchline alone.
"""

import re
from collections.abc import Mapping

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


def complaint(environment: Mapping[str, str]) -> str:
    """Say which variable may not be given to workers, why, and what to do instead; "" where all may."""
    for name, value in environment.items():
        if not NAME.fullmatch(name):
            return f"{name!r} is no name of a variable\n  expected letters, digits and _, for example NCCL_DEBUG"
        if name in OURS:
            return f"{name} is set for every worker by its rank\n  leave it out"
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
