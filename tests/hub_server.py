"""A small local model hub, from which real clients download models and data sets.

Tests can make the hub fail.

The server implements the parts of the hub's protocol that `huggingface_hub` and `datasets` use: information about
repositories, lists of files, and file contents. Kinds of files that are usually large are served through a redirect to
another host, as on the real hub. A client finds the server through the environment variables of `Hub.environment`.
`huggingface_hub` reads environment variables when it is imported, so clients run in processes of their own.
"""

import hashlib
import json
import re
import shutil
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".parquet", ".arrow", ".gz", ".zip", ".zst")
_KINDS = {"models": "model", "datasets": "dataset", None: "model"}
_ID = r"(?P<id>[^/]+(?:/(?!(?:revision|tree|paths-info|refs|resolve)(?:/|$))[^/]+)?)"
_API = re.compile(
    rf"^/api/(?P<kind>models|datasets)/{_ID}(?:/(?P<verb>revision|tree|paths-info|refs)"
    r"(?:/(?P<revision>[^/]+)(?:/(?P<path>.+))?)?)?$"
)
_FILE = re.compile(rf"^/(?:(?P<kind>datasets)/)?{_ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)$")
_CDN = re.compile(r"^/cdn/(?P<oid>[0-9a-f]{64})$")
_COMMIT = re.compile(r"^[0-9a-f]{7,40}$")
_CHUNK = 1 << 16


@dataclass(frozen=True)
class StoredFile:
    """A file of a commit. The attribute `oid` is Git's hash of the file's content."""

    size: int
    oid: str
    sha256: str
    large: bool

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid

    def facts(self) -> dict[str, Any]:
        large = {"lfs": {"oid": self.sha256, "size": self.size, "pointerSize": 134}} if self.large else {}
        return {"oid": self.oid, "size": self.size, **large}


@dataclass
class Repository:
    """A repository: its commits by hash, the commit hash of each branch and tag, and the access rights.

    The attribute `readers` holds the access tokens that can read a gated repository's files or see a private
    repository.
    """

    commits: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    readers: tuple[str, ...] = ()

    def commit(self, revision: str) -> str | None:
        """Return the commit hash that a branch, a tag or a shortened hash stands for."""
        named = self.branches | self.tags
        if revision in named or not _COMMIT.match(revision):
            return named.get(revision)
        return next((commit for commit in self.commits if commit.startswith(revision)), None)


@dataclass(frozen=True)
class Request:
    """A request that the server received. The attribute `range` is the HTTP header that asks for a part of a file."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class _Break:
    """A fault that breaks the connection at byte `at` of a file, for the next `left` requests."""

    at: int
    left: int
    reset: bool


class _Server(ThreadingHTTPServer):
    """HTTP server that reports no error if a client disconnects in the middle of an answer."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Hub:
    """The hub server, which runs inside a `with` block.

    Args:
        store: Folder for the content of files, which the hub creates.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        store.mkdir(parents=True, exist_ok=True)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[Request] = []
        self.delay_s = 0.0
        self.chunk_delay_s = 0.0
        self._breaks: dict[str, _Break] = {}
        self._unavailable = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment variables that point a client to the server and put its cache into the folder `home`.

        The caller has to remove HF_HUB_OFFLINE and HF_TOKEN from the client's environment.
        """
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}

    # --- content of the hub ---

    def push(self, name: str, folder: Path, *, kind: str = "model", branch: str = "main") -> str:
        """Make a commit of all files of a folder, and move the branch to it. Returns the commit's hash."""
        files = {
            path.relative_to(folder).as_posix(): self._keep(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        repository = self.repositories.setdefault((kind, name), Repository())
        listing = json.dumps([name, branch, len(repository.commits), {path: file.oid for path, file in files.items()}])
        commit = hashlib.sha1(listing.encode()).hexdigest()
        repository.commits[commit] = files
        repository.branches[branch] = commit
        return commit

    def tag(self, name: str, tag: str, *, kind: str = "model", commit: str | None = None) -> None:
        """Make a tag point to a commit, which is the newest commit of `main` by default."""
        repository = self.repositories[kind, name]
        repository.tags[tag] = commit or repository.branches["main"]

    def _keep(self, path: Path) -> StoredFile:
        content = path.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        sha256 = hashlib.sha256(content).hexdigest()
        shutil.copyfile(path, self.store / sha256)
        return StoredFile(len(content), git, sha256, path.name.endswith(LARGE))

    # --- faults ---

    def gate(self, name: str, *tokens: str, kind: str = "model") -> None:
        """Make the repository gated: only clients with one of the given access tokens can read its files.

        Clients without one of the tokens see only the repository and its list of files.
        """
        self.repositories[kind, name].gated = True
        self.repositories[kind, name].readers = tokens

    def hide(self, name: str, *tokens: str, kind: str = "model") -> None:
        """Make the repository private, so that it does not exist for clients without one of the given tokens."""
        self.repositories[kind, name].private = True
        self.repositories[kind, name].readers = tokens

    def break_connection(self, path: str, *, at: int, times: int = 1, reset: bool = False) -> None:
        """Close the connection at byte `at` of a file, for the next `times` requests that reach the byte.

        Args:
            path: Path of a file in its repository. The fault affects files of this path in all repositories.
            at: Number of bytes of the file before the connection breaks.
            times: Number of requests that fail.
            reset: Whether to reset the connection instead of closing it.
        """
        self._breaks[path] = _Break(at, times, reset)

    def be_unavailable(self, times: int) -> None:
        """Answer the next `times` requests with status 503."""
        self._unavailable = times

    # --- methods for the request handler ---

    def take_unavailable(self) -> bool:
        """Return whether the current request has to fail with status 503; a failing request is counted."""
        with self._lock:
            failing = self._unavailable > 0
            self._unavailable -= failing
        return failing

    def take_break(self, sha256: str, start: int, end: int) -> _Break | None:
        """Return the fault that applies to a request for bytes `start` to `end` of a file, or None."""
        with self._lock:
            for path, fault in self._breaks.items():
                if fault.left > 0 and start <= fault.at < end and sha256 in self._contents(path):
                    fault.left -= 1
                    return fault
        return None

    def _contents(self, path: str) -> set[str]:
        commits = [files for repository in self.repositories.values() for files in repository.commits.values()]
        return {files[path].sha256 for files in commits if path in files}

    def file_of(self, sha256: str) -> StoredFile | None:
        """Return the file with the given content hash."""
        commits = [files for repository in self.repositories.values() for files in repository.commits.values()]
        return next((file for files in commits for file in files.values() if file.sha256 == sha256), None)


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing, so that requests are not printed."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.token = token
        self.hub.requests.append(Request(self.command, self.path, self.headers.get("Range"), token))
        time.sleep(self.hub.delay_s)
        url = urlsplit(self.path)
        if self.hub.take_unavailable():
            self._error(503, None, "the hub is being repaired")
        elif match := _CDN.match(url.path):
            self._content(self.hub.file_of(match["oid"]), {})
        elif match := _API.match(url.path):
            self._api(match, parse_qs(url.query), body)
        elif match := _FILE.match(url.path):
            self._resolve(match)
        else:
            self._error(404, None, "Not Found")

    def _repository(self, match: re.Match[str]) -> tuple[str, Repository] | None:
        """Return the repository of a request.

        If the repository does not exist or the client may not see it, send an error and return None.
        """
        kind, name = _KINDS[match["kind"]], unquote(match["id"])
        found = self.hub.repositories.get((kind, name))
        if found is None or (found.private and self.token not in found.readers):
            # The hub does not tell unauthorised clients which private repositories exist.
            self._error(401 if self.token is None else 404, "RepoNotFound", "Repository not found")
            return None
        return name, found

    def _commit(self, repository: Repository, revision: str) -> str | None:
        """Return the commit of a request. If the commit does not exist, send an error and return None."""
        commit = repository.commit(unquote(revision))
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {unquote(revision)}")
        return commit

    def _api(self, match: re.Match[str], query: dict[str, list[str]], body: bytes) -> None:
        found = self._repository(match)
        if found is None:
            return
        name, repository = found
        if match["verb"] == "refs":
            self._json(_refs(repository))
            return
        commit = self._commit(repository, match["revision"] or "main")
        if commit is None:
            return
        files = repository.commits[commit]
        if match["verb"] == "paths-info":
            paths = _form(body, self.headers.get("Content-Type") or "").get("paths", [])
            self._json([entry for path in paths for entry in _entries(files) if entry["path"] == path.strip("/")])
        elif match["verb"] == "tree":
            self._tree(
                files, unquote(match["path"] or ""), query.get("recursive", ["false"])[0].lower() in ("true", "1")
            )
        else:
            self._json(_facts(name, repository, commit, blobs="blobs" in query))

    def _tree(self, files: dict[str, StoredFile], below: str, recursive: bool) -> None:
        inside = [entry for entry in _entries(files) if not below or entry["path"].startswith(f"{below}/")]
        if below and not inside:
            self._error(404, "EntryNotFound", f"{below} does not exist")
            return
        depth = len(PurePosixPath(below).parts) + 1
        self._json([entry for entry in inside if recursive or len(PurePosixPath(entry["path"]).parts) == depth])

    def _resolve(self, match: re.Match[str]) -> None:
        found = self._repository(match)
        if found is None:
            return
        name, repository = found
        commit, path = self._commit(repository, match["revision"]), unquote(match["path"])
        if commit is None:
            return
        if repository.gated and self.token not in repository.readers:
            ask = f"Access to {name} is restricted. Ask for access on its page."
            self._error(401 if self.token is None else 403, "GatedRepo", ask)
            return
        file = repository.commits[commit].get(path)
        if file is None:
            self._error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if file.large:
            elsewhere = f"http://localhost:{self.hub.port}/cdn/{file.sha256}"
            linked = {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.etag}"'}
            self._send(302, b"", {**headers, **linked, "Location": elsewhere})
        else:
            self._content(file, headers)

    def _content(self, file: StoredFile | None, headers: dict[str, str]) -> None:
        """Send a file, or the part that the request asks for."""
        if file is None:
            self._error(404, None, "Not Found")
            return
        part = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range") or "")
        start, end = (int(part[1]), min(int(part[2] or file.size - 1) + 1, file.size)) if part else (0, file.size)
        if part and start >= file.size:
            self._send(416, b"", {"Content-Range": f"bytes */{file.size}"})
            return
        headers = {**headers, "ETag": f'"{file.etag}"', "Content-Type": "application/octet-stream"}
        headers |= {"Content-Range": f"bytes {start}-{end - 1}/{file.size}"} if part else {}
        self._begin(206 if part else 200, end - start, headers)
        if self.command == "HEAD":
            return
        fault = self.hub.take_break(file.sha256, start, end)
        with (self.hub.store / file.sha256).open("rb") as stream:
            stream.seek(start)
            self._stream(stream, (fault.at if fault else end) - start)
        if fault:
            self._break(fault)

    def _stream(self, stream: Any, left: int) -> None:
        while left:
            chunk = stream.read(min(left, _CHUNK))
            self.wfile.write(chunk)
            left -= len(chunk)
            time.sleep(self.hub.chunk_delay_s)

    def _break(self, fault: _Break) -> None:
        self.close_connection = True
        if fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json; charset=utf-8"})

    def _error(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        errors = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {"Content-Type": "application/json; charset=utf-8", **errors})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._begin(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


def _entries(files: dict[str, StoredFile]) -> list[dict[str, Any]]:
    """Return every folder and file of a commit, in the form in which the hub lists them."""
    parents = {parent.as_posix() for path in files for parent in PurePosixPath(path).parents} - {"."}
    folders = [
        {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}
        for path in sorted(parents)
    ]
    return [*folders, *({"type": "file", "path": path, **file.facts()} for path, file in files.items())]


def _facts(name: str, repository: Repository, commit: str, *, blobs: bool) -> dict[str, Any]:
    siblings: list[dict[str, Any]] = []
    for path, file in repository.commits[commit].items():
        large = {"lfs": {"size": file.size, "sha256": file.sha256, "pointerSize": 134}} if file.large else {}
        siblings.append({"rfilename": path, **({"size": file.size, "blobId": file.oid, **large} if blobs else {})})
    return {
        "id": name, "sha": commit, "private": repository.private, "gated": "manual" if repository.gated else False,
        "disabled": False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings,
        "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z",
    }  # fmt: skip


def _refs(repository: Repository) -> dict[str, Any]:
    def listed(kind: str, named: dict[str, str]) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit} for name, commit in named.items()]

    return {"branches": listed("heads", repository.branches), "tags": listed("tags", repository.tags), "converts": []}


def _form(body: bytes, content_type: str) -> dict[str, list[str]]:
    if "json" in content_type:
        content: dict[str, list[str]] = json.loads(body)
        return content
    return parse_qs(body.decode())
