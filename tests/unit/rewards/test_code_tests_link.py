"""Tests that forged messages from a hostile program only end the process that runs the tests, without other effects."""

import pickle

import pytest

from rltrain.rewards.code_tests import code_tests


def score(program: str, tests: str) -> float:
    return code_tests("p", f"```python\n{program}\n```", tests=tests, timeout_s=30.0)


# Maps the name of each case to a forged message that the program sends in place of the answer 3. No forged message may
# make the test pass or change an object.
SENT = {
    "something for nothing": ("answer", 3),
    "an error without text": ("raised", "ValueError", None),
    "a description of nothing": ("answer", ("P", ("no", 1)), ()),
    "a type that is none of plain data": ("answer", ("P", ("type", "subprocess.Popen")), ()),
    "a builtin that is no type of plain data": ("answer", ("P", ("type", "builtins.eval")), ()),
    "an object that was never sent": ("answer", ("P", ("mine", 10**6)), ()),
    "a value that its constructor would have to ask for": (
        "answer", ("P", ("value", "fractions.Fraction", (("P", ("far", 0)), 1))), (),
    ),
    "a value that is none": ("answer", ("P", ("value", "builtins.eval", ("1",))), ()),
}  # fmt: skip
BY_HAND = """
import os, pickle
class P(tuple): pass
class Out(pickle.Pickler):
    def persistent_id(self, thing): return thing[0] if type(thing) is P else None
def described(thing):
    if type(thing) is tuple and thing[:1] == ("P",): return P((tuple(described(part) for part in thing[1]),))
    return type(thing)(map(described, thing)) if type(thing) in (tuple, list) else thing
def add(a, b):
    import io
    file = io.BytesIO()
    Out(file, 5).dump(described(SENT))
    os.write(101, len(file.getvalue()).to_bytes(8, "little") + file.getvalue())
"""


@pytest.mark.parametrize("name", SENT)
def test_a_message_that_is_none_ends_the_tests(name):
    tests = "try:\n    add(1, 2)\n    assert True\nexcept Exception:\n    pass\nassert 1 == 1"
    assert score("def add(a, b): return 3", tests) == 1.0
    assert score(BY_HAND.replace("SENT", repr(SENT[name])), tests) == 0.0


@pytest.mark.parametrize("data", [
    pickle.dumps(("answer", eval, ())),
    pickle.dumps(("answer", range(3), ())),
    b"\x80\x05cbuiltins\nexit\n(tR.",
    b"\x80\x05}\x94(X\x01\x00\x00\x00aK\x01ub.",
    b"\x80\x05\x82\x01.",
    b"\x97.",
    b"garbage",
    b"",
])  # fmt: skip
def test_a_pickle_can_name_nothing(data):
    program = f"import os\ndef add(a, b): os.write(101, ({len(data)}).to_bytes(8, 'little') + {data!r})"
    tests = "try:\n    add(1, 2)\n    assert True\nexcept Exception:\n    pass\nassert 1 == 1"
    assert score(program, tests) == 0.0
