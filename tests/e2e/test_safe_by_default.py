"""What others on the machine or the network get of a run: no port, and no file that the umask keeps from them."""

import ipaddress
import os
import stat
import sys
import time
from pathlib import Path

import pytest
from runs import SMALL, finish, marked, start

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
LISTEN = "0A"
SHORT = [*SMALL, "rollout=hf", "trainer.total_steps=2", "data.val=null"]


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Of a line of /proc/net/tcp: words of four bytes, each in the machine's order."""
    words = bytes.fromhex(text)
    ordered = b"".join(
        words[i : i + 4][::-1] if sys.byteorder == "little" else words[i : i + 4] for i in range(0, len(words), 4)
    )
    found = ipaddress.ip_address(ordered)
    return getattr(found, "ipv4_mapped", None) or found


def listening() -> dict[str, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Inodes of all listening TCP sockets of this machine, and their addresses."""
    found = {}
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:] if Path(file).exists() else []:
            words = line.split()
            if words[3] == LISTEN:
                found[words[9]] = address_of(words[1].partition(":")[0])
    return found


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open; none if it is gone."""
    try:
        links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    except OSError:
        return "?"


def test_the_addresses_of_proc_are_read_right():
    loopback, everywhere = "0100007F", "00000000"
    if sys.byteorder == "little":
        assert address_of(loopback).is_loopback
        assert address_of("0000000000000000FFFF00000100007F").is_loopback
        assert address_of("00000000000000000000000001000000").is_loopback
    assert address_of(everywhere).is_unspecified
    assert address_of("0" * 32).is_unspecified


def test_a_local_run_listens_on_the_loopback_address_alone(tmp_path):
    """Ray's daemons and workers, the store where the ranks meet, gloo's pairs, the engine's own sockets."""
    output = tmp_path / "run"
    process = start(output, *SHORT, "rollout=vllm", "placement.actor_ranks=2", "placement.reward_workers=1")
    found: dict[tuple[str, str], str] = {}
    while process.poll() is None:
        addresses = listening()
        for pid in marked(output):
            for inode in sockets_of(pid) & addresses.keys():
                found[str(addresses[inode]), inode] = name_of(pid)
        time.sleep(0.2)
    run = finish(process, output)
    assert run.status == 0, run.stderr
    assert len(found) >= 8  # daemons, store, two gloo ranks, workers: the look was at the right processes
    elsewhere = {
        f"{address}: {name}" for (address, _), name in found.items() if not ipaddress.ip_address(address).is_loopback
    }
    assert not elsewhere


def test_outputs_have_the_modes_that_the_users_umask_gives(tmp_path):
    """Neither those of temporary files nor fixed ones: with 027 both are others."""
    output = tmp_path / "run"
    run = finish(start(output, *SHORT, "placement=inprocess", "trainer.save_every=1", umask=0o027), output)
    assert run.status == 0, run.stderr
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (output, *output.rglob("*"))}
    assert len(modes) > 10
    wrong = {
        str(path.relative_to(tmp_path)): oct(mode)
        for path, mode in modes.items()
        if mode != (0o750 if path.is_dir() else 0o640)
    }
    assert not wrong
