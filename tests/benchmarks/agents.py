"""Measures the CPU time that an environment worker spends on a request of an agent program.

A hundred conversations of eight requests each run at the same time, over HTTP, from another process. The engine's
answers are scripted, so the measured time contains the server, the check that a request continues its conversation, and
the record of the trajectory. Each request contains the whole conversation so far.

    python -m tests.benchmarks.agents
"""

import asyncio
import contextlib
import sys
import time

from tests.benchmarks.row import Row
from tests.scripted_turns import REQUEST, Script, limits, say
from workers.environments.agent_endpoint import AgentEndpoint
from workers.environments.agent_session import AgentSession

CONVERSATIONS, TURNS, MOST_MS = 100, 8, 5.0
WORDS = "word " * 50
CLIENT = f"""
import asyncio, sys
import httpx

async def converse(http, url, key):
    messages = [{{"role": "user", "content": "{WORDS}"}}]
    for turn in range({TURNS}):
        body = {{"model": "policy", "messages": messages}}
        response = await http.post(url + "/chat/completions", json=body, headers={{"Authorization": "Bearer " + key}})
        answer = response.raise_for_status().json()["choices"][0]["message"]["content"]
        messages += [{{"role": "assistant", "content": answer}}, {{"role": "user", "content": "{WORDS}"}}]

async def main(url, keys):
    async with httpx.AsyncClient(timeout=300) as http:
        await asyncio.gather(*[converse(http, url, key) for key in keys])

asyncio.run(main(sys.argv[1], sys.argv[2:]))
"""


async def measure() -> float:
    """Return the seconds of CPU time for one request."""
    endpoint = AgentEndpoint()
    url = await endpoint.base_url()
    with contextlib.ExitStack() as opened:
        keys = []
        for _ in range(CONVERSATIONS):
            engine = Script(*[say(WORDS) for _ in range(TURNS)])
            session = AgentSession(REQUEST, engine, limits(max_response_tokens=1 << 20))
            opened.enter_context(endpoint.open(session))
            keys.append(session.key)
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, url, *keys)
        start = time.process_time()
        status = await client.wait()
        spent = time.process_time() - start
    await endpoint.close()
    if status:
        raise RuntimeError(f"the client ended with exit status {status}")
    return spent / CONVERSATIONS / TURNS


def run() -> list[Row]:
    """Return one row of results, which compares the measured CPU time with the limit."""
    seconds = min(asyncio.run(measure()) for _ in range(3))
    return [
        Row(
            "CPU time of an environment worker for one request of an agent program",
            seconds * 1000 / MOST_MS,
            "of the limit",
            "<= 1",
            f"{seconds * 1000:.2f} ms",
            f"limit {MOST_MS:g} ms",
            f"{CONVERSATIONS} conversations of {TURNS} requests at once, over HTTP; lowest CPU time of 3 runs",
            "python -m tests.benchmarks.agents",
        )
    ]


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
