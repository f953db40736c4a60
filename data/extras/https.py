"""Request byte ranges of `https://` URLs with the standard library.

Private and link-local addresses are rejected, checked after name resolution and every redirect, unless
`PATCHLINE_PRIVATE_HOSTS` (comma-separated) contains the host.

    with request_https("https://host/train-000000.tar", 30.0, "bytes=0-511") as answer: …    status 206, 512 bytes
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from data.remote.urls import DENIALS, THROTTLING, Denied, Refused, Throttled, pause_in


@contextmanager
def request_https(
    url: str, timeout_s: float, byte_range: str, authorization: str = ""
) -> Iterator[http.client.HTTPResponse]:
    """Context manager that yields the response to a range request; raises the same error types as the other schemes.

    `authorization` is sent only to the host of the URL.
    """
    # An opener for https only, also after redirects, and only for public addresses. `build_opener` would add handlers
    # for file:, ftp: and data:.
    opener = urllib.request.OpenerDirector()
    opener.add_handler(PublicHandler())
    opener.add_handler(SameHostHandler())
    opener.add_handler(urllib.request.HTTPErrorProcessor())
    opener.add_handler(urllib.request.HTTPDefaultErrorHandler())
    opener.add_handler(urllib.request.UnknownHandler())
    # Encode spaces and non-ASCII characters; an already encoded address stays unchanged.
    address = quote(url, safe="!#$%&'()*+,/:;=?@[]~")
    request = urllib.request.Request(address, headers={"Range": byte_range})
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        # Raise the same types as the other schemes.
        pause_s = pause_in(error.headers) if error.code in THROTTLING else None
        if pause_s is not None:
            raise Throttled(pause_s) from None
        if error.headers.get("X-Error-Code") in DENIALS:
            raise Denied(error.headers["X-Error-Code"]) from None
        kind: type[OSError] = OSError
        if error.code in (404, 410):
            kind = FileNotFoundError
        elif error.code in (401, 403):
            kind = PermissionError
        raise kind(f"HTTP {error.code}") from None
    except http.client.HTTPException as error:
        # Omit the text, which may contain the URL with a secret.
        raise OSError(type(error).__name__) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise OSError("URLError") from None


class SameHostHandler(urllib.request.HTTPRedirectHandler):
    """Follows redirects; only a redirect within a host keeps the Authorization header."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Return the request that follows a redirect, with the Authorization header only if the host is the same."""
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        authorization = req.get_header("Authorization")
        if redirected is not None and authorization and redirected.host == req.host:
            redirected.add_unredirected_header("Authorization", authorization)
        return redirected


class PublicConnection(http.client.HTTPSConnection):
    """Connects to the checked address, because a second name resolution could return a different address."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._create_connection = connect_public


class PublicHandler(urllib.request.HTTPSHandler):
    """Opens https URLs with `PublicConnection`."""

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(PublicConnection, req)


def connect_public(
    address: tuple[str, int], timeout: float, source_address: tuple[str, int] | None = None
) -> socket.socket:
    """Connect as socket.create_connection does, but only to public addresses; raises Refused for others."""
    host, port = address
    is_allowed = host in os.environ.get("PATCHLINE_PRIVATE_HOSTS", "").split(",")
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A single private address among several is refused, because the name cannot be trusted.
    for *_, place in resolved:
        if not is_allowed and not ipaddress.ip_address(place[0]).is_global:
            raise Refused(
                f"https://{host}: {place[0]} is not a public address; to allow it, set PATCHLINE_PRIVATE_HOSTS={host}"
            )
    # Connect to the checked address: resolving the name again could return another one.
    first_ip, first_port = resolved[0][4][:2]
    return socket.create_connection((str(first_ip), int(first_port)), timeout, source_address)
