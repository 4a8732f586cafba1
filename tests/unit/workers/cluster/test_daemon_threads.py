"""Tests of calls in threads that do not keep the process alive."""

import subprocess
import sys
import textwrap

PROGRAM = """
import asyncio, time
from workers.cluster.daemon_threads import in_daemon_thread

async def main():
    try:
        async with asyncio.timeout(0.1):
            await in_daemon_thread(lambda: time.sleep(1000))
    except TimeoutError:
        print("late", await in_daemon_thread(lambda: 7))

asyncio.run(main())
"""


def test_a_function_that_never_returns_keeps_neither_its_caller_nor_the_process():
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("late 7\n", "", 0)
