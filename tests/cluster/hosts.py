"""Machines of a test cluster, each of which is a set of Linux namespaces on this machine.

A host has its own network address, hostname, processes, /dev/shm, /tmp/ray and /etc/hosts. All hosts share all
other files, so a folder of this machine is a shared file system. Creating hosts needs root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

BRIDGE = "rltbr0"
NETWORK = "10.78.0"
_ATTEMPTS = 4
# The first process of a host. Orphaned processes of the host become its children, so that it must reap them.
_INIT = """import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""


def namespaces_work() -> str:
    """Return "" if this process can create hosts, and otherwise the reason why it cannot."""
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts(1) as (host,):
            done = host.run(["true"])
    except (OSError, RuntimeError) as error:
        return str(error)
    return " ".join(done.stderr.split()) if done.returncode else ""


class Host:
    """One machine of a test cluster.

    Args:
        number: number of the host, from 1; the last part of its address.
        folder: folder for files of the host, such as its /etc/hosts.
        names: lines of the host's /etc/hosts, after the line of localhost.
        shm_mb: size of the host's /dev/shm.

    Attributes:
        name: hostname.
        address: IPv4 address.
        init: process id of the host's first process, as this machine sees it.
    """

    def __init__(self, number: int, folder: Path, *, names: str = "", shm_mb: int = 1024) -> None:
        self.number, self.name, self.address = number, f"rlthost{number}", f"{NETWORK}.{number}"
        self.end = f"rltveth{number}"
        self.hosts_file = folder / f"{self.name}.hosts"
        self.hosts_file.write_text(f"127.0.0.1 localhost\n{names}")
        os.makedirs("/tmp/ray", exist_ok=True)
        for left in (("netns", "del", self.name), ("link", "del", self.end)):
            with contextlib.suppress(RuntimeError):  # A killed earlier test may have left the host behind.
                _ip(*left)
        _ip("netns", "add", self.name)
        _ip("link", "add", self.end, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("link", "set", self.end, "master", BRIDGE, "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.name, "link", "set", "eth0", "up")
        _ip("-n", self.name, "link", "set", "lo", "up")
        self._setup = (
            "mount --make-rprivate / && "
            f"mount -t tmpfs -o size={shm_mb}m tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp/ray && "
            f"mount --bind {self.hosts_file} /etc/hosts && hostname {self.name} && exec {sys.executable} -c '{_INIT}'"
        )
        self._boot()

    def _boot(self) -> None:
        """Start the host's first process in new namespaces."""
        self.holder = subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc",
             "--kill-child", "sh", "-c", self._setup],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.init = self._first_process()

    def _first_process(self) -> int:
        """Wait until the host's first process runs, and return its process id as this machine sees it."""
        for _ in range(200):
            children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
            for child in children:
                if b"os.wait" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[2:3].__repr__().encode():
                    return int(child)
            time.sleep(0.02)
        raise RuntimeError(f"{self.name}: its namespaces were not created")

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` in the namespaces of the host."""
        return ["nsenter", "--target", str(self.init), "--net", "--mount", "--uts", "--pid", f"--wd={os.getcwd()}",
                *argv]  # fmt: skip

    def popen(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options) -> subprocess.Popen[str]:
        """Start a program on the host."""
        return subprocess.Popen(
            self.command(argv), env={**os.environ, **(env or {})}, text=True, stdin=subprocess.DEVNULL, **options
        )

    def run(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the host, and return its exit status, stdout and stderr."""
        return subprocess.run(
            self.command(argv), env={**os.environ, **(env or {})}, text=True, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=timeout,
        )  # fmt: skip

    def mount_tmpfs(self, folder: Path) -> None:
        """Give the host an empty folder of its own in place of a folder that all hosts share."""
        done = self.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)])
        assert done.returncode == 0, done.stderr

    def link(self, state: str) -> None:
        """Set the network link of the host `up` or `down`."""
        _ip("link", "set", self.end, state)

    def bytes_on_link(self) -> tuple[int, int]:
        """Return the numbers of bytes that the host has received and sent."""
        folder = Path(f"/sys/class/net/{self.end}/statistics")  # the other end of the link, where rx and tx are swapped
        return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())

    def processes(self) -> dict[int, str]:
        """Return the command line of each process of the host, by the process id that this machine sees.

        The host's first process is left out, and so are processes that have ended.
        """
        found: dict[int, str] = {}
        with contextlib.suppress(OSError):
            space = os.readlink(f"/proc/{self.init}/ns/pid")
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if words and os.readlink(folder / "ns" / "pid") == space and int(folder.name) != self.init:
                        found[int(folder.name)] = words
        return found

    def kill(self, program: str = "") -> None:
        """Kill the processes whose program has the name `program`, or all processes except the host's first one."""
        for pid, words in self.processes().items():
            if not program or Path(words.partition(" ")[0]).name == program:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def power_on(self) -> None:
        """Start the host again after `power_off`, with an empty /dev/shm and an empty /tmp/ray."""
        self._boot()
        self.link("up")

    def power_off(self) -> None:
        """Take the host off the network and kill all its processes at once, as a loss of power does."""
        with contextlib.suppress(RuntimeError):
            self.link("down")
        self.holder.kill()
        self.holder.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)

    def remove(self) -> None:
        """Kill all processes of the host, and delete its network namespace."""
        self.power_off()
        for arguments in (("link", "del", self.end), ("netns", "del", self.name)):
            with contextlib.suppress(RuntimeError):
                _ip(*arguments)


class Cluster:
    """A Ray cluster whose nodes are hosts on one network.

    Args:
        hosts: the hosts; Ray's head runs on the first one.
        env: environment variables of Ray's daemons and of all programs.
    """

    PORT = 6379

    def __init__(self, hosts: Sequence[Host], env: Mapping[str, str] | None = None) -> None:
        # If the user has an authentication token, `ray start` turns authentication on, but only on the head.
        ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
        self.hosts, self.env = list(hosts), ray | dict(env or {})

    @property
    def address(self) -> str:
        """Address of Ray's head."""
        return f"{self.hosts[0].address}:{self.PORT}"

    def start(self, cpus: int = 4) -> None:
        """Start Ray's head on the first host, and join all other hosts to it."""
        for host in self.hosts:
            self.join(host, cpus)

    def join(self, host: Host, cpus: int = 4, env: Mapping[str, str] | None = None) -> None:
        """Start Ray on one host, and wait until Ray runs there."""
        role = ["--head", f"--port={self.PORT}"] if host is self.hosts[0] else [f"--address={self.address}"]
        for _ in range(_ATTEMPTS):  # `ray start` gives up after 30 s, which is too short on a busy machine
            done = host.run(
                [str(Path(sys.executable).parent / "ray"), "start", *role, f"--node-ip-address={host.address}",
                 f"--num-cpus={cpus}", "--object-store-memory=150000000", "--disable-usage-stats"],
                {**self.env, **(env or {})},
                timeout=300.0,
            )  # fmt: skip
            if not done.returncode:
                return
            host.kill()
        raise RuntimeError(f"ray start on {host.name} failed:\n{done.stdout}\n{done.stderr}")

    def main(
        self, *overrides: str, host: Host | None = None, env: Mapping[str, str] | None = None, timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m rltrain.main` on a host of the cluster."""
        return (host or self.hosts[0]).run(
            [sys.executable, "-m", "rltrain.main", f"placement.address={self.address}", *overrides],
            {**self.env, **(env or {})},
            timeout=timeout,
        )


@contextlib.contextmanager
def hosts(
    count: int, *, names: Mapping[int, str] | None = None, shm_mb: Mapping[int, int] | None = None
) -> Iterator[list[Host]]:
    """Yield `count` new hosts on one network, and remove the hosts and the network at the end of the `with` block.

    Args:
        count: number of hosts.
        names: lines of /etc/hosts by the number of the host; by default, each hostname resolves to the host's address.
        shm_mb: size of /dev/shm by the number of the host; 1,024 MB by default.
    """
    resolved = "".join(f"{NETWORK}.{number} rlthost{number}\n" for number in range(1, 10))
    with contextlib.suppress(RuntimeError):  # a killed earlier test may have left the network behind
        _ip("link", "del", BRIDGE)
    made: list[Host] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            _ip("link", "add", BRIDGE, "type", "bridge")
            _ip("link", "set", BRIDGE, "up")
            for number in range(1, count + 1):
                lines = (names or {}).get(number, resolved)
                made.append(Host(number, Path(folder), names=lines, shm_mb=(shm_mb or {}).get(number, 1024)))
            yield made
        finally:
            for host in made:
                host.remove()
            with contextlib.suppress(RuntimeError):
                _ip("link", "del", BRIDGE)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {' '.join(done.stderr.split())}")
