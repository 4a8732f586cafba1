"""Environment variables for worker processes in a Ray cluster, with values that depend on the process's node."""

import os
import socket
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from rltrain.base.cpu_threads import cpu_cores, openmp_settings

# Environment variables that set the network interface of gloo and NCCL, and the IP address of vLLM's processes.
_INTERFACES, _ADDRESS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "VLLM_HOST_IP"


@dataclass(frozen=True)
class Sharing:
    """How many processes share the CPU cores of a node.

    Attributes:
        resource: Resource of Ray that limits the number of processes on a node.
        amount: Amount of Ray's resource (GPUs or CPUs) that one process requests.
        active: Number of processes in the whole cluster that compute at the same time.
        threads: Number of threads per process, if the user has set it; None to divide the node's cores among its
            processes.
    """

    resource: Literal["GPU", "CPU"]
    amount: float
    active: int
    threads: int | None

    def threads_on(self, amount: float) -> int:
        """Return the number of CPU threads that each worker process on this node may use.

        Args:
            amount: Amount of Ray's resource (GPUs or CPUs) that the node offers to Ray.
        """
        processes = max(1, min(self.active, int(amount / self.amount)))
        return self.threads or max(1, cpu_cores() // processes)


def settings_here(sharing: Sharing) -> dict[str, str]:
    """Return the environment variables of a worker process on this node. The calling process must be connected to Ray.

    Without the variable `GLOO_SOCKET_IFNAME`, gloo would listen at the address to which the hostname resolves, which
    may be a loopback address such as 127.0.1.1.
    """
    import ray

    node = ray.get_runtime_context().get_node_id()
    resources = next(one["Resources"] for one in ray.nodes() if one["NodeID"] == node)
    address = ray.util.get_node_ip_address()
    interface = interface_of(address)
    network = {_ADDRESS: address} | (dict.fromkeys(_INTERFACES, interface) if interface else {})
    # If one of the variables in `network` is already set in this node's environment, the existing value is kept.
    network |= {name: os.environ[name] for name in network if name in os.environ}
    return network | openmp_settings(sharing.threads_on(resources.get(sharing.resource, 0.0)))


def own_address() -> str:
    """Return the address at which the processes of other machines reach this process.

    The address is usually the one that Ray uses for this process's node. If the network interface that
    `GLOO_SOCKET_IFNAME` names has IPv4 addresses, but Ray's address is not among them, the interface's first IPv4
    address is returned instead.
    """
    import ray

    node = str(ray.util.get_node_ip_address())
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    listed = interfaces.get(os.environ.get(_INTERFACES[0], ""), [])
    found = [str(one.address) for one in listed if one.family == socket.AF_INET]
    return node if node in found or not found else found[0]


def listener_at(host: str) -> socket.socket:
    """Return a socket that listens at a free port of the address `host`, and at no other address of this machine."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def interface_of(address: str) -> str:
    """Return the name of this machine's network interface with the given IP address, such as "eth0".

    Returns:
        The name of the network interface, or "" if no interface of this machine has the address.
    """
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        for one in addresses:
            # psutil may append "%" and the name of the interface to an IPv6 address.
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.address.partition("%")[0] == address:
                return name
    return ""
