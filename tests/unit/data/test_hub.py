"""Tests of models given by their hub name, which the real hub client downloads from a local hub server.

The hub client runs in a separate process.
"""

import os
import shutil
import threading
import time

import psutil
import pytest
from huggingface_hub import constants

from rltrain.base.errors import ConfigError
from rltrain.data import hub as hub_module
from rltrain.data.hub import HubName, directory_on_node, fetch, hub_name, local_directory, portable
from tests.full_disks import full_disk
from tests.hub_server import Hub

CONFIG, TOKENIZER, TEMPLATE = {"config.json": b"{}"}, {"tokenizer.json": b"{}"}, {"chat_template.jinja": b"{{ x }}"}
SMALL = CONFIG | TOKENIZER | TEMPLATE
CHUNK = constants.DOWNLOAD_CHUNK_SIZE


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Yield a local hub server, and start with an empty record of downloaded snapshots.

    The test process uses the same cache folder as the hub client.
    """
    monkeypatch.setattr(hub_module, "_snapshots", {})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    with Hub(tmp_path / "store") as server:
        yield server


@pytest.fixture
def client(hub, tmp_path):
    """Return a function that downloads a model by its hub name, and that can set additional environment variables."""

    def get(path: str, *, on_bytes=lambda done, total: None, **more: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
        environment = inherited | hub.environment(tmp_path / "cache") | more
        hub.requests.clear()
        return fetch(hub_name(path), f"model.path={path}", on_bytes=on_bytes, environment=environment)

    return get


def push(hub, tmp_path, files: dict[str, bytes], name: str = "org/model", **options) -> str:
    folder = tmp_path / f"commit{len(list(tmp_path.iterdir()))}"
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return hub.push(name, folder, **options)


def files_in(path: str) -> list[str]:
    folder = local_directory(path)
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def forget() -> None:
    """Forget all recorded snapshots, so that only the cache on disk is left, as in a new process."""
    hub_module._snapshots.clear()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("gpt2", HubName("gpt2")),
        ("org/model@v1.0", HubName("org/model", "v1.0")),
        ("org/model@refs/pr/3", HubName("org/model", "refs/pr/3")),
        ("outputs/run/model", None),
        ("/models/mine", None),
        ("~/mine", None),
        ("./mine", None),
        ("../mine", None),
        ("s3://bucket", None),
        ("org/model@", None),
        ("org/model@../../x", None),
        ("org/mo del", None),
        ("", None),
    ],
)
def test_a_name_has_at_most_one_slash_and_the_characters_of_the_hub(path, name):
    assert hub_name(path) == name


def test_what_exists_on_this_machine_is_a_directory_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/model") == HubName("org/model")
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub_name("org/model") is None
    assert portable("org/model") == str(tmp_path / "org" / "model")


def test_a_name_is_pinned_to_its_commit_and_only_the_needed_files_are_downloaded(hub, client, tmp_path):
    other = {
        "README.md": b"#", "pytorch_model.bin": b"p", "model.fp16.safetensors": b"h", "consolidated.safetensors": b"c",
        "onnx/config.json": b"{}", "onnx/model.onnx": b"o", "original/tokenizer.model": b"t", "model-Q4.gguf": b"g",
    }  # fmt: skip
    index = {"model.safetensors.index.json": b"{}", "model-00001-of-00001.safetensors": b"w"}
    commit = push(hub, tmp_path, SMALL | other | index)
    pinned = client("org/model")
    assert pinned == f"org/model@{commit}" == portable(pinned)
    assert files_in(pinned) == sorted([*SMALL, *index])
    assert local_directory(pinned).name == commit


def test_files_of_torch_are_downloaded_where_there_are_no_safetensors(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"pytorch_model.bin": b"w", "model-Q4.gguf": b"g"})
    assert files_in(client("org/model")) == sorted([*SMALL, "pytorch_model.bin"])


def test_weights_to_which_the_config_gives_a_name_are_downloaded(hub, client, tmp_path):
    named = {"config.json": b'{"transformers_weights": "own.safetensors"}', "own.safetensors": b"w"}
    push(hub, tmp_path, SMALL | named | {"pytorch_model.bin": b"w"})
    assert files_in(client("org/model")) == sorted([*SMALL, "own.safetensors"])


def test_a_branch_and_a_tag_stand_for_their_commits(hub, client, tmp_path):
    old = push(hub, tmp_path, SMALL | {"model.safetensors": b"old"})
    hub.tag("org/model", "v1")
    new = push(hub, tmp_path, SMALL | {"model.safetensors": b"new"})
    assert client("org/model@v1") == client(f"org/model@{old[:10]}") == f"org/model@{old}"
    assert client("org/model@main") == f"org/model@{new}"
    assert (local_directory(f"org/model@{old}") / "model.safetensors").read_bytes() == b"old"


def test_a_pinned_name_whose_files_are_here_needs_no_network(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    pinned = client("org/model")
    forget()
    assert client(pinned) == pinned
    assert client(pinned, HF_HUB_OFFLINE="1") == pinned
    assert hub.requests == []


def test_a_name_without_a_revision_is_found_in_the_cache_without_a_network(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    pinned = client("org/model")
    forget()
    assert client("org/model", HF_HUB_OFFLINE="1") == pinned
    forget()
    assert client("org/model", HF_ENDPOINT="http://127.0.0.1:9") == pinned


def test_a_pinned_name_of_which_a_file_is_missing_is_completed(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    pinned = client("org/model")
    (local_directory(pinned) / "chat_template.jinja").unlink()
    forget()
    assert "HF_HUB_OFFLINE forbids a download" in refusal(client, pinned, HF_HUB_OFFLINE="1")
    assert files_in(client(pinned)) == sorted([*SMALL, "model.safetensors"])
    assert not [request for request in hub.requests if request.path.startswith("/cdn")]


def test_a_snapshot_of_which_nobody_knows_the_files_is_completed(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    pinned = client("org/model")
    (local_directory(pinned) / "chat_template.jinja").unlink()
    # A cache that other programs filled by downloading single files has no list of files.
    shutil.rmtree(local_directory(pinned).parents[1] / "trees")
    forget()
    assert files_in(client(pinned)) == sorted([*SMALL, "model.safetensors"])


def test_a_broken_download_goes_on_where_it_broke(hub, client, tmp_path):
    content = os.urandom(CHUNK + 5_000_000)
    push(hub, tmp_path, SMALL | {"model.safetensors": content})
    hub.break_connection("model.safetensors", at=CHUNK + 1_000_000)
    pinned = client("org/model")
    assert (local_directory(pinned) / "model.safetensors").read_bytes() == content
    assert [request.range for request in hub.requests if request.path.startswith("/cdn")] == [None, f"bytes={CHUNK}-"]


def test_a_connection_that_is_reset_is_opened_again(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w" * 1000})
    hub.break_connection("model.safetensors", at=500, reset=True)
    assert "model.safetensors" in files_in(client("org/model"))


def test_the_progress_of_a_download_is_told(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w" * 1_000_000})
    hub.chunk_delay_s, told = 0.05, []
    client("org/model", on_bytes=lambda done, total: told.append((done, total)))
    assert told
    assert all(0 <= done <= total <= 1_000_100 for done, total in told)


def test_ctrl_c_ends_a_download_at_once(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w" * 50_000_000})
    hub.chunk_delay_s = 0.5

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        client("org/model", on_bytes=interrupt)
    assert time.monotonic() - began < 60  # Downloading the whole file would take 380 s.
    assert psutil.Process().children() == []


def test_ctrl_c_leaves_complete_files_and_deletes_the_file_in_progress(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w" * 2_000_000})
    hub.chunk_delay_s = 0.5

    def interrupt_at_the_weights(done: int, total: int) -> None:
        deadline = time.monotonic() + 60
        while not (len(finished(tmp_path)) == len(SMALL) and unfinished(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client("org/model", on_bytes=interrupt_at_the_weights)
    assert sorted(finished(tmp_path)) == sorted(SMALL)
    assert [request.method for request in hub.requests if request.path.startswith("/cdn")] == ["GET"]
    assert unfinished(tmp_path) == []
    hub.chunk_delay_s = 0
    pinned = client("org/model")
    assert files_in(pinned) == sorted([*SMALL, "model.safetensors"])
    assert [request.range for request in hub.requests if request.path.startswith("/cdn")] == [None]
    assert not [request for request in hub.requests if request.path.endswith(".json") and request.method == "GET"]


def finished(folder) -> list[str]:
    return [path.name for path in (folder / "cache").rglob("snapshots/*/*")]


def unfinished(folder) -> list[str]:
    return [path.name for path in (folder / "cache").rglob("*.incomplete")]


def test_processes_of_one_machine_download_each_file_once(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w" * 500_000})
    hub.chunk_delay_s = 0.1
    threads = [threading.Thread(target=client, args=["org/model"]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([request for request in hub.requests if request.path.startswith("/cdn")]) == 1


def test_another_machine_downloads_the_pinned_commit_and_a_directory_stays_one(hub, client, tmp_path):
    pinned = f"org/model@{push(hub, tmp_path, SMALL | {'model.safetensors': b'old'})}"
    push(hub, tmp_path, SMALL | {"model.safetensors": b"new"})
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    ticks: list[None] = []
    options = {
        "on_progress": lambda: ticks.append(None),
        "environment": inherited | hub.environment(tmp_path / "cache"),
    }
    folder = directory_on_node(pinned, **options)
    assert (tmp_path / folder / "model.safetensors").read_bytes() == b"old"
    assert ticks
    assert directory_on_node("/models/mine", **options) == "/models/mine"


# Tests of downloads that fail


def refusal(client, path: str, **more: str) -> str:
    with pytest.raises(ConfigError) as error:
        client(path, **more)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"model.path={path}: ")
    return text.removeprefix(f"model.path={path}: ")


def test_an_unknown_name_may_be_a_directory_that_does_not_exist(hub, client):
    expected = f"no such directory, and no model of that name on {hub.url}; check the name, and set HF_TOKEN if the"
    assert refusal(client, "outputs/x").startswith(expected)
    assert refusal(client, "outputs/x", HF_TOKEN="hf_other").startswith(expected)


def test_a_private_model_is_unknown_without_a_token(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    hub.hide("org/model", "hf_reader")
    assert "no model of that name" in refusal(client, "org/model")
    assert client("org/model", HF_TOKEN="hf_reader").startswith("org/model@")


def test_a_gated_model_asks_for_the_licence_and_the_token(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    hub.gate("org/model", "hf_reader")
    way_out = (
        f"accept its licence on {hub.url}/org/model, and set HF_TOKEN to a token of the account that accepted the "
        "licence"
    )
    assert refusal(client, "org/model") == f"the model is gated, and no HF_TOKEN is set; {way_out}"
    assert refusal(client, "org/model", HF_TOKEN="hf_other") == (
        f"the model is gated, and HF_TOKEN belongs to an account without access; {way_out}"
    )
    assert client("org/model", HF_TOKEN="hf_reader").startswith("org/model@")


def test_an_unknown_revision_is_named(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    expected = f"org/model has no branch, tag or commit 'v9'; {hub.url}/org/model/tree/main lists the branches and tags"
    assert refusal(client, "org/model@v9") == expected
    assert "has no branch, tag or commit" in refusal(client, f"org/model@{'0' * 40}")


def test_a_model_that_is_not_in_the_cache_is_refused_offline(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    assert refusal(client, "org/model@v1", HF_HUB_OFFLINE="1") == (
        f"no such directory, and {tmp_path}/cache/hub does not hold the whole model, and HF_HUB_OFFLINE forbids a "
        "download; unset HF_HUB_OFFLINE, or run `hf download org/model --revision v1` on a machine with a network"
    )
    assert hub.requests == []


def test_a_hub_that_cannot_be_reached_is_named(hub, client):
    said = refusal(client, "org/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("no such directory, and http://127.0.0.1:9 cannot be reached (ConnectError: [Errno 111]")
    assert said.endswith("try again later, check the network and HF_ENDPOINT, or give a directory")


def test_a_hub_that_is_out_of_order_is_named(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    hub.be_unavailable(1000)
    said = refusal(client, "org/model")
    assert f"{hub.url} cannot be reached (HTTPStatusError: Server error '503 Service Unavailable'" in said


def test_a_connection_that_stays_broken_is_refused_and_the_next_attempt_keeps_the_files(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w" * 1000})
    hub.break_connection("model.safetensors", at=500, times=1000, reset=True)
    said = refusal(client, "org/model")
    assert said.startswith(f"the download from {hub.url} broke off (")
    assert "Connection reset by peer" in said
    assert said.endswith("start again: complete files are kept")
    hub.break_connection("model.safetensors", at=0, times=0)
    client("org/model")
    (last,) = [request.path for request in hub.requests if request.method == "GET" and "/api/" not in request.path]
    assert last.startswith("/cdn")


def test_a_full_disk_is_named(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w" * 5000})
    assert refusal(client, "org/model", PYTHONPATH=full_disk(tmp_path, "download")) == (
        f"the model cannot be stored in {tmp_path}/cache/hub (OSError: [Errno 28] No space left on device); free space "
        "there, or set HF_HOME to another folder"
    )


def test_a_cache_that_cannot_be_written_to_is_named(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    (tmp_path / "file").write_text("")
    said = refusal(client, "org/model", HF_HOME=str(tmp_path / "file"))
    assert said.startswith(
        f"the model cannot be stored in {tmp_path}/file/hub (NotADirectoryError: [Errno 20] Not a directory"
    )


def test_a_download_that_dies_is_told(hub, client, tmp_path):
    push(hub, tmp_path, SMALL | {"model.safetensors": b"w"})
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(
        "import os, sys\nprint('hello', flush=True)\nsys.stderr.write('no luck'); sys.stderr.flush(); os._exit(3)"
    )
    assert refusal(client, "org/model", PYTHONPATH=str(tmp_path / "fault")) == (
        "the download ended with status 3 (no luck); try again"
    )
