"""A reward function that, on request, harms its process in the ways that real reward functions do."""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time


def sleep_for_ever():
    while True:
        time.sleep(3600)


def loop_inside_c():
    return sum(range(10**13))  # this sum blocks all other threads of the process


def big_power():
    return 7**10**9 % 10


def segfault():
    return ctypes.string_at(0)


def leave():
    os._exit(3)


def kill_its_group():
    os.killpg(0, signal.SIGKILL)


def raise_ctrl_c():
    raise KeyboardInterrupt


def write_everywhere(text=b"\xff" * 64):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, text)
    return 1.0


def write_half_a_message():
    write_everywhere(b"\0\1\0\0half")
    sleep_for_ever()


def fork_and_leave():
    fork_sleepers(20)
    os._exit(3)


def fork_and_hang():
    fork_sleepers(20)
    sleep_for_ever()


def fork_sleepers(count=200):
    for number in range(count):
        if os.fork() == 0:
            if number % 2:  # every second child starts a new session and is orphaned
                os.setsid()
                if os.fork():
                    os._exit(0)
            time.sleep(3600)
            os._exit(0)
    return 1.0


def forget_to_exit():
    return float(os.fork() == 0)


def start_a_program():
    subprocess.Popen(["sleep", "3600"])
    return 1.0


def allocate():
    return len(bytearray(8 << 30))


def flood():
    block = "x" * (1 << 20)
    for _ in range(50):
        print(block)  # noqa: T201
        os.write(1, block.encode())
        sys.stderr.write(block[:1000])
    return 1.0


def complain():
    raise ValueError("not today")


def text():
    return "1.0"


def nan():
    return math.nan


# Maps the name of a misbehaviour to (function, whether the sample must fail, text of the error).
DEEDS = {
    "sleep": (sleep_for_ever, True, "did not return within"),
    "sum": (loop_inside_c, True, "did not return within"),
    "power": (big_power, True, "did not return within"),
    "segfault": (segfault, True, "ended its process (SIGSEGV)"),
    "exit": (leave, True, "ended its process (exit status 3)"),
    "group": (kill_its_group, True, "ended its process (SIGKILL"),
    "ctrl-c": (raise_ctrl_c, True, "raised KeyboardInterrupt"),
    "garbage": (write_everywhere, True, "wrote into the socket that carries the results of its process"),
    "half a message": (write_half_a_message, True, "did not return within"),
    "fork and exit": (fork_and_leave, True, "ended its process (exit status 3)"),
    "fork and hang": (fork_and_hang, True, "did not return within"),
    "forks": (fork_sleepers, False, ""),
    "both halves": (forget_to_exit, False, ""),
    "program": (start_a_program, False, ""),
    "memory": (allocate, True, "raised MemoryError"),
    "output": (flood, False, ""),
    "raise": (complain, True, "raised ValueError: not today"),
    "type": (text, True, "returned '1.0' of type str"),
    "nan": (nan, True, "returned nan"),
}


def score(response, deed=None):
    """Return the response's length, after carrying out the misbehaviour `deed` if there is one.

    If the misbehaviour must make the sample fail, return the misbehaving function's result instead.
    """
    if deed:
        result = DEEDS[deed][0]()
        if DEEDS[deed][1]:
            return result
    return float(len(response))


def one_in_twenty(prompt, response):
    """Return 1 if the response contains a 7, else 0.

    For one in twenty pairs of prompt and response, the function misbehaves instead.
    """
    value = hash_of(prompt, response)
    if value % 20:
        return float("7" in response)
    return score(response, list(DEEDS)[value // 20 % len(DEEDS)])


def hash_of(*texts):
    """Return a hash of texts that is equal in all processes, unlike Python's `hash`."""
    value = 0
    for character in "\0".join(texts):
        value = (value * 1000003 + ord(character)) % 2147483647
    return value


async def tail(responses, prompts):
    """Score each response of a batch with 1 if its last character is a digit, else with 0.

    Responses of odd length get the score None.
    """
    return [float(r[-1:].isdigit()) if len(r) % 2 == 0 else None for r in responses]
