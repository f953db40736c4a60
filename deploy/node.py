"""Runs Ray on this node, and ends it when its head is gone; the systemd unit then restarts it, to join the next head.

    python deploy/node.py 10.0.0.1:6379         # instead of `ray start --address=10.0.0.1:6379 --block`

A restarted head does not know its former nodes, so each must join again. If the head loses power, Ray on a node notices
that late, because TCP retransmits ever more rarely. This program keeps a connection to the head and sends a keepalive
every second. Silence alone does not end Ray, because the link may be down. This node joins again in two cases:

- the head refuses a connection after it has accepted one before: its Ray has ended;
- the head accepts a connection after half a minute of silence: it has removed this node by then, and Ray on the node
  may notice only 26 s after the link has recovered (measured with Ray 2.60 and a link that was down for 40 s).
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
# Unanswered keepalives before the kernel closes the connection. With RAY_health_check_failure_threshold=2, the head
# removes a silent node after 26 s.
SILENT_TIMES = 30
NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # the kernel's errors after that


def main(head: str) -> int:
    """Run Ray on this node until it or the head ends; return its exit code."""
    ray = subprocess.Popen([RAY, "start", f"--address={head}", "--block"])

    def forward(number: int, frame: FrameType | None) -> None:
        ray.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    threading.Thread(target=end_with_head, args=(head, ray.pid), daemon=True).start()
    return ray.wait()


def end_with_head(head: str, pid: int) -> None:
    """Kill the raylet when the head is gone or has removed this node; `ray start --block` then ends the rest."""
    host, _, port = head.rpartition(":")
    while True:
        print(f"{head} {wait_for_the_end(host, int(port))}", flush=True)
        # There is no raylet if Ray is still waiting for a head: it then joins the next one.
        with suppress(psutil.Error):
            for process in psutil.Process(pid).children():
                if process.name() == "raylet":
                    process.kill()


def wait_for_the_end(host: str, port: int) -> str:
    """Wait until this node has to join again, and return the reason."""
    has_accepted = False
    was_silent = False
    while True:
        try:
            with socket.create_connection((host, port), ANSWER_S) as connection:
                if was_silent:
                    return f"did not answer for more than {SILENT_TIMES} s and has removed this node: joining again"
                has_accepted = True
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PERIOD_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PERIOD_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_TIMES)
                connection.settimeout(None)
                # The head closes idle connections after two minutes; the loop then makes a new one.
                try:
                    while connection.recv(4096):
                        pass
                except OSError as error:
                    was_silent = error.errno in NO_ANSWER
        except ConnectionRefusedError:
            if has_accepted:
                return "refuses connections: its Ray has ended; joining the next head"
        except OSError:
            pass  # the head does not answer, or is restarting
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
