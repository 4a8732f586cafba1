"""Find the addresses at which the processes of a run listen, from /proc."""

import ipaddress
import os
import sys
from pathlib import Path

from runs import marked

LISTEN = "0A"


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address of /proc/net/tcp, written as words of four bytes in the machine's byte order."""
    words = bytes.fromhex(text)
    ordered = b"".join(
        words[i : i + 4][::-1] if sys.byteorder == "little" else words[i : i + 4] for i in range(0, len(words), 4)
    )
    found = ipaddress.ip_address(ordered)
    return getattr(found, "ipv4_mapped", None) or found


def listening() -> dict[str, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of all TCP sockets that listen on the test machine, keyed by the socket's inode."""
    found = {}
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:] if Path(file).exists() else []:
            words = line.split()
            if words[3] == LISTEN:
                found[words[9]] = address_of(words[1].partition(":")[0])
    return found


def sockets_of(pid: int) -> set[str]:
    """Return the inodes of a process's open sockets; the set is empty if the process has ended."""
    try:
        links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def name_of(pid: int) -> str:
    """Return the beginning of a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    except OSError:
        return "?"


def look(output: Path, found: dict[str, tuple[str, str]]) -> None:
    """Add the address and the process of each listening socket of a run to `found`, keyed by the socket's inode."""
    addresses = listening()
    for pid in marked(output):
        for inode in sockets_of(pid) & addresses.keys():
            found[inode] = str(addresses[inode]), name_of(pid)
