"""In any locale, home folder and working directory, a valid command line runs or ends with a one-line error."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from environment_server import Case
from harness import COUNT, Outcome, cases, check_refusal, furnished
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
LOCALES = {"ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}}
if COUNT:  # Starting a server takes seconds.
    LOCALES |= {"C": {"LC_ALL": "C"}, "UTF-8": {"LC_ALL": "C.UTF-8"}, "unknown": {"LANG": "xx_YY.ISO-8859-1"}}
LATIN_1, UTF_8 = b"caf\xe9", "büro 数据".encode()
FOLDERS = [b"plain", LATIN_1, UTF_8]
QUICK = (b"rollout=hf", b"placement=inprocess", b"data.val=null")
OWN = (
    b"profile=demo",
    b'model.path="IN/model"',
    b'data.train="IN/prompts.jsonl"',
    b'reward.functions=["IN/my_reward.py:score"]',
)
HERE = b"HERE"  # Placeholder for the test's folder.

place = st.sampled_from([
    None, b"/proc/self", b"/proc/no/such", b"HERE/plain/afile", b"relative", b"/dev/null", b"~", b"HERE/new/" + LATIN_1,
    b"HERE/" + b"x" * 300, b"HERE/new/home", b"HERE/" + UTF_8, b"HERE/new\nline",
])  # fmt: skip
odd = {
    "TMPDIR": place, "XDG_CACHE_HOME": place, "RLTRAIN_CACHE": place, "HF_HOME": place,
    "USER": st.sampled_from([None, LATIN_1]), "PATH": st.sampled_from([None, b"", b"/proc/self"]),
    "COLUMNS": st.sampled_from([b"x", b"0", b"-1", b"1"]), "TERM": st.sampled_from([None, b"dumb", b"\xff"]),
    "MY_TOKEN": st.sampled_from([LATIN_1 * 3, b"new_run", b"plain\nmodel"]),
}  # fmt: skip
own = st.sampled_from([b"", b"HERE/plain/", b"~/", b"HERE/" + UTF_8 + b"/", b"HERE/" + LATIN_1 + b"/"]).map(
    lambda folder: tuple(word.replace(b"IN/", folder) for word in OWN)
)
output = st.sampled_from([b"new_run", b"~/run", UTF_8, LATIN_1, b"HERE/new/run", b"x" * 300]).map(
    lambda name: b'trainer.output_dir="' + name + b'"'
)
encoding = st.sampled_from(["utf-8", "ascii", "latin-1", None])
inside = st.sampled_from([*(b"HERE/" + name for name in FOLDERS), None])
case = st.builds(
    lambda words, output, **others: Case(words=(*QUICK, *words, output), **others), st.one_of(st.just(()), own), output,
    variables=st.fixed_dictionaries({"HOME": place}, optional=odd), known=st.booleans(), stdout=encoding,
    stderr=st.one_of(st.just("utf-8"), encoding), folder=inside,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model) -> bytes:
    """Make folders that each hold data, a reward function and a model.

    Two of the folders have non-ASCII names.
    """
    here = os.fsencode(tmp_path_factory.mktemp("here"))
    for name in FOLDERS:
        inside = Path(os.fsdecode(here + b"/" + name))
        inside.mkdir()
        (furnished(inside) / "model").symlink_to(model)
    return here


class Servers:
    """Environment servers, one for each locale. A server is started at the first request for its locale."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack, self.connections = stack, dict[str, Connection]()

    def ask(self, locale: str, case: Case) -> Outcome | str:
        """Return the outcome of a case, or the text of the error if the program raised an error."""
        if locale not in self.connections:
            self.connections[locale] = self.stack.enter_context(self.start(LOCALES[locale]))
        self.connections[locale].send(case)
        return self.connections[locale].recv()

    @contextlib.contextmanager
    def start(self, variables: dict[str, str]) -> Iterator[Connection]:
        """Start an environment server that runs until the end of the `with` block."""
        ours, theirs = socket.socketpair()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("environment_server.py")), str(theirs.fileno())],
            env=kept | variables | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        with Connection(ours.detach()) as connection:
            yield connection
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def servers():
    with contextlib.ExitStack() as stack:
        yield Servers(stack)


def listed(here: bytes) -> set[bytes]:
    """List all files, except for files in the caches of home folders."""
    found = (os.path.join(folder, name) for folder, _, names in os.walk(here) for name in names)
    return {path for path in found if b".cache" not in path.split(b"/")}


def put(here: bytes, case: Case) -> Case:
    """Replace the placeholder `HERE` in a case with the path of the test's folder."""
    values = {name: value and value.replace(HERE, here) for name, value in case.variables.items()}
    inside = case.folder and case.folder.replace(HERE, here)
    words = tuple(word.replace(HERE, here) for word in case.words)
    return Case(words, values, inside, case.known, case.stdout, case.stderr)


@pytest.mark.timeout(7200)
@given(drawn=case, locale=st.sampled_from(sorted(LOCALES)))
@cases(0.05, 4)
def test_a_command_line_runs_or_is_refused_in_one_line_whatever_surrounds_it(folder, servers, drawn, locale):
    before = listed(folder)
    outcome = servers.ask(locale, put(folder, drawn))
    assert isinstance(outcome, Outcome), outcome
    new = listed(folder) - before
    for name in new:  # The new files are deleted before the next case.
        os.unlink(name)
    assert outcome.status in (None, 2), outcome
    if drawn.stderr:
        check_refusal(outcome)
    assert outcome.status is None or not new, (outcome, new)
    assert all(name.endswith((b"config.yaml", b"command.json", b"tokens.parquet", b".lock")) for name in new), new
