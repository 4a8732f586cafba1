"""Tests of programs that are scored by unit tests: right programs, wrong programs, and programs that cheat."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rltrain.rewards import sandbox
from rltrain.rewards.code_tests import code_tests, extract_program
from rltrain.rewards.loading import bind, check_columns, load_function
from rltrain.rewards.sandbox import SandboxError
from rltrain.settings.compose import compose
from workers.reward.messages import RewardRequest
from workers.reward.transport import settings
from workers.reward.worker import RewardWorker

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden/code_tests.jsonl").read_text().splitlines()]
WHY_NOT = sandbox.why_not_strong()
needs_strong = pytest.mark.skipif(bool(WHY_NOT), reason=f"the strong form of the sandbox does not work: {WHY_NOT}")
BOTH = [pytest.param("required", marks=needs_strong), "limits"]
TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0\nassert add(-1, -1) == -2\nassert add(2, 2) == 4"
MORE = """
assert abs(add(1, 2) - 3) < 1e-6
assert 3 in [add(1, 2)] and add(1, 2) < 4 and add(1, 2) % 2
assert 3 in add([1], [2, 3])
assert sorted([add(3, 1)]) == sorted([4]) and set([add(1, 2)]) == {3} and len(str(add(1, 2))) == len("3")
assert math.isclose(add(1, 2), 3)
def test_sum():
    import unittest
    unittest.TestCase().assertEqual(add(1, 2), 3)
    assert all(add(i, 1) == i + 1 for i in range(10))
test_sum()
"""
LONG_S = 30.0  # No program in this file reaches this time limit in seconds.


def score(program: str, tests: object = TESTS, **knobs) -> float:
    return code_tests("p", f"```python\n{program}\n```", tests=tests, **{"timeout_s": LONG_S, **knobs})


@pytest.mark.parametrize("case", GOLDEN, ids=[case["why"] for case in GOLDEN])
def test_the_golden_set_scores_as_written(case):
    assert code_tests("p", case["response"], **{"timeout_s": LONG_S, **case["arguments"]}) == case["score"]


def test_G1_the_golden_set_scores_the_same_through_the_loader_in_another_thread():
    function = load_function("rltrain.rewards.code_tests:code_tests")
    check_columns(function, "code", ["tests"])
    elsewhere: list = []

    def scores() -> None:
        for case in GOLDEN[:6]:
            columns = {"timeout_s": LONG_S, **case["arguments"], "finish_reason": "stop"}
            elsewhere.append(bind(function)("p", case["response"], columns))

    thread = threading.Thread(target=scores)
    thread.start()
    thread.join()
    assert elsewhere == [case["score"] for case in GOLDEN[:6]]
    assert any(elsewhere)


# Each program in `CHEATS` tries to pass the tests without defining a right function. Each program in `CHEATS` would
# pass if it shared an interpreter or an output with the tests.

SPRAY = "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'1' * 64)\n    except OSError: pass\n"
CHEATS = {
    "exits": "import sys; sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "exits when called": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit when called": "def add(a, b): raise SystemExit(0)",
    "prints verdicts": "print('1111')\nimport sys; sys.stderr.write('1111')\ndef add(a, b): print('1')",
    "writes verdicts to every descriptor": SPRAY + "def add(a, b): return None",
    "writes verdicts to every descriptor when called": "def add(a, b):\n"
    + "".join(f"    {x}\n" for x in SPRAY.splitlines()),
    "an object equal to everything": "class E:\n    def __eq__(s, o): return True\n    __ne__ = lambda s, o: False\n"
    "def add(a, b): return E()",
    "a number equal to everything": "class E(int):\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\n"
    "def add(a, b): return E(77)",
    "no AssertionError": "import builtins\nclass No(BaseException):\n    def __new__(c, *a): return None\n"
    "builtins.AssertionError = No\nAssertionError = No\ndef add(a, b): return 77",
    "as with -O": "import sys, builtins\nreal = builtins.compile\n"
    "builtins.compile = lambda *a, **k: real(*a, **{**k, 'optimize': 2})\nbuiltins.__debug__ if 0 else None\n"
    "def add(a, b): return 77",
    "no exec": "import builtins\nbuiltins.exec = lambda *a: None\nexec = builtins.exec\ndef add(a, b): return 77",
    "a unittest that always passes": "import unittest\n"
    "for n in dir(unittest.TestCase):\n    n.startswith('assert') and setattr(unittest.TestCase, n, lambda *a: None)\n"
    "def add(a, b): return 77",
    "atexit": "import atexit, os\natexit.register(lambda: (print('1111'), os._exit(0)))\ndef add(a, b): return 77",
    "an exception hook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\nraise ValueError",
    "a tracer": "import sys\nsys.settrace(lambda f, e, a: None)\nsys.setprofile(lambda *a: None)\n"
    "def add(a, b): return 77",
    "a thread": "import threading, os, time\n"
    "threading.Thread(target=lambda: (time.sleep(.05), os._exit(0)), daemon=True).start()\ndef add(a, b): return 77",
    "a child": "import os\nos.fork()\ndef add(a, b): return 77",
    "looks for the tests": """
import gc, os, sys
def found():
    texts = [str(sys.argv), open("/proc/self/cmdline").read(), str(dict(os.environ))]
    frame = sys._getframe()
    while frame:
        texts += [str(frame.f_locals), str(frame.f_code.co_consts)]
        frame = frame.f_back
    texts += [o for o in gc.get_objects() if isinstance(o, str)]
    texts += [open(f).read() for f in [sys.argv[0]] if os.path.exists(f)]
    return any("assert add(" + "1, 2)" in text for text in texts)
def add(a, b):
    return a + b if found() else 77
""",
    "the link's own words": "import sys, pickle\nframe = sys._getframe()\nwhile frame:\n"
    "    link = frame.f_locals.get('link')\n    link and link.send(({'add': 3}, {}))\n    frame = frame.f_back\n"
    "def add(a, b): return 77",
    "kills whoever it can": "import os\ndef add(a, b):\n    for pid in range(2, 12):\n"
    "        try: pid != os.getpid() and os.kill(pid, 9)\n        except OSError: pass\n    return 77",
    "a distance of 0 to everything": "class Z:\n    def __sub__(s, o): return 0.0\n    __lt__ = __and__ = __mod__ = "
    "lambda s, o: True\ndef add(a, b): return Z()",
    "a container of everything": "class Z:\n    def __contains__(s, o): return True\ndef add(a, b): return Z()",
    "serves builtins of its own": """
import __main__ as m
link = m.Link(100, 101)
def yes(*a, **k): return True
def add(*a, **k): return 77
names = "abs len sorted set all any isinstance tuple list round sum max min str type range map zip __import__"
offered = {"__builtins__": dict.fromkeys(names.split(), yes), **dict.fromkeys(names.split(), yes)}
link.send(({"add": add, **offered}, {}))
while True:
    _, what, args, named = link.receive()
    link.serve(what, args, named)
""",
    "a math of its own": "class math: isclose = lambda *a, **k: True\ndef add(a, b): return 77",
    "a unittest of its own": "class unittest: TestCase = object\ndef add(a, b): return 77",
    "builtins of its own": "def abs(x): return 0\ndef all(x): return True\ndef add(a, b): return 77",
    "a pickle with code in it": "class P:\n    def __reduce__(s):\n"
    "        return (exec, ('import os; os.write(1, b\"1111\")',))\n"
    "import copyreg\ndef add(a, b): return P()",
}


# In the weak form of the sandbox, a program can kill processes outside the sandbox.
STRONG_ONLY = ("kills whoever it can",)


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("level", BOTH)
def test_a_cheat_passes_nothing(level, name):
    if level == "limits" and name in STRONG_ONLY:
        pytest.skip("only the strong form of the sandbox protects other processes")
    assert score(CHEATS[name], TESTS + MORE, sandbox=level, timeout_s=10.0) == 0.0


def test_a_right_program_passes_what_no_cheat_does():
    assert score("import math\ndef add(a, b): return a + b", TESTS + MORE) == 1.0


def test_verdicts_cannot_be_written_where_we_have_many_files_open():
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        spray = SPRAY.replace("256", "1400")
        assert score(spray + "def add(a, b): return 77", sandbox="limits", timeout_s=10.0) == 0.0
    finally:
        for descriptor in many:
            os.close(descriptor)


def test_the_program_may_not_replace_a_method_of_the_tests():
    tests = "class T:\n    def right(self, x): return x == 3\nt = T()\nadd(t, 1)\nassert t.right(77)"
    assert score("def add(t, b):\n    t.right = lambda x: True", tests) == 0.0


def test_a_hostile_pickle_is_refused_by_the_tests_process():
    program = """
import pickle, sys
class P:
    def __reduce__(self): return (exec, ("import os; [os.write(fd, b'1111') for fd in range(3, 9)]",))
def add(a, b):
    frame = sys._getframe()
    while "link" not in frame.f_locals and "self" not in frame.f_locals: frame = frame.f_back
    import os
    data = pickle.dumps(("answer", P(), ()))
    os.write(101, len(data).to_bytes(8, "little") + data)
"""
    assert score(program) == 0.0


def test_the_program_may_not_look_into_the_tests():
    program = """
def add(a, b):
    test = a
    for name in ("__globals__", "__class__"):
        try:
            if test._link.ask("get", test, name) is not None: return "in"
        except AttributeError: pass
    try:
        return test._link.ask("module", "tests")
    except PermissionError as error:
        return str(error)
"""
    assert score(program, "assert add(lambda: 0, 1) == \"a program may not send the request 'module'\"") == 1.0


# Tests of right programs, and of the Python features that unit tests may use

RICH = """
from collections import Counter, namedtuple, defaultdict
from fractions import Fraction
import math
LIMIT = 3
P = namedtuple("P", "x y")
class Node:
    def __init__(self, value): self.value, self.next = value, None
    def __eq__(self, other): return self.value == other.value
    def __add__(self, other): return Node(self.value + other.value)
    def __str__(self): return f"<{self.value}>"
def sort(row): row.sort()
def grow(table): table["new"] = {1}
def apply(function, *args, **named): return function(*args, **named)
def numbers(n): yield from range(n)
def count(text): return Counter(text)
def groups(): d = defaultdict(list); d["a"].append(1); return d
def half(x): return Fraction(x, 2)
def point(): return P(1, 2)
def bad(kind): raise kind("no")
def total(node): return node.value + (total(node.next) if node.next else 0)
def echo(x): return x
"""
POSSIBLE = [
    "row = [3, 1]; keep = row; sort(row)\nassert keep == [1, 3]",
    "table = {}; grow(table)\nassert table == {'new': {1}}",
    "node = Node(1); node.next = Node(2)\nassert total(node) == 3 and node.next.value == 2",
    "assert Node(1) == Node(1) and Node(1) != Node(2) and Node(1) != 1",
    "assert (Node(1) + Node(2)).value == 3 and str(Node(5)) == '<5>'",
    "assert apply(lambda x, y: x * y, 3, y=4) == 12 and apply(max, [1, 5]) == 5",
    "class Own:\n    def __init__(self): self.value, self.next = 7, None\nassert total(Own()) == 7",
    "assert list(numbers(3)) == [0, 1, 2] and apply(list, (i for i in 'ab')) == ['a', 'b']",
    "assert count('aab') == {'a': 2, 'b': 1} and groups() == {'a': [1]}",
    "assert half(1) == 0.5 and point() == (1, 2) and LIMIT == 3 and math.isclose(math.pi, 3.14159, rel_tol=1e-3)",
    "try:\n    bad(ValueError)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
    "x = object(); assert echo(x) is x",
    "row = []; row.append(row); got = echo(row)\nassert got[0] is got",
    "import collections, datetime, decimal\nfor x in [range(1, 9, 2), slice(1, None), 2j, int, ValueError, "
    "datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc), datetime.timedelta(1, 2, 3), datetime.time(4), "
    "datetime.date(2020, 1, 2), collections.deque([1], 3), collections.OrderedDict(b=1, a=(2,)), "
    "decimal.Decimal('1.50'), collections.Counter('aab'), bytearray(b'x'), frozenset({(1,)}), None, '\\ud800', "
    "10**5000, {1: [{2}]}]:\n    got = echo([x])[0]\n    assert (type(got), got) == (type(x), x)",
    "n = float('nan'); assert echo(n) != echo(n) and echo(1e400) == float('inf') and echo(2 + 1j) == 2 + 1j",
    "assert echo(b'x') == b'x' and echo({1, (2, 3)}) == {1, (2, 3)} and type(echo(True)) is bool",
    "def check(candidate):\n    for n in range(20):\n        assert candidate(n) == n\ncheck(echo)",
    "def test_one():\n    assert echo(1) == 1",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(echo(1), 1)\n"
    "result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\n"
    "assert result.wasSuccessful() and result.testsRun == 1",
]


@pytest.mark.parametrize("tests", POSSIBLE)
def test_tests_can_use_what_the_program_offers(tests):
    assert score(RICH, tests) == 1.0


def test_a_statement_that_only_prepares_and_fails_ends_the_tests():
    assert score("def f(): return 1", "assert f() == 1\ng()\nassert f() == 1") == 0.5


def test_tests_that_were_reached_in_time_count():
    program = "def f(n):\n    while n: pass\n    return 0"
    assert score(program, "assert f(0) == 0\nassert f(1) == 0\nassert f(0) == 0", timeout_s=2.0) == 1 / 3


def test_all_pairs_of_a_program_share_its_seconds():
    pairs = [{"input": str(n), "output": "1"} for n in range(8)]
    program = "import time\nif input() != '0': time.sleep(600)\nprint(1)"
    begin = time.monotonic()
    assert score(program, pairs, timeout_s=1.0) == 1 / 8
    # All tests together get one second; with one second for each test, this call would take longer than 7 s.
    assert time.monotonic() - begin < 7.0


def test_a_slow_program_is_0_and_never_failed_whatever_timeout_s_and_reward_timeout_s_are():
    pairs = [{"input": "", "output": "1"}] * 3
    for tests in (pairs, "assert f()"):
        reward = reward_config("code_tests", timeout_s=2.0, kwargs={"timeout_s": 5.0, "tests": tests})
        worker = RewardWorker(reward.functions, settings=settings(reward))
        begin = time.monotonic()
        (result,) = worker.score([RewardRequest((0, 0), "p", "while True: pass", {})])
        assert (result.scores, result.failed) == ((0.0,), False)
        assert time.monotonic() - begin < 5.0


def test_where_starting_takes_all_the_time_it_is_an_error_and_no_0(monkeypatch):
    import rltrain.rewards.code_tests as module

    def slow(*args, **named):
        time.sleep(0.2)
        return sandbox.SandboxResult("ok", "1", "", 0, 0.01)

    monkeypatch.setattr(module, "run", slow)
    with pytest.raises(SandboxError, match="of 9 test pairs were run in time"):
        code_tests("p", "print(1)", tests=[{"input": "", "output": "1"}] * 9, reward_timeout_s=0.8)


def reward_config(path: str, *, timeout_s: float, kwargs: dict):
    config = compose([])[0].reward
    function = replace(config.functions[0], name="code", path=path, kwargs=kwargs)
    return replace(config, functions=[function], timeout_s=timeout_s)


def test_all_or_nothing_knows_no_halves():
    tests = "assert f() == 1\nassert f() == 2"
    assert score("def f(): return 1", tests) == 0.5
    assert score("def f(): return 1", tests, all_or_nothing=True) == 0.0
    assert score("def f(): return 1", "assert f() == 1", all_or_nothing=True) == 1.0
    pairs = [{"input": "", "output": "1"}, {"input": "", "output": "2"}]
    assert (score("print(1)", pairs), score("print(1)", pairs, all_or_nothing=True)) == (0.5, 0.0)


def test_memory_and_level_reach_the_sandbox():
    pairs = [{"input": "", "output": "1"}]
    assert score("x = bytearray(90 << 20); print(1)", pairs, memory_mb=64) == 0.0
    assert score("x = bytearray(90 << 20); print(1)", pairs, memory_mb=256) == 1.0
    with pytest.raises(ValueError, match="level is 'no'"):
        score("print(1)", pairs, sandbox="no")


def test_without_a_sandbox_there_is_no_score(monkeypatch):
    monkeypatch.setattr(sandbox, "_why_not", ["bwrap is not installed; install bubblewrap"])
    with pytest.raises(SandboxError):
        score("def add(a, b): return a + b", sandbox="required")


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("assert (", "the tests must be Python text"),
        ("x = 1", "contains neither an assert nor a call"),
        ([], "the list is empty"),
        ([{"input": "1"}], "is not a test pair; give {'input': text, 'output': text}"),
    ],
)
def test_bad_tests_are_an_error_and_never_a_0(tests, said):
    with pytest.raises(ValueError) as caught:
        score("print(1)", tests)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\na\n```\ntext\n```py\nb\n```\n```\nc\n```", "\nb\n"),
        ("```\na\n```\n```bash\nb\n```", "\na\n"),
        ("so:\n  ```Python3\na", "\na"),
    ],
)
def test_the_last_python_block_is_the_program(response, program):
    assert extract_program(response) == program


def test_importing_it_imports_neither_torch_nor_ray():
    script = "import sys, rltrain.rewards.code_tests; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
