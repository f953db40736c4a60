"""Recognise an error page received instead of a file, and extract its text for messages.

Proxies and web servers may send these pages with status 200, and a download program may have saved one under the name
of the requested file.

    b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message>…"   →   "AccessDenied: Request has expired"
    b"<html><head><title>Sign in</title>…"                                       →   "Sign in"
    b'{"error": {"code": 403, "message": "Quota exceeded"}}'                     →   "403: Quota exceeded"
"""

from __future__ import annotations

import json
import re

from data.checks import printable

LONGEST = 1 << 18  # bytes; error pages are shorter
MAX_SHOWN = 200  # maximum number of characters of the page's text in a message
STARTS = (b"<?xml", b"<error", b"<!doctype html", b"<html", b"<head", b"<body", b"<listbucketresult")
# The start of a page that is an error, unlike the XML in which a store lists its objects.
ERROR = re.compile(rb"\s*(<\?xml[^>]*>\s*)?<(error|html|!doctype html)\b|\s*\{", re.IGNORECASE)
TAG = re.compile(r"<(script|style).*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
WORDS_OF_JSON = ("code", "status", "reason", "title", "message", "msg", "error_description", "detail", "error", "fault")


def words_of(content: bytes) -> str:
    """Return the text of a complete XML, HTML or JSON error page; "" for any other content."""
    if not 0 < len(content) <= LONGEST:
        return ""
    start = content.removeprefix(b"\xef\xbb\xbf").lstrip()[:32].lower()
    words = ""
    if start.startswith(STARTS) and content.rstrip().endswith(b">"):
        words = words_of_markup(content.decode("utf-8", "replace"))
    elif start.startswith(b"{"):
        words = words_of_json(content)
    return printable(words)[:MAX_SHOWN]


def words_of_markup(text: str) -> str:
    """Return the code and message of an XML error, or the title of an HTML page (its text if it has no title)."""
    parts: list[str] = []
    for tag in ("Code", "Message", "title", "h1"):
        element = re.search(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL | re.IGNORECASE)
        if element and not (parts and tag == "h1"):
            parts.append(" ".join(TAG.sub(" ", element[1]).split()))
    words = ": ".join(filter(None, parts))
    return words or " ".join(TAG.sub(" ", text).split()) or "a page without text"


def words_of_json(content: bytes) -> str:
    """Return the code and message of a JSON error; "" if the content is not a JSON object with such fields."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    inner = answer.get("error", answer.get("Error", answer.get("fault")))
    fields = inner if isinstance(inner, dict) else answer
    lower = {name.lower(): value for name, value in fields.items()}
    parts = [str(lower[name]) for name in WORDS_OF_JSON if isinstance(lower.get(name), str | int) and lower[name] != ""]
    return ": ".join(" ".join(part.split()) for part in parts)
