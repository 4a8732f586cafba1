"""What several tests share is imported by name."""

import logging
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def settings_restored():
    """`main` quietens the process that it runs in."""
    names = ("torch", "transformers", "vllm", "ray", "httpx")
    environment, levels = dict(os.environ), {name: logging.getLogger(name).level for name in names}
    yield
    os.environ.clear()
    os.environ.update(environment)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
