"""Tests of the memory limit of a process, each in a separate process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
THREADS = """
import resource, threading
from rltrain.base.process_limits import limit_memory, start_thread, thread_ends

limit_memory(300, beside_stacks=BESIDE)
limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
end = threading.Event()
threads = [threading.Thread(target=lambda: (end.wait(), thread_ends())) for _ in range(200)]
try:
    for thread in threads:
        start_thread(thread)
    print("started")
except RuntimeError as error:
    print(error)
try:
    bytes(500 << 20)
    print("allocated")
except MemoryError:
    print("MemoryError")
end.set()
for thread in threads:
    if thread.ident:
        thread.join()
print(resource.getrlimit(resource.RLIMIT_DATA)[0] == limit)
"""


@pytest.mark.parametrize(("beside", "started"), [(True, "started"), (False, "can't start new thread")])
def test_the_stacks_of_threads_are_allocated_beside_the_memory_limit(beside, started):
    done = subprocess.run(
        [sys.executable, "-c", THREADS.replace("BESIDE", str(beside))], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [started, "MemoryError", "True"]


def test_without_a_limit_a_thread_starts_as_usual():
    code = "import resource, threading\nfrom rltrain.base.process_limits import start_thread\n"
    code += "start_thread(threading.Thread(target=print, args=('ran',)))\n"
    code += "assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
