"""Make the test fakes in this folder importable by name from all unit tests, and define shared fixtures."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def interrupts():
    """Restore the default handler of SIGINT, because a shell may start pytest with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
