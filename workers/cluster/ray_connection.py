"""The driver's connection to Ray: it starts Ray on this machine or joins a cluster, and leaves the cluster again.

This module imports no roles and no large packages, so that a driver can check the nodes of a cluster in its first
seconds.
"""

import atexit
import contextlib
import logging
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltrain.base.cpu_threads import cpu_cores
from rltrain.base.errors import ConfigError, WorkerError, one_line
from rltrain.settings.schema import Config
from workers.cluster import ray_daemons
from workers.cluster.hangups import hangups_ignored
from workers.cluster.ray_daemons import Daemons, RemoteDaemon
from workers.cluster.ray_guard import RayGuard

_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_FILE = Path(os.path.expanduser("~/.ray/auth_token"))  # File from which Ray reads the authentication token.
_TMP, _LONGEST_TMPDIR = "/tmp", 30
_DISCONNECT_S = 10.0  # maximum time in seconds to disconnect from a cluster whose head is lost
_ANSWER_S = 10.0  # timeout in seconds of the test connection to a cluster's port
_LAST_PORT = 65_535


@dataclass
class _Connection:
    """The current process's connection to Ray. A process has at most one connection to Ray at a time.

    Attributes:
        guard: Handle to the guard process, which kills those processes of Ray that still run after the current process
            has ended.
        daemons: Ray daemons that the connection to Ray needs.
    """

    guard: RayGuard | None = None
    daemons: Daemons = field(default_factory=Daemons)


_connection = _Connection()


def connected_daemons() -> Daemons:
    """Return the Ray daemons that this process's connection to Ray needs."""
    return _connection.daemons


def connect(config: Config) -> dict[str, float]:
    """Start or join a Ray cluster, and return a dict that maps the name of each resource to the amount in the cluster.

    Raises:
        ConfigError: The existing Ray cluster cannot be joined.
        WorkerError: Ray does not start.
    """
    local, address = config.placement.address == "local", config.placement.address
    if address == "auto":  # With the address "auto", Ray could join the private cluster of another run.
        address = os.environ.get("RAY_ADDRESS", "")
        if not address:
            raise ConfigError(
                "placement.address=auto: RAY_ADDRESS is not set, so there is no cluster to join; start the run with "
                "`ray job submit`, give placement.address=HOST:PORT, or use placement=local"
            )
    if not local:
        if _TOKEN_FILE.is_file():
            # `ray start --head` turns authentication on if the token file exists, but `ray.init` does not.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        _require_answer(address)
    # `import ray` reads environment variables, so the variables must be set before the import
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if local:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # Setting RAY_AUTH_MODE avoids a warning of Ray.
            # By default, Ray lowers its workers' CPU priority. A niceness of 0 keeps the normal priority.
            os.environ.setdefault("RAY_worker_niceness", "0")
            # Only Ray's dashboard needs task events, so an interval of 0 turns task events off.
            os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
            # By default, glibc creates a memory arena for most of Ray's many threads, and an arena never returns its
            # peak memory to the system. The variable MALLOC_ARENA_MAX limits each Ray process to two memory arenas.
            os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    with _on_loopback() if local else contextlib.nullcontext():
        import ray

    options: dict[str, Any] = {"log_to_driver": config.verbose, "configure_logging": config.verbose}
    if local:
        options |= {"include_dashboard": False, "num_cpus": cpu_cores()} | _short_temporary_folder()
    if config.placement.env_vars:
        options["runtime_env"] = {"env_vars": config.placement.env_vars}
    if not config.verbose:
        _no_reports()
    _connection.guard = RayGuard(secrets.token_hex(8) if local else "")
    try:
        token = _own_token() if local else contextlib.nullcontext()
        with hangups_ignored(), token, _connection.guard.marking():
            ray.init(address=address, logging_level=logging.INFO if config.verbose else logging.ERROR, **options)
        session, found = ray_daemons.find()
    except BaseException as error:
        disconnect()
        if isinstance(error, Exception):
            raise _no_ray(address, error) from error
        raise
    _connection.daemons = Daemons(found)
    _connection.guard.tell(session, found)
    return dict(ray.cluster_resources())


def _no_ray(address: str, error: Exception) -> ConfigError | WorkerError:
    """Return the error to raise when a Ray cluster could not be started or joined."""
    if "InvalidAuthToken" in str(error):
        return _no_token(address)
    if isinstance(error, ConnectionError):
        return _no_cluster(address, error)
    # Ray has no exception type for a daemon that does not start in time.
    return WorkerError(
        f"Ray did not start ({type(error).__name__}: {one_line(str(error), 200)}): this machine may be overloaded; "
        "try again, or use placement=inprocess"
    )


def _short_temporary_folder() -> dict[str, str]:
    """Return the `ray.init` option that makes Ray use a temporary folder with a short path.

    The path of a socket has at most 107 characters, and Ray's own folder and file names take about 70 characters.

    Returns:
        Keyword arguments for `ray.init`, or {} to keep Ray's default temporary folder. Ray's default temporary folder
        is kept if its path is short enough for the paths of sockets, if the user has set RAY_TMPDIR, or if /tmp is not
        writable.
    """
    if "RAY_TMPDIR" in os.environ or len(tempfile.gettempdir()) <= _LONGEST_TMPDIR or not os.access(_TMP, os.W_OK):
        return {}
    return {"_temp_dir": f"{_TMP}/ray"}


def _require_answer(address: str) -> None:
    """Raise ConfigError at once if no program listens at `address`, or if the cluster at `address` requires a token.

    Without `_require_answer`, `ray.init` would try for minutes to connect to an address without a cluster.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in address:
        if int(port) > _LAST_PORT:  # the C library silently reduces port numbers modulo 65,536
            raise _no_cluster(address, OverflowError(f"the highest port number is {_LAST_PORT}"))
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        except (OSError, UnicodeError) as error:
            raise _no_cluster(address, error) from error
        if os.environ.get("RAY_AUTH_MODE") != "token" and _requires_token(address):
            raise _no_token(address)


def _requires_token(address: str) -> bool:
    """Return whether a Ray cluster refuses a call without a token.

    Without a token, `ray.init` would try to connect for 20 s before it fails.
    """
    import grpc  # The package grpcio is installed, because Ray depends on it.

    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            call(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            return isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAUTHENTICATED
    return False


def _no_token(address: str) -> ConfigError:
    return ConfigError(
        f"placement.address={address}: the cluster requires a token of Ray's authentication, and this process has no "
        "token or a different one; start every node and the run with RAY_AUTH_MODE=token and the same token in "
        "~/.ray/auth_token or RAY_AUTH_TOKEN, or set RAY_AUTH_MODE=disabled on all of them"
    )


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"placement.address={address}: no cluster answers there ({one_line(str(error), 200)}); give the HOST:PORT "
        "that `ray start --head` printed, or use placement=local"
    )


def _no_reports() -> None:
    """Keep Ray from printing a long report of each failed process or call, because the run itself reports failures."""
    # If several ranks fail, the run raises only the error of the first rank that failed. Without the environment
    # variable RAY_IGNORE_UNHANDLED_ERRORS, Ray would print the errors of all ranks that failed after the first one.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    with contextlib.suppress(ImportError):
        from ray._private import worker

        worker.print_to_stdstream = lambda *_, **__: None


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray use the loopback address for this node, so that Ray's daemons listen only at the loopback address.

    Ray must be imported for the first time inside the `with` block, because Ray reads RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER
    during the import. Despite its name, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER also has an effect on Linux.
    `ray.init(_node_ip_address="127.0.0.1")` does not make Ray use the loopback address, because Ray replaces 127.0.0.1
    by an address that other machines can reach. At the end of the `with` block, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER gets
    back its earlier value, because programs that this process starts later may need a Ray cluster with several
    machines.
    """
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Make Ray daemons that start in the `with` block use a new authentication token, unless the user has set a token.

    By default, Ray uses one token for all clusters of a user, and leaves the token in a file in the user's home folder.
    """
    from ray import _raylet

    loader: Any = _raylet

    # Ray's cache may hold the token of a previous cluster, so the cache is cleared
    loader.AuthenticationTokenLoader.instance().reset_cache()
    if own := not {_TOKEN, f"{_TOKEN}_PATH"} & os.environ.keys():
        os.environ[_TOKEN] = secrets.token_hex(32)
    try:
        yield
    finally:
        if own:
            # `RAY_AUTH_TOKEN` is deleted, because a Ray cluster that this process joins later has a different token
            del os.environ[_TOKEN]


def disconnect() -> None:
    """Disconnect from Ray, and end all processes of the Ray cluster if this process has started the cluster."""
    import ray

    if isinstance(_connection.daemons.lost(), RemoteDaemon):
        _disconnect_from_lost_head()
    else:
        ray.shutdown()
    _connection.daemons = Daemons()
    guard, _connection.guard = _connection.guard, None
    if guard is not None:
        guard.close()


def _disconnect_from_lost_head() -> None:
    """Disconnect from a Ray cluster whose head is lost.

    If the head's machine has no power or no network, Ray waits for the head until TCP gives up after minutes. If
    `ray.shutdown` has not returned after `_DISCONNECT_S` seconds, this function registers an exit handler that ends the
    process at once. Without the exit handler `_exit_at_once`, Ray's own exit handler would wait for the cluster's lost
    head when this process exits.
    """
    import ray

    ending = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    ending.start()
    ending.join(_DISCONNECT_S)
    if ending.is_alive():
        # Python first runs the exit handler that was registered last, so `_exit_at_once` runs before Ray's exit handler
        atexit.register(_exit_at_once)


def _exit_at_once() -> None:
    with contextlib.suppress(OSError, ValueError):  # `flush` fails if stdout or stderr is already closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)
