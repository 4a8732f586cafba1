"""Make the fakes in this folder importable by name, because several tests share them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
