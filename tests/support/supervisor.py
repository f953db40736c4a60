"""Run one unit of deploy/systemd on a host without systemd, according to the settings in its file.

    python -m tests.support.supervisor patchline-node.service HEAD=h0 RAY_AUTH_TOKEN_PATH=/shared/auth_token
    python -m tests.support.supervisor patchline-driver@small.service RECIPES=/shared RAY_ADDRESS=h0:6379 …

1. Run ExecStart with the variables of deploy/systemd/patchline.env and of the command line, which also replace
   LoadCredential. This checkout replaces the installed checkout, and RECIPES replaces /etc/patchline.
2. When the command ends, run ExecStop without MAINPID and kill the remaining processes, as systemd does with a unit's
   control group. Each process has the INVOCATION_ID of this start in its environment.
3. Restart the command according to Restart, RestartPreventExitStatus and RestartSec.
4. Treat SIGTERM as `systemctl stop`: run ExecStop with MAINPID, send SIGTERM to the command and exit with its code.
"""

import configparser
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from string import Template
from uuid import uuid4

import psutil

from tests.support.hosts import ROOT

FOLDER = ROOT / "deploy" / "systemd"


def main(words: list[str]) -> int:
    """Run a unit, with restarts, until it ends for good or is stopped; return its last exit code."""
    name, *assignments = words
    template, _, instance = name.removesuffix(".service").partition("@")
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(FOLDER / (f"{template}@.service" if instance else name))
    service = unit["Service"]
    variables = dict(os.environ)
    lines = (FOLDER / "patchline.env").read_text().splitlines()
    for assignment in [*(line for line in lines if not line.startswith("#")), *assignments]:
        key, _, value = assignment.partition("=")
        variables[key] = value
    # Set only the variable with the unit's name; systemd sets the others.
    key, _, value = service["Environment"].partition("=")
    if value == "%n":
        variables[key] = name

    def command_of(key: str) -> list[str]:
        command = service.get(key, "").removeprefix("-").replace("%i", instance)
        command = command.replace("/opt/patchline/.venv/bin/", f"{Path(sys.executable).parent}/")
        command = command.replace("/opt/patchline", str(ROOT)).replace("/etc/patchline", variables.get("RECIPES", ""))
        return shlex.split(Template(command).substitute(variables))

    def run_stop_command(**pid: str) -> None:
        if command_of("ExecStop"):
            subprocess.run(command_of("ExecStop"), env=variables | pid, cwd=ROOT)

    prevented = {int(code) for code in service.get("RestartPreventExitStatus", "").split()}

    child: subprocess.Popen[bytes] | None = None
    is_told_to_end = False

    def stop(number: int, frame: object) -> None:
        nonlocal is_told_to_end
        is_told_to_end = True
        if child is not None:
            run_stop_command(MAINPID=str(child.pid))
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    code = 0
    while not is_told_to_end:
        variables["INVOCATION_ID"] = uuid4().hex
        child = subprocess.Popen(command_of("ExecStart"), env=variables, cwd=ROOT)
        code = child.wait()
        run_stop_command()
        kill_rest(variables["INVOCATION_ID"])
        is_failure = code != 0 and code not in prevented
        goes_on = not is_told_to_end and (service["Restart"] == "always" or is_failure)
        print(f"supervisor: {name} ended with {code}{', started again' if goes_on else ''}", flush=True)
        if not goes_on:
            break
        time.sleep(float(service["RestartSec"]))
    return code


def kill_rest(invocation: str) -> None:
    """Kill all remaining processes of a start."""
    for process in psutil.process_iter():
        # A process may end meanwhile, and kernel threads have no environment.
        with suppress(psutil.Error, OSError):
            if process.environ().get("INVOCATION_ID") == invocation:
                process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
