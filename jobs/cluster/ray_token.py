"""The token that a Ray cluster asks for: who talks to a cluster runs code on it.

A cluster that is started here gets one that only this user can read. To one that is joined, ours is sent where we have
one.
"""

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray._raylet

from data.errors import ClusterError


def token_path() -> Path:
    """Return where Ray looks for the token, unless RAY_AUTH_TOKEN holds it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def ensure_token() -> None:
    """Make a token that only this user can read (Ray's own is readable by all) and switch Ray to it.

    Who talks to a cluster runs code on it, so every cluster started here asks for one.
    """
    path = token_path()
    try:
        if not os.environ.get("RAY_AUTH_TOKEN"):
            _make_token_file(path)
    except OSError as error:
        raise ClusterError(
            f"cannot keep the cluster's token in {path}: {error.strerror}\n"
            f"without a token a cluster runs anyone's code\n"
            f"set RAY_AUTH_TOKEN_PATH to a file that you can write"
        ) from None
    _use_token()


def _make_token_file(path: Path) -> None:
    if path.exists():
        # Ray writes the file so that everybody can read it (0644).
        path.chmod(0o600)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole before it has its name, because another command may make one at the same moment: the first of them stays.
    # `mkstemp` makes it unreadable for others: there is no moment in which it is open to all.
    handle, made = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        os.write(handle, secrets.token_hex(32).encode())
        with suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.close(handle)
        os.unlink(made)


def use_token_if_any() -> None:
    """Send our token, if we have one, to a cluster of which we do not know whether it asks."""
    we_have_one = bool(os.environ.get("RAY_AUTH_TOKEN")) or token_path().exists()
    if we_have_one and "RAY_AUTH_MODE" not in os.environ:
        _use_token()


def _use_token() -> None:
    # Ray reads the variable when it is imported; this makes it read again, as ray.init does for itself.
    os.environ["RAY_AUTH_MODE"] = "token"
    raylet: Any = ray._raylet  # compiled: no types
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
