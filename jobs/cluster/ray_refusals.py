"""Why a Ray cluster cannot be joined, in words: what was found, what was expected, and what to type."""

import socket
from urllib.parse import urlsplit

from data.errors import ClusterError

CONNECT_TIMEOUT_S = 5.0


def require_reachable(address: str) -> None:
    """Raise ClusterError unless something listens at host:port or a URL; Ray takes a minute to say less."""
    try:
        # urlsplit finds host and port only behind a scheme; which scheme does not matter here.
        with_scheme = address
        if "://" not in address:
            with_scheme = f"ray://{address}"
        url = urlsplit(with_scheme)
        if url.port is None:
            raise ValueError("no port")
        socket.create_connection((url.hostname, url.port), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"nothing answers at RAY_ADDRESS={address} ({error})\n"
            f"expected the host:port that `ray start --head` printed, or http://host:8265 of its dashboard\n"
            f"type `ray status --address host:port` to check, or `unset RAY_ADDRESS` to use this machine"
        ) from None


def explain(error: Exception, address: str) -> ClusterError:
    """Turn Ray's reason for refusing us into what, why and what to type."""
    # Ray wraps: what tells versions from tokens may stand in the error, its cause or its context.
    reasons = []
    for link in (error, error.__cause__, error.__context__):
        if link is not None:
            reasons.append(str(link).strip() or type(link).__name__)
    text = "\n".join(reasons)
    first_line = text.splitlines()[0]
    # Parts of words, because Ray writes them with a capital letter and without.
    if "ersion mismatch" in text or "not compatible with the Ray cluster" in text:
        return ClusterError(
            f"the cluster at {address} has other versions: {' '.join(text.split())[:400]}\n"
            f"Ray and Python must be the same on both sides\n"
            f"install there what constraints.txt pins, or here the `ray==` that the cluster has"
        )
    if "uthenticat" in text or "Unauthorized" in text or "Forbidden" in text:
        return ClusterError(
            f"the cluster at {address} refuses us: {first_line}\n"
            f"it asks for a token, which must be its head's own\n"
            f"set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a copy of the head's ~/.ray/auth_token"
        )
    return ClusterError(
        f"cannot join the cluster at {address}: {type(error).__name__}: {first_line}\n"
        f"expected a cluster that `ray start --head` began\n"
        f"type `ray status --address host:port` to check"
    )
