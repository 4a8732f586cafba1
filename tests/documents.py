"""The commands that the project's documents show."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def bash_lines(document: str) -> list[str]:
    """Return the commands in a document's bash blocks.

    Lines that end with a backslash are joined with the next line.
    """
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / document).read_text(), re.S | re.M)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
