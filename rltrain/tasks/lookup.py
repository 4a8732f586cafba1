"""Task: follow one to three pointers through a hidden table of ten digits, with a tool that shows one entry per call.

For example, in a table with the entries 3 -> 7 and 7 -> 1, the calls lookup(3) and lookup(7) lead to the answer `1` to
the question `Start at 3, hops: 2`. No key is looked up twice, so before the last call each of the ten digits is equally
likely to be the answer.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from rltrain.environments.lookup import ENTRIES, Lookup
from rltrain.tasks.base import split_of
from rltrain.tasks.conversation import ConversationTask, Message, Row

DIGITS = "0123456789"
MAX_HOPS = 3
# The probabilities below define the flawed conversations that the starting model imitates. Most imitated conversations
# stop one tool call too early and give the last call's result as the answer, so reinforcement learning has to discover
# that one more tool call earns more reward.
RIGHT_COUNT = 0.25  # Probability that a conversation has the right number of tool calls: one call per hop.
# Probability that an imitated conversation has one tool call too few. With the probability 1 - RIGHT_COUNT - TOO_FEW,
# the number of tool calls of an imitated conversation is random.
TOO_FEW = 0.65
# Probability that a tool call looks up the result of the previous call instead of a random digit. With the probability
# `RIGHT_KEY`, the first tool call looks up the question's start digit instead of a random digit.
RIGHT_KEY = 0.8
RIGHT_ANSWER = 0.7  # Probability that the answer is the last tool call's result instead of a random digit.
CALL = ('<tool_call>\n{"name": "lookup", "arguments": {"key": ', "}}\n</tool_call>")
QUESTION = ("Start at ", ", hops: ")


def path(table: str, start: int, hops: int) -> list[int]:
    """Return the `hops` + 1 digits on the path through the table, from `start` to the digit after the last hop."""
    keys = [start]
    for _ in range(hops):
        keys.append(int(table[keys[-1]]))
    return keys


def draw(split: str, rng: Random) -> Row:
    """Draw a data row of the given split, such that the lookups on the path to the answer use different keys.

    A row belongs to the split "train" or "val" depending on a hash of its table, its start and its number of hops.
    """
    while True:
        table = "".join(rng.choices(DIGITS, k=ENTRIES))
        start, hops = rng.randrange(ENTRIES), rng.randint(1, MAX_HOPS)
        *keys, answer = path(table, start, hops)
        if len(set(keys)) == hops and split_of(f"{table}/{start}/{hops}") == split:
            question = f"{QUESTION[0]}{start}{QUESTION[1]}{hops}"
            return {"question": question, "table": table, "start": start, "hops": hops, "answer": str(answer)}


def mess(row: Mapping[str, Any], rng: Random) -> list[Message]:
    """Return a flawed conversation, often with wrong keys, a wrong number of calls or a wrong answer."""
    environment = Lookup()
    environment.reset(row["table"])
    messages: list[Message] = [{"role": "user", "content": row["question"]}]
    (kind,) = rng.choices(("right", "few", "random"), (RIGHT_COUNT, TOO_FEW, 1 - RIGHT_COUNT - TOO_FEW))
    count = {"right": row["hops"], "few": row["hops"] - 1, "random": rng.randint(0, MAX_HOPS)}[kind]
    last = str(row["start"])
    for _ in range(count):
        key = int(last) if rng.random() < RIGHT_KEY else rng.randrange(ENTRIES)
        last = environment.lookup(key)
        call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": key}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "lookup", "content": last})
    answer = last if rng.random() < RIGHT_ANSWER else rng.choice(DIGITS)
    return [*messages, {"role": "assistant", "content": answer}]


LOOKUP = ConversationTask(
    name="lookup",
    environment="rltrain.environments.lookup:Lookup",
    reward="rltrain.rewards.final_answer:exact_answer",
    draw=draw,
    mess=mess,
    max_turns=6,
    max_prompt_length=16,
    max_response_length=96,
    tools=(Lookup().lookup,),
    phrases=(*CALL, *QUESTION),
)
