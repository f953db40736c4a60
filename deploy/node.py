"""Keeps Ray on this machine for as long as the head lives that it has joined; the unit then starts it for the next one.

    python deploy/node.py 10.0.0.1:6379         # in the place of `ray start --address=10.0.0.1:6379 --block`

A head that is started anew knows none of its nodes: each must join again. Where the head has lost its power, Ray on a
node finds that out 35 s after the head is back (measured with 2.60), because it asks an address that is silent ever
more rarely. Here a connection to the head is held, on which the kernel asks once a second. Silence ends nothing: the
link may be cut. A head that refuses a connection, after it had taken one, has no Ray any more.
"""

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
SILENT_TIMES = 30  # that the kernel asks before it gives the connection up, which is then made anew


def main(head: str) -> int:
    """Run Ray here until it ends, or the head's; return its exit code."""
    ray = subprocess.Popen([RAY, "start", f"--address={head}", "--block"])

    def hand_on(number: int, frame: FrameType | None) -> None:
        ray.send_signal(number)

    signal.signal(signal.SIGTERM, hand_on)
    threading.Thread(target=end_with_head, args=(head, ray.pid), daemon=True).start()
    return ray.wait()


def end_with_head(head: str, pid: int) -> None:
    """Wait until the head is gone, then end the raylet: `ray start --block` ends the rest, and itself."""
    host, _, port = head.rpartition(":")
    wait_for_the_end(host, int(port))
    print(f"{head} refuses connections: its Ray is gone, this node joins the next", flush=True)
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children():
            if process.name() == "raylet":
                process.kill()


def wait_for_the_end(host: str, port: int) -> None:
    """Return when a port that has taken a connection refuses one."""
    has_been_there = False
    while True:
        try:
            with socket.create_connection((host, port), ANSWER_S) as connection:
                has_been_there = True
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PERIOD_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PERIOD_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_TIMES)
                connection.settimeout(None)
                # The head ends a connection on which nothing is asked after two minutes; then the next one is made.
                while connection.recv(4096):
                    pass
        except ConnectionRefusedError:
            if has_been_there:
                return
        except OSError:
            pass  # it is silent, or was started anew
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
