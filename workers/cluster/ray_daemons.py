"""Code that detects the death of the Ray daemons that a run depends on.

The daemon `raylet` starts the workers of one machine and stores their objects. If the raylet of the driver's machine
dies, the run cannot continue. The daemon `gcs_server` runs on the head node and keeps the cluster's metadata. If
gcs_server dies, no new process can start, and after 60 s Ray ends the processes that were connected to gcs_server. A
run whose gcs_server has died can still save a checkpoint.
"""

import contextlib
import logging
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from rltrain.base.errors import ClusterLost
from workers.cluster.progress import began_of, state_of

logger = logging.getLogger(__name__)

GCS, RAYLET = "gcs_server", "raylet"
# After the death of gcs_server, the run has GRACE_S seconds to finish the current training step. GRACE_S is below the
# 60 seconds after which Ray ends the driver.
GRACE_S = 40.0
# Times in seconds for checks of a remote gcs_server: _ASK_EVERY_S is the interval between connection attempts, and
# _ANSWER_S is the timeout of one attempt. A remote gcs_server counts as dead after _SILENT_S seconds without a
# successful connection.
_ASK_EVERY_S, _ANSWER_S, _SILENT_S = 5.0, 1.0, 10.0
_CREDENTIALS = struct.Struct("3i")  # binary format of the pid, uid and gid of a Unix socket's peer


class Daemon(Protocol):
    """Interface of the objects that represent a Ray daemon on any machine."""

    @property
    def name(self) -> str:
        """Return the name of the Ray daemon's program."""

    def ended(self) -> bool:
        """Return whether the Ray daemon has died. `ended` is cheap enough to be called many times per second."""

    def __str__(self) -> str:
        """Return a message that says which daemon has died and on which machine."""


@dataclass(frozen=True)
class LocalDaemon:
    """A Ray daemon on this machine.

    Attributes:
        name: Name of the daemon's program.
        node: Address of this machine in the cluster.
        pid, began: Process id and start time of the daemon, as in `progress.Process`.
    """

    name: str
    node: str
    pid: int
    began: int

    def ended(self) -> bool:
        """Return whether the Ray daemon's process has ended. See `Daemon.ended`."""
        return not state_of(self.pid, self.began)

    def __str__(self) -> str:
        return f"Ray's {self.name} on node {self.node} (pid {self.pid}) is gone (killed, crashed or out of memory)"


class RemoteDaemon:
    """A Ray daemon on another machine.

    A remote daemon counts as dead after `_SILENT_S` seconds without a successful connection.
    """

    def __init__(self, name: str, host: str, port: int) -> None:
        self.name, self.host, self.port = name, host, port
        self.asked = time.monotonic()
        self.connection: socket.socket | None = None  # the TCP connection that is being opened, or None
        self.silent_since: float | None = None

    def ended(self) -> bool:
        """Return whether connections to the daemon have failed for `_SILENT_S` seconds. See `Daemon.ended`.

        Connections are opened without blocking, because `ended` runs in the driver's event loop.
        """
        now = time.monotonic()
        if self.connection is None and now >= self.asked + _ASK_EVERY_S:
            self.asked = now
            self.connection = _connecting(self.host, self.port)
        if self.connection is not None:
            self._look_at(self.connection, now)
        return self.silent_since is not None and now >= self.silent_since + _SILENT_S

    def _look_at(self, connection: socket.socket, now: float) -> None:
        """Record the result of a connection attempt as soon as the attempt has succeeded, failed or timed out."""
        poll = select.poll()  # unlike select(), poll() takes file descriptors of 1024 and above
        poll.register(connection, select.POLLOUT)
        settled = bool(poll.poll(0))
        if not settled and now < self.asked + _ANSWER_S:
            return
        self.silent_since = None if settled and _is_open(connection) else self.silent_since or self.asked
        connection.close()
        self.connection = None

    def __str__(self) -> str:
        return f"Ray's {self.name} on node {self.host} no longer answers at port {self.port}"


def _connecting(host: str, port: int) -> socket.socket:
    """Start to open a TCP connection, and return before the connection is open."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    connection.setblocking(False)
    with contextlib.suppress(OSError):  # `_look_at` handles a connection attempt that fails at once
        connection.connect((host, port))
    return connection


def _is_open(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


class Daemons:
    """The Ray daemons that a run depends on.

    Args:
        daemons: Ray daemons whose death ends the run.

    Attributes:
        patient: Whether the run is allowed to finish the current training step and save a checkpoint after the death of
            gcs_server.
    """

    def __init__(self, daemons: Sequence[Daemon] = ()) -> None:
        self.daemons, self.patient = list(daemons), False
        self.lost_at: float | None = None

    def local_pids(self) -> list[int]:
        """Return the pids of the Ray daemons of this machine."""
        return [daemon.pid for daemon in self.daemons if isinstance(daemon, LocalDaemon)]

    def lost(self) -> Daemon | None:
        """Return the daemon that has died, or None if no daemon has died.

        If both raylet and gcs_server have died, return the raylet.
        """
        ended = [daemon for daemon in self.daemons if daemon.ended()]
        return min(ended, key=lambda daemon: daemon.name == GCS, default=None)

    def check(self, *, at_rest: bool = False) -> None:
        """Raise ClusterLost if a Ray daemon has died.

        If `patient` is True, the death of gcs_server in the middle of a training step is only logged at first, and
        raises ClusterLost after `GRACE_S` seconds.

        Args:
            at_rest: Whether the run is between two training steps, so that a checkpoint can be saved.
        """
        lost = self.lost()
        if lost is None:
            return
        now = time.monotonic()
        saves = lost.name == GCS and self.patient
        if self.lost_at is None:
            self.lost_at = now
            if saves and not at_rest:
                logger.warning(
                    "%s: if the current training step does not end within %g s, the run ends without completing it",
                    lost,
                    GRACE_S,
                )
        if saves and not at_rest and now < self.lost_at + GRACE_S:
            return
        error = ClusterLost(f"{lost}: start the run again with trainer.resume=auto")
        error.can_save = saves and at_rest
        raise error


def find() -> tuple[Path, list[Daemon]]:
    """Return the directory of Ray's logs and sockets, and the daemons that this process's connection to Ray needs."""
    import ray

    context = ray.get_runtime_context()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    session = Path(node["RayletSocketName"]).parent.parent
    found: list[Daemon] = []
    if raylet := _listener(node["RayletSocketName"]):
        found += _local(RAYLET, node["NodeManagerAddress"], [raylet])
    below = [process.pid for process in psutil.Process().children(recursive=True)]
    if gcs := [pid for pid in below if _is_gcs_of(session.name, pid)]:
        found += _local(GCS, node["NodeManagerAddress"], gcs)
    else:
        host, _, port = context.gcs_address.rpartition(":")
        found.append(RemoteDaemon(GCS, host.strip("[]"), int(port)))
    return session, found


def _local(name: str, node: str, pids: Sequence[int]) -> Sequence[Daemon]:
    return [LocalDaemon(name, node, pid, began) for pid in pids if (began := began_of(pid)) is not None]


def _listener(path: str) -> int:
    """Return the pid of the process that listens on a Unix socket.

    Returns 0 if the process is in a pid namespace that is invisible to this process, or if the connection fails.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, AttributeError):
        return 0
    return int(_CREDENTIALS.unpack(content)[0])


def _is_gcs_of(session: str, pid: int) -> bool:
    """Return whether the process `pid` is the gcs_server of the Ray cluster with the session name `session`.

    Comparing only the program name is not enough, because this process may have started a second Ray cluster, whose
    gcs_server has the same program name.
    """
    try:
        arguments = psutil.Process(pid).cmdline() or [""]
    except psutil.Error:
        return False
    return Path(arguments[0]).name == GCS and f"--session-name={session}" in arguments
