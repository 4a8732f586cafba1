"""A stand-in for SLURM: jobs run on the hosts of a test cluster.

The batch script runs on the first host of a job, where it finds the programs `srun` and `scontrol` in PATH. The two
programs send their command line to the test over a Unix socket, because only the test can start programs on the other
hosts.
"""

import contextlib
import json
import os
import shlex
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hosts import Host

# The program sends its command line and its environment to the test, and ends with the exit status that it receives.
# When the program gets SIGTERM, it closes the sending half of the connection.
_CLIENT = """#!{python}
import json, os, signal, socket, sys
there = socket.socket(socket.AF_UNIX)
there.connect({path!r})
signal.signal(signal.SIGTERM, lambda *_: there.shutdown(socket.SHUT_WR))
there.sendall(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ)]).encode() + b"\\n")
sys.exit(int(there.makefile().readline() or 1))
"""


def child_of(process: subprocess.Popen[str]) -> int:
    """Return the process id of the program that `nsenter` has started on a host."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


class Slurm:
    """Runs batch scripts on hosts.

    Args:
        hosts: the nodes of every job, in order.
        folder: folder for the programs `srun` and `scontrol`.

    Attributes:
        requeued: ids of the jobs for which `scontrol requeue` was called.
        steps: options of each `srun`.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts, self.folder = list(hosts), folder
        self.requeued: list[str] = []
        self.steps: list[list[str]] = []
        for name in ("srun", "scontrol"):
            (folder / name).write_text(_CLIENT.format(python=sys.executable, path=str(folder / "socket")))
            (folder / name).chmod(0o755)

    @contextlib.contextmanager
    def running(self) -> Iterator["Slurm"]:
        """Handle the calls of `srun` and `scontrol` inside the `with` block."""
        slurm = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                name, arguments, env = json.loads(self.rfile.readline())
                status = slurm._scontrol(arguments) if name == "scontrol" else slurm._srun(arguments, env, self.rfile)
                with contextlib.suppress(OSError):
                    self.wfile.write(f"{status}\n".encode())

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        with Server(str(self.folder / "socket"), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()

    def _scontrol(self, arguments: list[str]) -> int:
        action, job = arguments
        assert action == "requeue"
        self.requeued.append(job)
        return 0

    def _srun(self, arguments: list[str], env: Mapping[str, str], connection) -> int:
        """Run a command on the hosts that srun's options select, until the command ends or srun gets SIGTERM."""
        command = list(arguments)
        options = {}
        while command[0].startswith("--"):
            name, _, value = command.pop(0).partition("=")
            options[name] = value
        self.steps.append(arguments)
        first = int(options["--relative"])
        nodes = self.hosts[first : first + int(options["--nodes"])]
        assert len(nodes) == int(options["--nodes"]) == int(options["--ntasks"])
        running = [host.popen(command, env) for host in nodes]

        def stop() -> None:
            connection.read()  # `read` returns when srun has received SIGTERM or was killed
            for process in running:
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(child_of(process), signal.SIGTERM)

        threading.Thread(target=stop, daemon=True).start()
        return max(abs(process.wait()) for process in running)

    def sbatch(self, command: str, *arguments: str, env: Mapping[str, str], **options) -> subprocess.Popen[str]:
        """Start the batch script of a command line that begins with `sbatch`.

        Args:
            command: the command line, such as "sbatch --nodes=2 --cpus-per-task=4 script.sh argument".
            arguments: further arguments of the script.
            env: environment variables of the script.
            options: options of subprocess.Popen.
        """
        words = shlex.split(command)
        assert words.pop(0) == "sbatch"
        asked = {}
        while words[0].startswith("--"):
            name, _, value = words.pop(0).partition("=")
            asked[name] = value
        assert int(asked["--nodes"]) == len(self.hosts)
        job = {
            "SLURM_JOB_ID": "71", "SLURM_JOB_NUM_NODES": asked["--nodes"],
            "SLURM_CPUS_PER_TASK": asked["--cpus-per-task"], "PATH": f"{self.folder}:{os.environ['PATH']}",
        }  # fmt: skip
        return self.hosts[0].popen(["bash", *words, *arguments], {**job, **env}, **options)
