"""Ray's token: who talks to a cluster runs code on it, so clusters started here always ask for one."""

import os
import secrets
from pathlib import Path
from typing import Any

import ray._raylet

from jobs.gang import ClusterError


def token_path() -> Path:
    """Where Ray looks for the token, unless RAY_AUTH_TOKEN holds it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def ensure_token() -> None:
    """Make a token that only this user can read (Ray's own is readable by all) and switch Ray to it."""
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
    _switch()


def use_token_if_any() -> None:
    """Send our token, if we have one, to a cluster of which we do not know whether it asks."""
    if "RAY_AUTH_MODE" not in os.environ and (os.environ.get("RAY_AUTH_TOKEN") or token_path().exists()):
        _switch()


def _switch() -> None:
    # Ray reads the variable when it is imported; this makes it read again, as ray.init does for itself.
    os.environ["RAY_AUTH_MODE"] = "token"
    raylet: Any = ray._raylet  # compiled: no types
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
