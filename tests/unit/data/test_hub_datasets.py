"""Tests of data sets given by their hub name, which the real `datasets` client downloads from a local server.

The local server can simulate failures.
"""

import importlib.util
import io
import json
import os
import signal
import threading
import time

import pyarrow
import pytest
from pyarrow import parquet

from rltrain.base.errors import ConfigError
from rltrain.data import hub_datasets
from rltrain.data.hub_datasets import DatasetName, dataset_name, fetch_dataset
from tests.full_disks import full_disk
from tests.hub_server import Hub
from tests.prompt_loading import load

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the library datasets is not installed: make setup"
)
NAME = "openai/gsm8k"
CARD = "---\nconfigs:\n{configs}---\n"
CONFIG = "- config_name: {0}\n  data_files:\n{1}"
SPLIT = "  - split: {1}\n    path: {0}/{1}-*\n"


def table(label: str, rows: int = 3) -> pyarrow.Table:
    return pyarrow.table(
        {"question": [f"{label} {n}?" for n in range(rows)], "answer": [f"... #### {n}" for n in range(rows)]}
    )


def repository(folder, splits: dict[str, list[str]], rows: int = 3):
    """Write a data set as parquet files, one for each split of each configuration in `splits`."""
    card = ""
    for config, names in splits.items():
        card += CONFIG.format(config, "".join(SPLIT.format(config, name) for name in names))
        for name in names:
            (folder / config).mkdir(parents=True, exist_ok=True)
            parquet.write_table(table(f"{config} {name}", rows), folder / config / f"{name}-00000-of-00001.parquet")
    (folder / "README.md").write_text(CARD.format(configs=card))
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Yield a local hub server that stores a data set with GSM8K's configurations and splits.

    The environment variables of the test process, which its child processes inherit, point to the local hub.
    """
    with Hub(tmp_path / "store") as hub:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(hub_datasets, "_files", {})
        folder = repository(tmp_path / "gsm8k", {"main": ["train", "test"], "socratic": ["train", "test"]})
        hub.commit = hub.push(NAME, folder, kind="dataset")
        yield hub


def fetched(source: str, key: str = "train") -> str:
    name = dataset_name(source)
    assert name is not None
    return str(fetch_dataset(name, f"data.{key}={source}", key=key))


def refusal(source: str, key: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        fetched(source, key)
    message = str(caught.value)
    assert message.startswith(f"data.{key}={source}: ")
    assert "\n" not in message
    return message


# Tests of data set names


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("openai/gsm8k", (None, None, None)),
        ("openai/gsm8k:main", ("main", None, None)),
        ("openai/gsm8k:main:train", ("main", "train", None)),
        ("openai/gsm8k::train", (None, "train", None)),
        ("openai/gsm8k@v1.0", (None, None, "v1.0")),
        ("openai/gsm8k:en-US:test@refs/convert/parquet", ("en-US", "test", "refs/convert/parquet")),
    ],
)
def test_a_name_has_a_repository_a_configuration_a_split_and_a_revision(source, parts):
    assert dataset_name(source) == DatasetName("openai/gsm8k", *parts)
    assert str(dataset_name(source)) == source


@pytest.mark.parametrize("source", ["gsm8k", "a/b/c", "/a/b", "./a/b", "~/b", "a/b:", "a/b:c:", "a/b@", "a/b:c:d[:9]"])
def test_what_is_no_name_of_a_data_set_is_none(source):
    assert dataset_name(source) is None


def test_a_name_without_revision_may_have_become_a_pinned_one():
    pinned = dataset_name(f"a/b:main:train@{'0' * 40}")
    names = ["a/b", "a/b:main", "a/b:train", "a/b:main:train", "a/b::train"]
    assert all(dataset_name(name).may_mean(pinned) for name in names)
    others = ["a/c", "a/b:other", "a/b:main:test", "a/b:other:train", "a/b@main"]
    assert not any(dataset_name(name).may_mean(pinned) for name in others)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(hub_datasets, "_files", {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("a/b").endswith("; check the path, or run pip install 'rltrain[datasets]'")


# Tests of downloads of data sets


@needs_library
def test_a_split_is_pinned_and_read_and_pinned_names_need_no_network(hub, monkeypatch):
    pinned = fetched(f"{NAME}:main:train")
    assert pinned == f"{NAME}:main:train@{hub.commit}"
    prompts = load(pinned)
    assert [prompt.text for prompt in prompts] == ["main train 0?", "main train 1?", "main train 2?"]
    assert prompts[2].columns == {"question": "main train 2?", "answer": "... #### 2"}
    assert prompts.described == f"3 rows of {pinned}; prompt = column question, as text"
    monkeypatch.setattr(hub_datasets, "_files", {})
    hub.requests.clear()
    assert fetched(pinned) == pinned
    assert not hub.requests
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (f"{NAME}:main", f"{NAME}:main:train", f"{NAME}:train"):
        monkeypatch.setattr(hub_datasets, "_files", {})
        assert fetched(name) == pinned  # Without a network, the name resolves to the data in the cache.


@needs_library
def test_a_single_word_is_a_configuration_or_else_a_split(hub, tmp_path):
    assert fetched(f"{NAME}:socratic") == f"{NAME}:socratic:train@{hub.commit}"
    assert fetched(f"{NAME}:socratic", "val") == f"{NAME}:socratic:test@{hub.commit}"
    assert "has several configurations: main, socratic; name one, as in openai/gsm8k:main:test" in refusal(
        f"{NAME}:test"
    )
    commit = hub.push("org/one", repository(tmp_path / "one", {"default": ["train", "dev"]}), kind="dataset")
    assert fetched("org/one:dev") == f"org/one:default:dev@{commit}"


@needs_library
def test_names_that_do_not_exist_list_those_that_do(hub):
    assert (
        "openai/gsm8k has no configuration 'mian'; the configurations are main, socratic (did you mean main?)"
        in refusal(f"{NAME}:mian:train")
    )
    assert "openai/gsm8k:main has no split 'tests'; the splits are train, test (did you mean test?)" in refusal(
        f"{NAME}:main:tests"
    )
    assert "no branch, tag or commit 'v9'" in refusal(f"{NAME}:main@v9")
    assert "no such file or folder, and no data set of that name on http://127.0.0.1" in refusal("openai/gsm9k")


@needs_library
def test_an_older_commit_and_a_tag_are_read_as_they_were(hub, tmp_path):
    first = hub.commit
    hub.tag(NAME, "v1", kind="dataset")
    second = hub.push(NAME, repository(tmp_path / "gsm8k", {"main": ["train"]}, rows=5), kind="dataset")
    assert first != second
    assert len(load(fetched(f"{NAME}:main:train"))) == 5
    assert fetched(f"{NAME}:main:train@v1") == f"{NAME}:main:train@{first}"
    assert len(load(f"{NAME}:main:train@{first}")) == 3


@needs_library
def test_a_gated_data_set_needs_the_token_of_an_account_with_access(hub, monkeypatch):
    hub.gate(NAME, "right", kind="dataset")
    assert f"the data set is gated, and no HF_TOKEN is set; ask for access on {hub.url}/datasets/{NAME}" in refusal(
        NAME + ":main"
    )
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "the data set is gated, and HF_TOKEN belongs to an account without access" in refusal(NAME + ":main")
    monkeypatch.setenv("HF_TOKEN", "right")
    assert fetched(NAME + ":main") == f"{NAME}:main:train@{hub.commit}"


@needs_library
def test_no_network_and_an_empty_cache_say_so(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "/datasets does not hold the data set, and HF_HUB_OFFLINE forbids a download; unset" in refusal(
        f"{NAME}:main"
    )
    assert "does not hold the data set" in refusal(f"{NAME}:main:train@{'0' * 40}")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = refusal(f"{NAME}:main")
    assert "no such file or folder, and http://127.0.0.1:9 cannot be reached (" in message
    assert "try again later, check the network and HF_ENDPOINT, or give a file" in message


@needs_library
def test_a_connection_that_breaks_once_is_tried_again(hub):
    hub.break_connection("main/train-00000-of-00001.parquet", at=100)
    assert len(load(fetched(f"{NAME}:main"))) == 3


@needs_library
def test_a_download_that_breaks_off_says_so_and_complete_files_are_kept(hub):
    hub.break_connection("main/test-00000-of-00001.parquet", at=100, times=99)
    message = refusal(f"{NAME}:main")
    assert "the download broke off (" in message
    assert message.endswith("; start again: complete files are kept")
    hub.break_connection("main/test-00000-of-00001.parquet", at=100, times=0)
    hub.requests.clear()
    assert len(load(fetched(f"{NAME}:main"))) == 3
    assert len([request for request in hub.requests if "/cdn/" in request.path and request.method == "GET"]) == 1


@needs_library
@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_deletes_the_file_in_progress(hub, tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    parquet.write_table(pyarrow.table({"question": [os.urandom(1_000_000).hex()]}), folder / "train.parquet")
    hub.push("org/large", folder, kind="dataset")
    hub.chunk_delay_s = 0.5

    def downloads() -> bool:
        return any("/cdn/" in request.path and request.method == "GET" for request in hub.requests)

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not (in_progress(tmp_path) and downloads()) and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fetched("org/large")
    thread.join()
    assert downloads()
    assert in_progress(tmp_path) == []


def in_progress(folder) -> list[str]:
    return [path.name for path in (folder / "home").rglob("*.incomplete") if path.is_file()]


@needs_library
@pytest.mark.parametrize(
    ("during", "reason"),
    [("download", "OSError: [Errno 28] No space left on device"), ("conversion", "[Errno 28]")],
)
def test_a_full_disk_is_named_and_the_next_attempt_succeeds(hub, tmp_path, monkeypatch, during, reason):
    hub.push("org/many", repository(tmp_path / "many", {"default": ["train"]}, rows=1000), kind="dataset")
    monkeypatch.setenv("PYTHONPATH", full_disk(tmp_path, during))
    message = refusal("org/many")
    assert f"the data set cannot be stored in {tmp_path / 'home'}/datasets (" in message
    assert reason in message
    assert message.endswith("; free space there, or set HF_HOME to another folder")
    monkeypatch.delenv("PYTHONPATH")
    assert len(load(fetched("org/many"))) == 1000


@needs_library
def test_a_data_set_that_is_larger_than_the_free_space_is_refused(hub, tmp_path):
    folder = repository(tmp_path / "huge", {"default": ["train"]})
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"size_in_bytes": 10**18}}))
    hub.push("org/huge", folder, kind="dataset")
    message = refusal("org/huge")
    assert f"the data set cannot be stored in {tmp_path / 'home'}/datasets (OSError: Not enough disk space." in message


@needs_library
def test_a_cache_that_cannot_be_written_to_is_named(hub, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    message = refusal(f"{NAME}:main")
    assert f"the data set cannot be stored in {tmp_path}/file/datasets (NotADirectoryError: [Errno 20] Not a" in message


@needs_library
def test_files_that_are_no_data_are_refused(hub, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.parquet").write_bytes(b"not parquet at all")
    hub.push("org/bad", tmp_path / "bad", kind="dataset")
    assert "the library `datasets` cannot read the data set (" in refusal("org/bad")
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("raise SystemExit")
    hub.push("org/script", tmp_path / "script", kind="dataset")
    assert "the library `datasets` cannot read the data set (" in refusal("org/script")


@needs_library
@pytest.mark.usefixtures("hub")
def test_a_slow_download_has_lines_in_a_log(monkeypatch):
    from rich.console import Console

    from rltrain.monitoring import heartbeat
    from rltrain.run.pinned_datasets import fetch_datasets
    from rltrain.settings.compose import compose

    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.01)
    log = Console(file=io.StringIO(), width=200)
    with heartbeat.Heartbeat(log) as lines:
        fetch_datasets(compose([f"data.train={NAME}:main", "data.val=null", "trainer.resume=never"])[0], lines)
    first, *later = log.file.getvalue().splitlines()
    assert first == f"data.train: reading {NAME}:main from the hub"
    assert later[0] == f"still reading {NAME}:main from the hub after 0 s"


@needs_library
def test_a_run_that_is_resumed_keeps_the_commit(hub, tmp_path):
    from rich.console import Console

    from rltrain.monitoring.heartbeat import Heartbeat
    from rltrain.run.pinned_datasets import fetch_datasets
    from rltrain.settings.compose import compose, to_yaml

    words = [f"data.train={NAME}:main", f"trainer.output_dir={tmp_path}/run", "trainer.resume=auto"]
    first = fetch_datasets(compose(words)[0], Heartbeat(Console(quiet=True)))
    train, val = (f"{NAME}:main:{split}@{hub.commit}" for split in ("train", "test"))
    assert (first.data.train, first.data.val) == (train, val)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(first))
    hub.push(NAME, repository(tmp_path / "gsm8k", {"main": ["train", "test"]}, rows=5), kind="dataset")
    again = fetch_datasets(compose(words)[0], Heartbeat(Console(quiet=True)))
    assert again.data == first.data
    new = fetch_datasets(compose([*words[:2], "trainer.resume=never"])[0], Heartbeat(Console(quiet=True)))
    assert new.data.train != train
