"""Imports once for a machine what workers need, and is forked into the fork servers of its agents: it outlives Ray.

    python -m jobs.cluster.standing             # deploy/systemd/patchline-warm.service; a process for each user

1. It listens at a socket in /dev/shm, in a folder that only this user can open, and imports when the machine starts.
2. An agent that wants a fork server (`ask_standing` in fork_server.py) says what it would import, and hands over the
   two open files and the folder that a fork server has.
3. Where the same is imported here, a fork of this process is that fork server from now on. Where it is not, the agent
   starts one of its own. Where the code on the disk has changed, this process ends, and its unit starts it again.
"""

import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from jobs.cluster import fork_server
from jobs.cluster.worker import STOP_SIGNALS, outlive
from pipeline.versions import code_version

IMPORTED = "imported"  # the word by which a process knows that it has the environment for the imports


def main() -> None:
    """Import, then serve."""
    if IMPORTED not in sys.argv:
        # Some variables are read when a process starts. The first is what Ray gives to an actor without a CPU.
        environment = fork_server.import_environment({"OMP_NUM_THREADS": "1", **os.environ})
        os.execve(sys.executable, [sys.executable, "-m", "jobs.cluster.standing", IMPORTED], environment)
    path = fork_server.standing_socket()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.stat().st_uid != os.geteuid():
        sys.exit(f"{path.parent} belongs to another user")
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        # First: an agent that asks meanwhile waits for the answer, and imports nothing itself.
        listener.listen()
        # The imports set some variables themselves.
        environment = dict(os.environ)
        imported = fork_server.what_is_imported(environment)
        fork_server.import_for_workers()
        gc.freeze()
        # The forks are not waited for: their agents are.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            agent, _ = listener.accept()
            with agent, suppress(OSError):
                code_version.cache_clear()
                if fork_server.what_is_imported(environment) != imported:
                    sys.exit("the code on the disk is another by now")
                serve(agent, listener, imported)


def serve(agent: socket.socket, listener: socket.socket, imported: str) -> None:
    """Answer one agent, with the pid of its fork server or with nothing. Raises OSError where it is gone."""
    message, handles, _, _ = socket.recv_fds(agent, fork_server.LONGEST_REQUEST, 2)
    wanted, folder = json.loads(message)
    if wanted != imported:
        agent.send(b"")
        return
    go, tell_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number in STOP_SIGNALS:
                signal.signal(number, outlive)
            listener.close()
            agent.close()
            os.close(tell_go)
            # An agent that has not waited has a fork server of its own.
            if os.read(go, 1):
                fork_server.serve(Connection(handles[0]), handles[1], Path(folder))
        finally:
            os._exit(0)
    try:
        agent.send(str(pid).encode())
        os.write(tell_go, b".")
    finally:
        for handle in (go, tell_go, *handles):
            os.close(handle)


if __name__ == "__main__":
    main()
