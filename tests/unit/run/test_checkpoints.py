"""Tests of which folders count as checkpoints, which checkpoints are kept, and failures to write a checkpoint.

The tests use fake training ranks.
"""

import asyncio
import json
import logging
import os
import random
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from rltrain.base.errors import CheckpointError, ConfigError, WorkerLost
from rltrain.base.storage import FileStart, Folder
from rltrain.run.checkpoints import MANIFEST, Checkpoints, read, require_own, steps_in
from workers.training.rank_state import Saved

HISTORY = {
    "metrics.jsonl": b'{"step": 1, "reward/mean": 0.5, "rollout/length_mean": 3.0}\n', "ledger.jsonl": b"",
}  # fmt: skip


class Ranks:
    """Two fake training ranks, which write their files at the second call of `saved_state` if `writes` is set."""

    def __init__(self):
        self.url, self.looks, self.error, self.writes = "", 0, "", True

    async def call(self, method, *arguments):
        return getattr(self, method.__name__)(*arguments)

    def save_state(self, url):
        self.url, self.looks = url, 0
        return [None, None]

    def saved_state(self):
        self.looks += 1
        if self.looks < 2 or not self.writes:
            return [None, None]
        try:
            return self._write(Folder(self.url))
        except OSError as error:  # Ranks return an error in their result instead of raising the error.
            return [Saved(error=str(error)), Saved()]

    def _write(self, folder):
        found = []
        for rank in range(2):
            name = f"state/actor/__{rank}_0.distcp"
            folder.write(name, f"tensors of rank {rank}".encode())
            found.append(Saved({name: folder.checksum(name)}, self.error))
        folder.write("model/config.json", b"{}")
        folder.write("model/model.safetensors", b"weights")
        names = ("model/config.json", "model/model.safetensors")
        return [Saved(found[0].files | {name: folder.checksum(name) for name in names}, self.error), found[1]]


def made(tmp_path, *, keep=0, best=None) -> Checkpoints:
    return Checkpoints(Folder(str(tmp_path / "checkpoints")), "seed: 0\n", keep=keep, best=best, sources={"a": 7})


LINES = tempfile.TemporaryDirectory()  # This folder holds the run's history files and is removed when the tests end.


def history_files(folder):
    """Write a run's history files, and return the size of each file when the checkpoint was started.

    After the checkpoint was started, each history file has grown by one line.
    """
    for name, content in HISTORY.items():
        (folder / name).write_bytes(content + b"a line of a later step\n")
    return {name: FileStart(folder / name, len(content)) for name, content in HISTORY.items()}


async def save(checkpoints, step, *, ranks=None, wait=True, **metrics):
    await checkpoints.start(
        step, 2, {"actor": ranks or Ranks()}, {"step": step}, history=history_files(Path(LINES.name)), metrics=metrics
    )
    if wait:
        await checkpoints.finish()


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def test_what_was_saved_is_what_is_read(tmp_path):
    await save(made(tmp_path), 3, score=0.5)
    found = made(tmp_path).newest()
    assert (found.step, found.incarnation, found.config, found.history) == (3, 2, "seed: 0\n", HISTORY)
    assert found.state == {"step": 3, "sources": {"a": 7}}
    listed = json.loads((tmp_path / "checkpoints/step_3" / MANIFEST).read_text())["manifest"]["files"]
    assert files_of(tmp_path / "checkpoints/step_3") == sorted([*listed, MANIFEST])


async def test_until_its_manifest_is_there_the_one_before_is_current(tmp_path):
    checkpoints, ranks = made(tmp_path), Ranks()
    await save(checkpoints, 1)
    ranks.writes = False
    await save(checkpoints, 2, ranks=ranks, wait=False)
    while ranks.looks < 3:
        await asyncio.sleep(0)
    assert (checkpoints.newest().step, checkpoints.writing.done()) == (1, False)
    ranks.writes = True
    await checkpoints.writing
    assert checkpoints.newest().step == 2


async def test_a_file_of_lines_that_was_cut_meanwhile_fails_the_save_and_not_the_run(tmp_path, caplog):
    checkpoints = made(tmp_path)
    await save(checkpoints, 1)
    await save(checkpoints, 2, wait=False)
    (Path(LINES.name) / "metrics.jsonl").write_bytes(b"{}\n")
    with caplog.at_level(logging.WARNING):
        await checkpoints.finish()
    assert "metrics.jsonl has lost its last 57 bytes" in caplog.text
    assert checkpoints.newest().step == 1


@pytest.mark.parametrize("harm", ["cut", "flip", "remove", "lengthen"])
async def test_F4_whichever_file_is_damaged_it_is_named_and_the_one_before_is_used(tmp_path, harm, caplog):
    checkpoints, draw = made(tmp_path), random.Random(harm)
    for step in (1, 2):
        await save(checkpoints, step)
    folder = tmp_path / "checkpoints" / "step_2"
    for name in files_of(folder):
        good = (folder / name).read_bytes()
        if not good and harm in ("cut", "flip"):
            continue
        bad = bytearray(good)
        if harm == "cut":
            bad = bad[: draw.randrange(len(bad))]
        elif harm == "lengthen":
            bad += b"x"
        elif harm == "flip":
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        (folder / name).unlink()
        if harm != "remove":
            (folder / name).write_bytes(bad)
        caplog.clear()
        assert checkpoints.newest().step == 1, name
        # A folder without a manifest is not a checkpoint, so no message is logged.
        if not (harm == "remove" and name == MANIFEST):
            (said,) = caplog.messages
            assert f"{folder}: {name}" in said
            assert "\n" not in said
            with pytest.raises(CheckpointError, match=name):
                read(Folder(str(folder)))
        (folder / name).write_bytes(good)
    assert checkpoints.newest().step == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"manifest": 3, "crc": 1}', b"\xff\xfe", b"[" * 100_000,
     b'{"manifest": {"step": 1, "incarnation": 0, "metric": null, "files": {"../../x": [1, 2]}}, "crc": 0}'],
)  # fmt: skip
def test_a_manifest_of_garbage_is_refused_in_one_line(tmp_path, content):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{MANIFEST} is damaged") as caught:
        read(Folder(str(tmp_path)))
    assert "\n" not in str(caught.value)


async def test_the_last_k_and_the_best_are_kept(tmp_path):
    checkpoints = made(tmp_path, keep=2, best="score")
    for step, score in enumerate([0.1, 0.9, 0.3, float("nan"), 0.2], start=1):
        await save(checkpoints, step, score=score)
    assert steps_in(checkpoints.folder) == [2, 4, 5]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_2", "step_4", "step_5"]


async def test_zero_keeps_all_and_one_keeps_the_newest(tmp_path):
    for keep, left in ((0, [1, 2, 3]), (1, [3])):
        checkpoints = made(tmp_path / str(keep), keep=keep)
        for step in (1, 2, 3):
            await save(checkpoints, step)
        assert steps_in(checkpoints.folder) == left


def test_a_metric_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    made(tmp_path, best=None).require_best(())
    checkpoints = made(tmp_path, best="eval/acuracy")
    checkpoints.require_best({"eval/acuracy"})
    with pytest.raises(ConfigError, match=r"keep_best=eval/acuracy: .* the nearest are eval/accuracy, score"):
        checkpoints.require_best({"score", "eval/accuracy"})


async def test_a_save_at_a_step_without_the_metric_says_how_to_have_it(tmp_path, caplog):
    await save(made(tmp_path, best="eval/accuracy"), 1, score=1.0)
    (message,) = caplog.messages
    assert "has no value for step 1" in message
    assert "trainer.eval_every must divide" in message


async def test_what_a_crash_has_left_is_removed_at_the_next_start_and_nothing_else(tmp_path):
    checkpoints = made(tmp_path)
    await save(checkpoints, 1)
    await save(checkpoints, 2, wait=False)
    (tmp_path / "checkpoints/step_2/state").mkdir(parents=True)
    (tmp_path / "checkpoints/my notes").mkdir()
    made(tmp_path).clean()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["my notes", "step_1"]
    await checkpoints.abandon()


async def test_a_save_that_fails_on_a_rank_is_said_and_leaves_the_run_and_the_old_ones(tmp_path, caplog):
    checkpoints, ranks = made(tmp_path), Ranks()
    await save(checkpoints, 1)
    ranks.error = "No space left on device"
    await save(checkpoints, 2, ranks=ranks)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_1"]
    (said,) = caplog.messages
    assert "step_2: not saved, No space left on device; the run goes on" in said
    with pytest.raises(CheckpointError, match=r"so .*model was not created; free space"):
        checkpoints.publish(tmp_path / "model")
    ranks.error = ""
    await save(checkpoints, 2, ranks=ranks)  # The second attempt to save step 2 succeeds.
    assert checkpoints.newest().step == 2


@pytest.mark.parametrize("begun", [False, True])
async def test_an_abandoned_save_is_said_and_leaves_nothing(tmp_path, caplog, begun):
    checkpoints, ranks = made(tmp_path), Ranks()
    await save(checkpoints, 1)
    ranks.writes = False
    await save(checkpoints, 2, ranks=ranks, wait=False)
    (tmp_path / "checkpoints/step_2/state").mkdir(parents=True)
    while begun and not ranks.looks:
        await asyncio.sleep(0)
    await checkpoints.abandon()
    (said,) = caplog.messages
    assert "step_2: not saved, a training rank died before it had written its files; the run goes on" in said
    assert (checkpoints.writing, checkpoints.last) == (None, None)
    assert os.listdir(tmp_path / "checkpoints") == ["step_1"]
    await checkpoints.finish()  # `finish` returns, because no save is in progress.


async def test_a_rank_that_dies_while_it_writes_fails_the_save_and_is_reported_by_finish(tmp_path, caplog):
    checkpoints, ranks = made(tmp_path), Ranks()
    await save(checkpoints, 1)

    def saved_state():
        raise WorkerLost("actor.saved_state: training rank 1 is gone")

    ranks.saved_state = saved_state
    await save(checkpoints, 2, ranks=ranks, wait=False)
    with pytest.raises(WorkerLost, match="rank 1 is gone"):
        await checkpoints.finish()
    assert "step_2: not saved, a training rank died before it had written its files; the run goes on" in caplog.text
    await checkpoints.abandon()
    assert (checkpoints.last, checkpoints.newest().step) == (None, 1)


async def test_a_save_begins_only_when_the_one_before_is_complete(tmp_path):
    checkpoints, first, second = made(tmp_path), Ranks(), Ranks()
    first.writes = False
    await save(checkpoints, 1, ranks=first, wait=False)
    later = asyncio.create_task(save(checkpoints, 2, ranks=second))
    while first.looks < 3:
        await asyncio.sleep(0)
    assert second.url == ""
    first.writes = True
    await later
    assert steps_in(checkpoints.folder) == [1, 2]


async def test_an_abandoned_save_whose_manifest_is_being_written_is_complete_before_the_run_goes_on(
    tmp_path, monkeypatch
):
    """A thread writes the manifest, and a thread cannot be cancelled."""
    checkpoints, entered, leave = made(tmp_path), threading.Event(), threading.Event()
    commit = checkpoints._commit

    def slow_commit(saved):
        entered.set()
        assert leave.wait(60)
        commit(saved)

    monkeypatch.setattr(checkpoints, "_commit", slow_commit)
    await save(checkpoints, 1, wait=False)
    assert await asyncio.to_thread(entered.wait, 60)
    abandoning = asyncio.create_task(checkpoints.abandon())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not abandoning.done()
    leave.set()
    await abandoning
    assert checkpoints.newest().step == 1


async def test_a_destination_that_cannot_be_written_keeps_the_run(tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("a file in its place")
    await save(made(tmp_path), 1)
    assert "step_1: not saved" in caplog.messages[0]


async def test_the_model_is_put_in_its_place_by_links_and_replaces_the_one_before(tmp_path):
    checkpoints = made(tmp_path)
    for step in (1, 2):
        await save(checkpoints, step)
        checkpoints.publish(tmp_path / "model")
        assert files_of(tmp_path / "model") == ["config.json", "model.safetensors"]
        saved = tmp_path / f"checkpoints/step_{step}/model/model.safetensors"
        assert (tmp_path / "model/model.safetensors").samefile(saved)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "model"]


async def test_any_file_system_will_do(caplog):
    checkpoints = Checkpoints(Folder("memory://somewhere/run"), "a: 1", keep=1, best=None)
    for step in (1, 2):
        await save(checkpoints, step)
    assert steps_in(checkpoints.folder) == [2]
    assert checkpoints.newest().config == "a: 1"
    assert str(checkpoints.folder) == "memory://somewhere/run"
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_files_get_the_rights_that_the_users_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        await save(made(tmp_path), 1)
    finally:
        os.umask(before)
    folder = tmp_path / "checkpoints"
    assert {(folder / name).stat().st_mode & 0o777 for name in files_of(folder)} == {0o640}


async def test_a_copy_under_another_number_is_no_checkpoint(tmp_path, caplog):
    checkpoints = made(tmp_path)
    await save(checkpoints, 2)
    shutil.copytree(tmp_path / "checkpoints/step_2", tmp_path / "checkpoints/step_50")
    shutil.copytree(tmp_path / "checkpoints/step_2", tmp_path / "checkpoints/best")
    assert checkpoints.newest().step == 2
    assert "step_50: is the checkpoint of step 2, but the folder's name gives another step" in caplog.messages[0]
    assert read(checkpoints.folder.at("best")).step == 2


async def test_the_best_is_chosen_by_one_metric(tmp_path):
    lengths, rewards = made(tmp_path, keep=1, best="length"), made(tmp_path, keep=1, best="reward")
    await save(lengths, 1, length=9.0)
    for step, reward in ((2, 0.7), (3, 0.6), (4, 0.5)):
        await save(rewards, step, reward=reward)
    assert steps_in(rewards.folder) == [2, 4]


async def test_what_people_edit_in_the_published_model_is_not_the_checkpoints(tmp_path):
    checkpoints = made(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for old in ("model", "model.old"):
        (tmp_path / old).symlink_to("elsewhere")
    await save(checkpoints, 1)
    checkpoints.publish(tmp_path / "model")
    (tmp_path / "model/config.json").write_text("edited")
    assert checkpoints.newest().step == 1
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "elsewhere", "model"]


async def test_a_link_to_nothing_is_in_nobodys_way(tmp_path):
    checkpoints = made(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step_1").symlink_to("nowhere")
    require_own(checkpoints.folder)
    await save(checkpoints, 1)
    assert checkpoints.newest().step == 1
