"""Configuration of pytest that lets tests import the helper modules in the folder tests/distributed by name."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def functions_cross_as_they_are(request):
    """Pickle functions of a test file by value.

    A function that is pickled by reference would make the worker import the test file and pytest.
    """
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
