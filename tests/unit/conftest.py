"""Make the test fakes in this folder importable by name from all unit tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
