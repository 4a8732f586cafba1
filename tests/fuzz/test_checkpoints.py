"""However a checkpoint is damaged and whatever `trainer.resume` is, a run resumes or ends with a one-line error."""

import asyncio
import copy
import dataclasses
import functools
import io
import json
import math
import os
import pickle
import warnings
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import ROWS, Outcome, cases, check_refusal, command, nothing_written_over, read_once, refused
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from rltrain.base.storage import FileStart, Folder
from rltrain.main import load_data, tokenizer_of
from rltrain.run.checkpoints import MANIFEST, Checkpoints
from rltrain.run.resume import beginning, require_usable
from rltrain.run.source_fingerprints import sources
from rltrain.settings.compose import compose, to_yaml
from rltrain.trajectories.token_rewards import with_all_knobs
from workers.training.rank_state import Saved

QUICK = ["rollout=hf", "placement=inprocess", "data.val=null", "trainer.total_steps=8"]
RUN, STEPS = "saved", (2, 4)
ROW = {"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "rollout/length_mean": 3.0, "rollout/entropy": 1.0}
STATE = {
    "engine_checked": True, "kl_controller": {"kl_coef": 0.0}, "entropy_controller": {"value": 0.0},
    "collector": {
        "order": {"size": ROWS, "seed": 0, "shuffle": True, "drawn": 128}, "step": None,
        "groups": {
            "next_uid": 128, "used": 127, "dropped": 0,
            "groups": [{
                "uid": 127, "shipped": 2, "results": [],
                "trajectories": [{
                    "uid": 127, "sample": 0, "stop_reason": "", "messages": [], "reward": None, "error": "",
                    "turns": [{"action_ids": [1], "log_probs": [-1.0], "versions": [2], "finish_reason": "stop",
                               "text": "a", "reward": None}],
                }],
            }],
        },
    },
}  # fmt: skip


class Rank:
    """A fake training rank that saves one small tensor without delay."""

    async def call(self, method, *arguments):
        return getattr(self, method.__name__)(*arguments)

    def save_state(self, url):
        self.folder = Folder(url)
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns when a single process saves a checkpoint.
            dcp.save(
                {"model.weight": torch.ones(2, 3)}, storage_writer=FsspecWriter(f"{url}/state/actor"), no_dist=True
            )
        self.folder.write("model/config.json", b"{}")
        return [None]

    def saved_state(self):
        return [Saved({name: self.folder.checksum(name) for name in self.folder.files()})]


@functools.cache
def usual():
    with read_once():
        config = with_all_knobs(compose([*QUICK, f"trainer.output_dir={RUN}", "trainer.resume=auto"])[0])
        return config, load_data(config, tokenizer_of(config)[0])[0]


@pytest.fixture(scope="module")
def run(here_once):
    """Make a run with two checkpoints, and return the contents of all its files."""
    config, prompts = usual()
    folder = here_once / RUN
    checkpoints = Checkpoints(
        Folder(str(folder / "checkpoints")), to_yaml(config), keep=0, best=None, sources=sources(config, prompts)
    )
    history = {"metrics.jsonl": json.dumps(ROW).encode() + b"\n", "ledger.jsonl": b"", "evaluations.jsonl": b""}
    folder.mkdir(exist_ok=True)
    for name, content in history.items():
        (folder / name).write_bytes(content)
    starts = {name: FileStart(folder / name, len(content)) for name, content in history.items()}

    async def save():
        for step in STEPS:
            state = {"step": step, "incarnation": 1} | STATE
            await checkpoints.start(step, 1, {"actor": Rank()}, state, history=starts, metrics={})
            await checkpoints.finish()

    asyncio.run(save())
    (folder / "config.yaml").write_text(checkpoints.config)
    return folder


class Runs:
    """An object that, as an attack, runs a shell command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("was_run",)


def pickled(*values) -> bytes:
    out = io.BytesIO()
    for value in values:
        pickle.dump(value, out)
    return out.getvalue()


INDEX = ["state/actor/.metadata"]
TEXTS = [MANIFEST, "driver.json", "history/metrics.jsonl", "history/ledger.jsonl", "history/evaluations.jsonl"]
OTHERS = ["config.yaml", "state/actor/__0_0.distcp", "model/config.json"]
JUNK = [
    b"", b"{", b"[]", b"null", b"{}", b"1", b'"x"', b"\xff\xfe", b"\x00" * 50, b"[" * 100_000, b'{"a":' * 50_000,
    b"NaN", b'{"step": 1}\n', b'{"step": "x"}\n{"step": null}', b'[1]\n', b"9" * 5000, b"a: &a [*a]", b"a: &a {b: *a}",
    b"trainer: 3", b"trainer: {total_steps: [1]}", b"!!python/object/apply:os.mkdir ['was_run']", b"? [1]\n: 2",
    pickled(Runs()), pickled({}), pickled([1]), pickled(dcp.metadata.Metadata({}, None, {})), pickled(torch.Size([1])),
    pickled(dcp.metadata.Metadata({"model.weight": 1}, None, {})), pickled(dcp.metadata.Metadata(None, None, None)),
]  # fmt: skip
value = st.one_of(
    st.sampled_from([None, True, "", "x", "\x00", [], {}, [[]], {"a": 1}, -1, 0, 2**70, 1e308, math.nan, math.inf]),
    st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=3),
)  # fmt: skip
place = st.integers(0, 10_000)
junk = st.one_of(st.sampled_from(JUNK), st.binary(max_size=20))
file = st.sampled_from(TEXTS + INDEX + OTHERS)
lines = st.sampled_from(TEXTS[:3])
harm = st.one_of(
    st.tuples(st.just("junk"), file, junk),
    st.tuples(st.just("flip"), file, st.tuples(place, st.integers(0, 255))),
    st.tuples(st.just("cut"), file, place),
    st.tuples(st.just("value"), lines, st.tuples(place, value)),
    st.tuples(st.just("leave"), lines, place),
    st.tuples(st.just("remove"), file, st.none()),
    st.tuples(st.just("nothing"), st.just(MANIFEST), st.none()),
)


def paths(value, path=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, child in inner for found in paths(child, (*path, key))]


def changed(content: bytes, how: str, what) -> bytes | None:
    """Return the content of a file after the damage `how`, or None if the damage deletes the file."""
    if how == "junk":
        return what
    if how == "flip":
        at = what[0] % max(len(content), 1)
        return content[:at] + bytes([what[1]]) + content[at + 1 :]
    if how == "cut":
        return content[: what % max(len(content), 1)]
    if how in ("value", "leave"):
        whole = json.loads(content)
        at = paths(whole)[(what[0] if how == "value" else what) % len(paths(whole))]
        inner = functools.reduce(lambda found, key: found[key], at[:-1], whole)
        if how == "value":
            inner[at[-1]] = copy.deepcopy(what[1])
        else:
            del inner[at[-1]]
        return json.dumps(whole).encode()
    return None if how == "remove" else content


def sealed(folder) -> None:
    """Make the manifest's sizes and checksums match the damaged files, unless the manifest cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())["manifest"]
        for name in [name for name in manifest["files"] if isinstance(name, str)]:
            content = (folder / name).read_bytes() if (folder / name).is_file() else None
            if content is None:
                del manifest["files"][name]
            else:
                manifest["files"][name] = [len(content), zlib.crc32(content)]
        crc = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
        (folder / MANIFEST).write_text(json.dumps({"manifest": manifest, "crc": crc}))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return


def spoil(run, how: str, name: str, what, seal: bool) -> dict:
    """Damage the newer checkpoint, and return the original content of the affected files."""
    folder = run / "checkpoints" / f"step_{STEPS[-1]}"
    before = {folder / one: (folder / one).read_bytes() for one in {name, MANIFEST}}
    found = changed(before[folder / name], how, what)
    (folder / name).unlink() if found is None else (folder / name).write_bytes(found)
    if seal:
        sealed(folder)
    return before


def restored(before) -> None:
    for file, content in before.items():
        file.write_bytes(content)


NAMES = [
    "auto", RUN, f"./{RUN}/", f"{RUN}/checkpoints", f"{RUN}/checkpoints/step_4", f"{RUN}/checkpoints/step_2", "old_run",
    "afile", "afile/x", "nowhere", "~", "/", ".", "..", "s3://bucket/run", "s3x://run", "file://", "file:///nowhere",
    "memory://run", "://", "a::b", "http://127.0.0.1:9/run", "\x00", "\ud800", "x" * 5000, "x" * 300, " ", "None",
    "AUTO", f"{RUN}/checkpoints/step_4/manifest.json", f"{RUN}/metrics.jsonl", "/dev/null", "/proc/self/mem",
]  # fmt: skip
name = st.one_of(st.sampled_from(NAMES[:6]), st.sampled_from(NAMES), st.text(max_size=6).filter(str.strip))
output = st.sampled_from([RUN, RUN, "new_run", "old_run"])
elsewhere = [f"trainer.checkpoint_dir={path}" for path in ("nope://x", "afile", "afile/x", "old_run")]
changes = ["", "trainer.total_steps=3", "actor.lr=1e-5", "algorithm=ppo", "trainer.seed=1", "trainer.keep_best=nothing"]
other = st.sampled_from([*changes, *elsewhere])


@pytest.mark.timeout(7200)
@given(how=harm, seal=st.booleans(), resume=name, output=output)
@cases(0.12, 60)
def test_a_checkpoint_is_gone_on_from_or_refused(run, here_once, how, seal, resume, output):
    config, prompts = usual()

    def go_on() -> None:
        trainer = dataclasses.replace(
            config.trainer, resume=resume, output_dir=output, checkpoint_dir=f"{output}/checkpoints"
        )  # fmt: skip
        changed = dataclasses.replace(config, trainer=trainer)
        found = beginning(changed)
        if found.checkpoint is not None and not found.over:
            require_usable(changed, found.checkpoint, prompts)

    before = spoil(run, *how, seal)
    try:
        with nothing_written_over(here_once) as outcomes:
            refused(go_on)
            outcomes.append(Outcome(0, "", ""))
    finally:
        restored(before)


@pytest.mark.timeout(7200)
@given(how=harm, seal=st.booleans(), resume=name, output=output, other=other)
@cases(0.03, 12)
def test_a_run_goes_on_or_is_refused_in_one_line(run, here_once, how, seal, resume, output, other):
    before = spoil(run, *how, seal)
    try:
        with nothing_written_over(here_once) as outcomes:
            quoted = resume.replace("\\", "\\\\").replace("'", "\\'")
            words = [*QUICK, f"trainer.resume='{quoted}'", f"trainer.output_dir={output}", *filter(None, [other])]
            outcomes.append(command(words))
        check_refusal(outcomes[0])
    finally:
        restored(before)


def test_the_run_that_the_others_are_spoiled_copies_of_goes_on(run, here_once):
    with nothing_written_over(here_once) as outcomes:
        outcomes.append(command([*QUICK, "trainer.resume=auto", f"trainer.output_dir={RUN}"]))
    assert (outcomes[0].status, outcomes[0].err) == (None, "")
    assert f"the run continues after step {STEPS[-1]}" in outcomes[0].out
