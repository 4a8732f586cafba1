"""A run exposes no port to the network, and no file to other users beyond what the umask allows."""

import ipaddress
import stat
import sys

import pytest
from runs import SMALL, finish, start
from sockets import address_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
SHORT = [*SMALL, "rollout=hf", "trainer.total_steps=2", "data.val=null"]


def test_the_addresses_of_proc_are_read_right():
    loopback, everywhere = "0100007F", "00000000"
    if sys.byteorder == "little":
        assert address_of(loopback).is_loopback
        assert address_of("0000000000000000FFFF00000100007F").is_loopback
        assert address_of("00000000000000000000000001000000").is_loopback
    assert address_of(everywhere).is_unspecified
    assert address_of("0" * 32).is_unspecified


def test_a_local_run_listens_on_the_loopback_address_alone(vllm_run):
    """A run's listening sockets belong to Ray's daemons and workers, torch's store, gloo and the engine."""
    run, found = vllm_run
    assert run.status == 0, run.stderr
    assert len(found) >= 8  # The search must have found the run's sockets.
    assert {f"{address}: {name}" for address, name in found if not ipaddress.ip_address(address).is_loopback} == set()


def test_outputs_have_the_modes_that_the_users_umask_gives(tmp_path):
    """With umask 027, the expected file modes differ from the modes of temporary files and from common fixed modes."""
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
