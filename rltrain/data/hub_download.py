"""The process that downloads a model from the hub for `rltrain.data.hub`.

The download process writes messages to its standard output, one JSON object per line. Each message about the progress
has the form {"bytes": [done, total]}. The last message of the download process has the form {"folder": path} or
{"error": reason and remedy}.
"""

import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from rltrain.base.errors import described, one_line
from rltrain.data.download_process import is_of_disk, remove_unfinished_files_at_sigterm

# Only files in the top folder of a model repository are downloaded. Subfolders of a model repository (onnx, original,
# gguf) hold the same model in formats for other programs.
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_SAFETENSORS = ["model.safetensors", "model-*.safetensors"]
_TORCH = ["pytorch_model.bin", "pytorch_model-*.bin"]
_FOLDERS = ["*/*"]
_ATTEMPTS, _PAUSE_S = 3, 1.0
_EVERY_S = 0.2  # Minimum time between two progress messages, in seconds.
_QUERY = re.compile(r"\?[^\s'\"]*")  # Matches the query string of a URL, which may contain a signature.


def main(model: str, revision: str | None) -> None:
    """Download a model, and write progress and the result to the standard output as JSON."""
    remove_unfinished_files_at_sigterm()
    try:
        _say(folder=str(_persistently(model, revision)))
    except Exception as error:
        _say(error=_explained(error, model, revision))


def snapshot(model: str, revision: str | None, **options: Any) -> Path:
    """Download the model files that a run needs, and return the model's snapshot folder in the cache.

    Model weights are downloaded as safetensors files. Torch files, an older format, are used only if the model has no
    safetensors files.

    Args:
        model: the model's name on the hub, without its revision.
        revision: branch, tag or commit to download; None for the main branch.
        options: keyword arguments that are passed on to `huggingface_hub.snapshot_download`.
    """
    from huggingface_hub import snapshot_download

    def having(revision: str | None, weights: list[str]) -> Path:
        wanted: dict[str, Any] = {"allow_patterns": [*_SMALL, *weights], "ignore_patterns": _FOLDERS, **options}
        return Path(snapshot_download(model, revision=revision, **wanted))

    folder = having(revision, _SAFETENSORS)
    if any(folder.glob("model*.safetensors")):
        return folder
    return having(folder.name, ["*.safetensors"] if _names_weights(folder) else _TORCH)


def _names_weights(folder: Path) -> bool:
    """Return whether config.json has the key `transformers_weights`.

    The value of `transformers_weights` in config.json is the name of the weight file that transformers loads.
    """
    try:
        return "transformers_weights" in json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False


def _persistently(model: str, revision: str | None) -> Path:
    """Download a model, and try again after a broken connection.

    Files that are already complete are not downloaded again.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return snapshot(model, revision, tqdm_class=_progress_class())
        except (HfHubHTTPError, LocalEntryNotFoundError, ValueError):
            # A further download attempt would not help: the hub has answered with an error, or huggingface_hub has
            # already tried several times.
            raise
        except Exception as error:
            if attempt == _ATTEMPTS or is_of_disk(error):
                raise
            time.sleep(_PAUSE_S * attempt)
    raise AssertionError("the last download attempt neither returned a result nor raised an error")


def _progress_class() -> type:
    """Return a progress-bar class that writes messages instead of displaying bars.

    huggingface_hub creates several progress bars: one bar counts files, and the other bars count bytes. The same byte
    can be counted by two progress bars, once when the byte is received and once when the byte is written to disk.
    """
    from tqdm.auto import tqdm

    bars: list[Any] = []
    last = [0.0]

    class Progress(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})
            if self.unit == "B":
                bars.append(self)

        def display(self, *_: Any, **__: Any) -> None:
            """Display nothing, although tqdm calls this method to draw the bar."""

        def update(self, n: float | None = 1) -> None:
            """Count downloaded bytes, and write a progress message if the last message is `_EVERY_S` seconds old."""
            super().update(n)
            if self.unit == "B" and time.monotonic() - last[0] >= _EVERY_S:
                last[0] = time.monotonic()
                totals = [bar.total for bar in bars if bar.total]
                _say(bytes=[int(max(bar.n for bar in bars)), int(min(totals, default=0))])

    return Progress


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _explained(error: Exception, model: str, revision: str | None) -> str:
    """Return a one-line description of a download error and its remedy."""
    from huggingface_hub import constants, errors, get_token, is_offline_mode

    page, reason = f"{constants.ENDPOINT}/{model}", _reason(error)
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        token = "HF_TOKEN belongs to an account without access" if get_token() else "no HF_TOKEN is set"
        return (
            f"the model is gated, and {token}; accept its licence on {page}, and set HF_TOKEN to a token of the "
            "account that accepted the licence"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no branch, tag or commit '{revision}'; {page}/tree/main lists the branches and tags"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no such directory, and no model of that name on {constants.ENDPOINT}; check the name, and set HF_TOKEN "
            "if the model is private"
        )
    if status in (401, 403):
        return (
            f"{constants.ENDPOINT} refuses the token ({reason}); set HF_TOKEN to a valid token that may read the model"
        )
    if is_offline_mode() and isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        option = f" --revision {revision}" if revision else ""
        return (
            f"no such directory, and {constants.HF_HUB_CACHE} does not hold the whole model, and HF_HUB_OFFLINE "
            f"forbids a download; unset HF_HUB_OFFLINE, or run `hf download {model}{option}` on a machine with a "
            "network"
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or (status is not None):
        return (
            f"no such directory, and {constants.ENDPOINT} cannot be reached ({reason}); try again later, check the "
            "network and HF_ENDPOINT, or give a directory"
        )
    if is_of_disk(error):
        cache = constants.HF_HUB_CACHE
        return f"the model cannot be stored in {cache} ({reason}); free space there, or set HF_HOME to another folder"
    return f"the download from {constants.ENDPOINT} broke off ({reason}); start again: complete files are kept"


def _reason(error: BaseException) -> str:
    """Return the message of the root cause of an error, on one line and without the query strings of URLs."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(_QUERY.sub("", described(error, 400)), 200)
