"""Let tests import the module `hosts` by name, and skip the cluster tests if this machine cannot create hosts."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from hosts import namespaces_work


def pytest_collection_modifyitems(items):
    reason = namespaces_work()
    if not reason:
        return
    if os.environ.get("RLTRAIN_CLUSTER_TEST") == "required":
        raise pytest.UsageError(f"the cluster tests need network namespaces: {reason}")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs network namespaces: {reason}"))
