"""Keeps Ray on this machine for as long as the head lives that it has joined; the unit then starts it for the next one.

    python deploy/node.py 10.0.0.1:6379         # in the place of `ray start --address=10.0.0.1:6379 --block`

A head that is started anew knows none of its nodes: each must join again. Where the head has lost its power, Ray on a
node learns of it by what it has sent, which TCP repeats ever more rarely while the head is away. Here a connection to
the head is held, on which the kernel asks once a second. Silence ends nothing, because the link may be cut; this node
joins again when there is

- a head that refuses a connection, after it had taken one: it has no Ray any more;
- a head that takes a connection after half a minute of silence: it has given this node up, and Ray here may learn that
  only 26 s after the link is whole (measured with Ray 2.60, with a link that was dead for 40 s).
"""

import errno
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

RAY = Path(sys.executable).with_name("ray")
PERIOD_S = 1
ANSWER_S = 2.0
# How often the kernel asks in vain before it gives the connection up. The head misses a silent node after 26 s, with
# RAY_health_check_failure_threshold=2.
SILENT_TIMES = 30
NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # how the kernel says that it has given up


def main(head: str) -> int:
    """Run Ray here until it ends, or the head's; return its exit code."""
    ray = subprocess.Popen([RAY, "start", f"--address={head}", "--block"])

    def hand_on(number: int, frame: FrameType | None) -> None:
        ray.send_signal(number)

    signal.signal(signal.SIGTERM, hand_on)
    threading.Thread(target=end_with_head, args=(head, ray.pid), daemon=True).start()
    return ray.wait()


def end_with_head(head: str, pid: int) -> None:
    """Whenever the head is gone, or has given this node up, end the raylet: `ray start --block` ends the rest."""
    host, _, port = head.rpartition(":")
    while True:
        print(f"{head} {wait_for_the_end(host, int(port))}", flush=True)
        # None yet, where the head was lost while Ray here waited for it: then it waits for the next.
        with suppress(psutil.Error):
            for process in psutil.Process(pid).children():
                if process.name() == "raylet":
                    process.kill()


def wait_for_the_end(host: str, port: int) -> str:
    """Return why this node has to join again, when it has to."""
    has_been_there = False
    was_silent = False
    while True:
        try:
            with socket.create_connection((host, port), ANSWER_S) as connection:
                if was_silent:
                    return f"was silent for more than {SILENT_TIMES} s and has given this node up: it joins again"
                has_been_there = True
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PERIOD_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PERIOD_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_TIMES)
                connection.settimeout(None)
                # The head ends a connection on which nothing is asked after two minutes; then the next one is made.
                try:
                    while connection.recv(4096):
                        pass
                except OSError as error:
                    was_silent = error.errno in NO_ANSWER
        except ConnectionRefusedError:
            if has_been_there:
                return "refuses connections: its Ray is gone, this node joins the next"
        except OSError:
            pass  # it is silent, or was started anew
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
