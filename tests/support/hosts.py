"""A network of hosts on this machine, for tests that kill a host or cut its link: namespaces of the Linux kernel.

    with Network(shared) as network:
        head = network.boot("h0")                          # 10.77.0.10
        head.run("hostname")
        network.boot("h1").start("sleep 100", log)         # 10.77.0.11
        network["h1"].kill()                               # or cut, black_hole, slow, mend

1. A host is a shell, the process 1 of its own namespaces of processes, network, host name and mounts. It has the name
   that it was booted under, one interface `eth0`, its own `/dev/shm` and `/tmp`, and a home in the latter.
2. It has one processor, as Ray counts: it reads the limit that a container would have.
3. The checkout and the folder `shared` are the same files on every host, as on a cluster with shared storage.
4. A switch, one more network namespace with a bridge, joins the interfaces. No host reaches this machine or the world.
5. Nothing has a name outside of the namespaces. Each shell ends when its standard input closes, which happens however
   the process that booted it ends; its processes, interfaces and mounts go with it.

Needs root on Linux, `ip` of iproute2, `unshare` and `nsenter` of util-linux; `missing()` says what is not there.
"""

import heapq
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

ROOT = Path(__file__).parents[2]
TEMPORARY = Path("/tmp")
HOME = TEMPORARY / "home"
CGROUP = Path("/sys/fs/cgroup")
PREFIX = "10.77.0"
FIRST_ADDRESS = 10
BOOT_TIMEOUT_S = 20.0
END_TIMEOUT_S = 30.0

SOL_PACKET = 263
PACKET_VNET_HDR = 15  # frames arrive before the sender's offloaded work: checksums, segmentation
VNET_HDR_BYTES = 10
LARGEST_FRAME = 2**16 + 64
ALL_PROTOCOLS = 3


def missing() -> str:
    """Return why this machine cannot simulate hosts, or "" if it can."""
    if sys.platform != "linux":
        return "hosts are namespaces of Linux"
    if os.geteuid() != 0:
        return "hosts need root"
    for program in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(program) is None:
            return f"hosts need the program {program}"
    # In a container, uid 0 may lack root's capabilities.
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "type", "veth"]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode != 0:
        return f"no namespaces can be made here: {tried.stderr.strip()}"
    return ""


class Host:
    """One simulated host: starts commands and injects faults."""

    def __init__(self, network: "Network", name: str, number: int) -> None:
        self.network = network
        self.name = name
        self.address = f"{PREFIX}.{FIRST_ADDRESS + number}"
        self.port = f"port{number}"  # the switch's end of the cable
        self.relay: subprocess.Popen[bytes] | None = None  # carries the frames of a slow link
        self.shell = _boot_shell(name, network.shared, network.hosts_file)
        (child,) = psutil.Process(self.shell.pid).children()
        self.init = child.pid

    # -------------------------------------------------------------------- what runs on it

    def start(self, command: str | list[str], log: IO[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a shell command or a list of words in the checkout's folder; stdout and stderr go to `log`."""
        words = ["sh", "-c", command] if isinstance(command, str) else command
        target = ["nsenter", "--target", str(self.init), "--net", "--uts", "--mount", "--pid", f"--wd={ROOT}", "--"]
        return subprocess.Popen(
            [*target, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=login_environment() | environment,
            cwd=ROOT,
        )

    def run(self, command: str | list[str], timeout_s: float = 120.0, **environment: str) -> str:
        """Run a command and return its output. Raises RuntimeError if it fails or exceeds the timeout."""
        output_file = self.network.shared / f"{self.name}-{time.monotonic_ns()}.out"
        # Not through a pipe: background processes of the command, such as those of `ray start`, would keep it open.
        with output_file.open("w") as log:
            process = self.start(command, log, **environment)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                code = -1
        output = output_file.read_text()
        output_file.unlink()
        if code != 0:
            raise RuntimeError(f"{command} on {self.name}: exit code {code}\n{output}")
        return output

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the host, including its process 1."""
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        here = []
        for process in psutil.process_iter():
            try:
                if os.readlink(f"/proc/{process.pid}/ns/pid") == namespace:
                    here.append(process)
            except OSError:
                # It has ended meanwhile.
                continue
        return here

    # -------------------------------------------------------------------- what befalls it

    def kill(self) -> int:
        """Simulate a power failure: drop the host's frames, then kill its processes; return their number.

        The frames are dropped first. The kernel closes the connections of a namespace that ends, and a machine without
        power does not.
        """
        count = len(self.processes())
        self._end_relay()
        self.black_hole()
        # Killing process 1 kills all processes of its namespace at once, before any can react.
        os.kill(self.init, signal.SIGKILL)
        self.end()
        # The kernel removes the cable later, but the next boot needs its name.
        self.network.on_switch("sh", "-c", f"ip link delete {self.port} || ! ip link show {self.port}")
        return count

    def cut(self) -> None:
        """Unplug the cable: the interface loses its carrier; connections stay open."""
        self.network.on_switch("ip", "link", "set", self.port, "down")

    def black_hole(self) -> None:
        """Drop all packets from and to the host, on a link that looks intact."""
        self.network.on_switch("ip", "link", "set", self.port, "nomaster")

    def slow(self, delay_s: float, loss: float, seed: int) -> None:
        """Delay every frame by half of `delay_s` in each direction, and drop this share of the frames.

        A process of ours forwards the frames, because some kernels lack the queueing discipline `netem`.
        """
        inner, outer = f"in{self.port}", f"out{self.port}"
        self.network.on_switch("ip", "link", "set", self.port, "nomaster")
        self.network.on_switch("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
        self.network.on_switch("ip", "link", "set", inner, "up")
        self.network.on_switch("ip", "link", "set", outer, "up", "master", "bridge")
        command = [
            sys.executable,
            "-m",
            "tests.support.hosts",
            self.port,
            inner,
            str(delay_s / 2),
            str(loss),
            str(seed),
        ]
        switch = ["nsenter", "--target", str(self.network.switch.pid), "--net", "--"]
        self.relay = _start_shell([*switch, *command])

    def mend(self) -> None:
        """Repair the link and restore its speed."""
        self._end_relay()
        self.network.on_switch("ip", "link", "set", self.port, "up", "master", "bridge")

    def end(self) -> None:
        """Wait until the host has no processes left."""
        self._end_relay()
        _end_shell(self.shell)

    def _end_relay(self) -> None:
        if self.relay is None:
            return
        _end_shell(self.relay)
        self.relay = None
        self.network.on_switch("ip", "link", "delete", f"in{self.port}")


class Network:
    """A switch with its connected hosts; all of them see the folder `shared`."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self.hosts: dict[str, Host] = {}
        self.numbers: dict[str, int] = {}  # host's name → the end of its address, which a second boot keeps
        self.hosts_file = shared / "etc-hosts"
        self.hosts_file.write_text("127.0.0.1 localhost\n")
        self.switch = _start_shell(["unshare", "--net", "sh", "-c", "echo ready; cat"])
        self.on_switch("ip", "link", "add", "bridge", "type", "bridge")
        self.on_switch("ip", "address", "add", f"{PREFIX}.1/24", "dev", "bridge")
        self.on_switch("ip", "link", "set", "bridge", "up")

    def __enter__(self) -> "Network":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def boot(self, name: str) -> Host:
        """Add a host, or restart a killed host with its old addresses and an empty `/tmp` and `/dev/shm`."""
        number = self.numbers.setdefault(name, len(self.numbers))
        # Every host has the others' names in /etc/hosts: without a name server, lookups would take seconds.
        known = [f"{PREFIX}.{FIRST_ADDRESS + other} {host}" for host, other in self.numbers.items()]
        self.hosts_file.write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        host = Host(self, name, number)
        self.hosts[name] = host
        # A restarted machine keeps its MAC address. With a new one, packets would be lost until caches expire.
        peer = ["peer", "name", "eth0", "address", f"02:00:00:00:00:{number:02x}", "netns", str(host.init)]
        self.on_switch("ip", "link", "add", host.port, "type", "veth", *peer)
        self.on_switch("ip", "link", "set", host.port, "up", "master", "bridge")
        host.run(
            f"ip link set lo up && ip link set eth0 up && ip address add {host.address}/24 dev eth0 && "
            f"ip route add default via {PREFIX}.1"
        )
        return host

    def on_switch(self, *command: str) -> None:
        """Run a command in the switch's network. Raises RuntimeError if it fails."""
        words = ["nsenter", "--target", str(self.switch.pid), "--net", "--", *command]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

    def close(self) -> None:
        """End all hosts with their processes, and the switch."""
        for host in self.hosts.values():
            host.end()
        _end_shell(self.switch)


def login_environment() -> dict[str, str]:
    """Return the environment of a command on a host; from this process it keeps only the Python and the locale."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(HOME),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
    }


# ------------------------------------------------------------------------ process 1


def _boot_shell(name: str, shared: Path, hosts_file: Path) -> subprocess.Popen[bytes]:
    """Start a host's process 1, which prepares its mounts."""
    lines = [f"hostname {name}", "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"]
    lines.append(f"mount -t tmpfs tmpfs {CGROUP} && mkdir {CGROUP}/cpuset && echo 0 >{CGROUP}/cpuset/cpuset.cpus")
    # What lies under /tmp and is the same on all hosts is opened before /tmp is covered, and put back.
    kept = [path for path in (ROOT, shared.resolve()) if path.is_relative_to(TEMPORARY)]
    for handle, path in enumerate(kept, start=3):
        lines.append(f"exec {handle}<'{path}'")
    lines.append(f"mount --bind '{hosts_file.resolve()}' /etc/hosts && mount --bind /dev/null /etc/resolv.conf")
    lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {TEMPORARY} && mkdir -m 700 {HOME}")
    for handle, path in enumerate(kept, start=3):
        lines.append(f"mkdir -p '{path}' && mount --no-canonicalize --bind /proc/self/fd/{handle} '{path}'")
        lines.append(f"exec {handle}<&-")
    # Not `exec cat`: the shell reaps dead processes, as process 1 must.
    lines.append("echo ready; cat; exit")
    spaces = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return _start_shell([*spaces, "sh", "-e", "-c", "\n".join(lines)])


def _start_shell(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a shell that prints "ready" and ends when its standard input closes."""
    pipe = subprocess.PIPE
    shell = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT)
    assert shell.stdout is not None
    assert shell.stderr is not None
    ready, _, _ = select.select([shell.stdout], [], [], BOOT_TIMEOUT_S)
    if not ready or shell.stdout.readline() != b"ready\n":
        shell.kill()
        raise RuntimeError(f"a host did not boot: {shell.stderr.read().decode()}")
    return shell


def _end_shell(shell: subprocess.Popen[bytes]) -> None:
    for stream in (shell.stdin, shell.stdout, shell.stderr):
        if stream is not None:
            stream.close()
    shell.wait(END_TIMEOUT_S)


# ------------------------------------------------------------------------ a slow link


def carry(first: str, second: str, delay_s: float, loss: float, seed: int) -> None:
    """Forward frames between two interfaces of the switch after `delay_s`, until standard input closes."""
    rng = random.Random(seed)
    links = [_packet_socket(first), _packet_socket(second)]
    other_end = {links[0]: links[1], links[1]: links[0]}
    print("ready", flush=True)
    on_their_way: list[tuple[float, int, bytes, socket.socket]] = []
    count = 0
    while True:
        wait_s = 1.0
        if on_their_way:
            wait_s = max(0.0, on_their_way[0][0] - time.monotonic())
        ready, _, _ = select.select([*links, sys.stdin], [], [], wait_s)
        for link in ready:
            if link is sys.stdin:
                return
            frame, sender = link.recvfrom(LARGEST_FRAME)
            # Skip the frames that we sent ourselves.
            if sender[2] == socket.PACKET_OUTGOING or rng.random() < loss:
                continue
            count += 1  # frames of one moment keep their order
            heapq.heappush(on_their_way, (time.monotonic() + delay_s, count, frame, other_end[link]))
        while on_their_way and on_their_way[0][0] <= time.monotonic():
            _, _, frame, end = heapq.heappop(on_their_way)
            try:
                end.send(frame)
            except OSError:
                # The host is gone, or its queue is full: a lost frame, as on a real link.
                continue


def _packet_socket(interface: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    link.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    link.bind((interface, ALL_PROTOCOLS))
    return link


def main(words: Iterable[str]) -> None:
    """Run the process that forwards a slow link's frames; see Host.slow."""
    first, second, delay_s, loss, seed = words
    carry(first, second, float(delay_s), float(loss), int(seed))


if __name__ == "__main__":
    main(sys.argv[1:])
