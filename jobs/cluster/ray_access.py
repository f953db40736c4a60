"""How a Ray cluster is reached: its token, its address, and what is said when it does not let us in."""

import os
import secrets
import socket
from pathlib import Path
from typing import Any

import ray._raylet

from data.errors import ClusterError

ROOT = Path(__file__).parents[2]
EXCLUDES = [".git", ".venv", "__pycache__", "/runs", "/shards"]  # never shipped; nor what .gitignore names
CONNECT_TIMEOUT_S = 5.0


def token_path() -> Path:
    """Where Ray looks for the token, unless RAY_AUTH_TOKEN holds it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def ensure_token() -> None:
    """Make a token that only this user can read (Ray's own is readable by all) and switch Ray to it.

    Who talks to a cluster runs code on it, so every cluster started here asks for one.
    """
    path = token_path()
    try:
        if os.environ.get("RAY_AUTH_TOKEN"):
            pass
        elif path.exists():
            path.chmod(0o600)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            path.write_text(secrets.token_hex(32))
    except OSError as error:
        raise ClusterError(
            f"cannot keep the cluster's token in {path}: {error.strerror}\n"
            f"without a token a cluster runs anyone's code\n"
            f"set RAY_AUTH_TOKEN_PATH to a file that you can write"
        ) from None
    _use_token()


def use_token_if_any() -> None:
    """Send our token, if we have one, to a cluster of which we do not know whether it asks."""
    if "RAY_AUTH_MODE" not in os.environ and (os.environ.get("RAY_AUTH_TOKEN") or token_path().exists()):
        _use_token()


def _use_token() -> None:
    # Ray reads the variable when it is imported; this makes it read again, as ray.init does for itself.
    os.environ["RAY_AUTH_MODE"] = "token"
    raylet: Any = ray._raylet  # compiled: no types
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def require_reachable(address: str) -> None:
    """Raise ClusterError unless something listens at host:port or a URL; Ray takes a minute to say less."""
    host, _, port = (
        address.partition("://")[2].rstrip("/").rpartition(":") if "://" in address else address.rpartition(":")
    )
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"nothing answers at RAY_ADDRESS={address} ({error})\n"
            f"expected the host:port that `ray start --head` printed, or http://host:8265 of its dashboard\n"
            f"type `ray status --address host:port` to check, or `unset RAY_ADDRESS` to use this machine"
        ) from None


def explain(error: Exception, address: str) -> ClusterError:
    """Ray's reason for refusing us, as what, why and what to type."""
    chain = [error, error.__cause__, error.__context__]
    text = "\n".join(str(link).strip() or type(link).__name__ for link in chain if link is not None)
    first, *_ = text.splitlines()
    if "ersion mismatch" in text or "not compatible with the Ray cluster" in text:
        return ClusterError(
            f"the cluster at {address} has other versions: {' '.join(text.split())[:400]}\n"
            f"Ray and Python must be the same on both sides\n"
            f"install there what constraints.txt pins, or here the `ray==` that the cluster has"
        )
    if "uthenticat" in text or "Unauthorized" in text or "Forbidden" in text:
        return ClusterError(
            f"the cluster at {address} refuses us: {first}\n"
            f"it asks for a token, which must be its head's own\n"
            f"set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a copy of the head's ~/.ray/auth_token"
        )
    return ClusterError(
        f"cannot join the cluster at {address}: {type(error).__name__}: {first}\n"
        f"expected a cluster that `ray start --head` began\n"
        f"type `ray status --address host:port` to check"
    )
