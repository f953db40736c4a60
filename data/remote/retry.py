"""The one way in which an object store is asked again: after a random part of a time that doubles.

Clients raise many kinds of errors, and any of their texts may hold a secret: of an error only its kind is shown.
"""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from data.errors import DataError, StorageError
from data.remote.urls import denied_as_such, forget_credentials

Answer = TypeVar("Answer")

LONGEST_PAUSE_S = 30.0
WARN_AT_ATTEMPT = 2  # counted from 0: by the third attempt somebody waits


class Retry:
    """Asks up to `attempts` times, which may be lowered while a request is under way, until `stopped` says so.

    The pause before the second attempt is `backoff_s` at most; it doubles with every attempt.
    """

    def __init__(self, attempts: int, backoff_s: float, stopped: Callable[[], bool] = lambda: False) -> None:
        self.attempts = attempts
        self.backoff_s = backoff_s
        self.stopped = stopped

    def patiently(self, address: str, ask: Callable[[], Answer]) -> Answer:
        """Return what `ask` answers in one of the attempts; `address` is what messages name.

        Raises at once: FileNotFoundError, because to ask again does not bring what is missing; DataError where the
        store's client is not installed or an address is refused. Raises StorageError when all attempts were in vain, or
        this was stopped.
        """
        reason = ""
        attempt = 0
        # Looked at anew each time: a command that ends has no more patience for what its threads still ask.
        while attempt < self.attempts:
            if self.stopped():
                raise StorageError(f"{address}: left where it was")
            try:
                with denied_as_such():
                    return ask()
            except FileNotFoundError:
                raise FileNotFoundError(f"{address}: there is no such object, or no such bucket") from None
            except DataError:
                raise
            except PermissionError:
                reason = "PermissionError"
                # The credentials may have expired: the next attempt reads what the environment says by then.
                forget_credentials()
            except Exception as error:
                reason = type(error).__name__
            if attempt == WARN_AT_ATTEMPT:
                logging.getLogger(__name__).warning("%s: no answer (%s), asking again", address, reason)
            if attempt + 1 < self.attempts:
                # A random part, so that many workers and nodes do not all ask again at once.
                pause_s = random.uniform(0, min(LONGEST_PAUSE_S, self.backoff_s * 2**attempt))
                ends_at = time.monotonic() + pause_s
                while not self.stopped() and time.monotonic() < ends_at:
                    time.sleep(min(0.1, max(0.0, ends_at - time.monotonic())))
            attempt += 1

        is_denied = reason == "PermissionError" or "Credentials" in reason
        remedy = "credentials come from the environment" if is_denied else "run again when it answers"
        raise StorageError(f"{address}: no answer after {attempt} attempts, last {reason}; {remedy}")
