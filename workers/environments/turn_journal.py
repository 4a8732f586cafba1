"""Records the sampled turns of unfinished trajectories, so that a trajectory can continue after a process was killed.

Each sampled turn is written to a file before the environment sees the action. If the engine, the environment worker or
the driver is killed, the trajectory starts again in a fresh environment, and its first turns are read from the journal
instead of being sampled. The environment thus gets the recorded actions, and has to answer with the recorded
observations. Where an observation differs, the recorded turns are dropped, and the trajectory starts from its prompt.

An agent program can send several requests at the same time, and the order of such requests may change when the program
starts again. In a run that answers them at the same time, a recorded turn is therefore found by the content of its
request, a request that was not recorded is sampled, and the random stream of a turn depends on the content as well.

A file holds the turns of one prompt group, with one line of JSON for each turn. The driver removes the file when the
group is used or dropped.
"""

import contextlib
import hashlib
import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rltrain.base.random_streams import stream_seed
from rltrain.environments.tool_calls import BrokenCall, ParsedAction, ToolCall
from workers.environments.episode import Sampler
from workers.rollout.turns import TurnRequest, TurnResult

logger = logging.getLogger(__name__)

TrajectoryKey = tuple[int, int]


class ObservationChanged(Exception):
    """Raised in a trajectory whose environment did not answer the recorded actions with the recorded observations."""


@dataclass(frozen=True)
class RecordedTurn:
    """A sampled turn in the journal.

    Attributes:
        request: Digest of the turn's request (see `digest` and `content_digest`).
        result: The sampled action.
    """

    request: str
    result: TurnResult


class TurnJournal:
    """Stores the sampled turns of unfinished trajectories in files, one file for each prompt group.

    Args:
        folder: Folder of the files. The folder is created when the first turn is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writes = True

    def turns(self, key: TrajectoryKey) -> list[RecordedTurn]:
        """Return the recorded turns of a trajectory, in order and without gaps."""
        found: list[RecordedTurn] = []
        for number, turn in self._recorded(key):
            if number <= len(found):  # A turn that was sampled again replaces the turn and all later turns.
                found = [*found[:number], turn]
        return found

    def results_by_request(self, key: TrajectoryKey) -> dict[str, TurnResult]:
        """Return the recorded actions of a trajectory, by the digests of their requests."""
        return {turn.request: turn.result for _, turn in self._recorded(key)}

    def _recorded(self, key: TrajectoryKey) -> Iterator[tuple[int, RecordedTurn]]:
        """Yield the number and the record of each recorded turn of a trajectory, in the order of the file."""
        for line in read_lines(self._file(key[0])):
            if line["sample"] == key[1]:
                yield line["turn"], RecordedTurn(line["request"], _result_of(line["result"]))

    def add(self, request: TurnRequest, result: TurnResult, found_by: str = "") -> None:
        """Write a sampled turn. If the file cannot be written, a warning is logged, and later turns are not written.

        Args:
            request: The request for the turn.
            result: The sampled action.
            found_by: Digest by which the turn is found again; "" for `digest(request)`.
        """
        if not self._writes:
            return
        uid, sample, turn = request.key
        identity = found_by or digest(request)
        line = {"sample": sample, "turn": turn, "request": identity, "result": _state_of(result)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._file(uid).open("a") as file:
                # A killed process can leave an incomplete last line, so each record begins a new line.
                file.write(f"\n{json.dumps(line)}")
        except (OSError, TypeError, ValueError) as error:
            self._writes = False
            logger.warning("%s cannot be written (%s): killed trajectories will start again", self.folder, error)

    def forget(self, uids: Iterable[int]) -> None:
        """Remove the turns of prompt groups that are no longer in flight."""
        for uid in uids:
            self._file(uid).unlink(missing_ok=True)

    def keep_until(self, version: int) -> None:
        """Remove all turns with a token that was sampled with weights after version `version`.

        A run that continues from a checkpoint calculates the later weights again, so these turns are no longer samples
        of its policy. A turn after a removed turn is not read either.
        """
        for path in self.folder.glob("*.jsonl"):
            lines = read_lines(path)
            kept = [line for line in lines if max(line["result"]["versions"], default=0) <= version]
            if not kept:
                path.unlink()
            elif len(kept) < len(lines):
                path.write_text("".join(f"\n{json.dumps(line)}" for line in kept))

    def _file(self, uid: int) -> Path:
        return self.folder / f"{uid}.jsonl"


class JournaledSampler:
    """A sampler for one trajectory, which returns the recorded turns first, and then samples and records new turns.

    Args:
        engine: The object that samples the turns that are not in the journal.
        journal: The journal of the run.
        recorded: The recorded turns of the trajectory.
    """

    def __init__(self, engine: Sampler, journal: TurnJournal, recorded: list[RecordedTurn]) -> None:
        self.engine, self.journal, self.recorded = engine, journal, recorded

    async def sample(self, request: TurnRequest) -> TurnResult:
        """Return the recorded action of a turn, or sample the action and write it to the journal.

        Raises:
            ObservationChanged: the turn is in the journal, but for another context, other messages or other limits.
        """
        turn = request.key[2]
        if turn < len(self.recorded):
            if self.recorded[turn].request != digest(request):
                raise ObservationChanged(f"turn {turn} of trajectory {request.key[:2]} has other messages than before")
            return self.recorded[turn].result
        result = await self.engine.sample(request)
        if result.action is not None and not result.error:
            self.journal.add(request, result)
        return result


class ParallelSampler:
    """A sampler for one trajectory whose turns may be requested at the same time.

    A turn whose request was recorded is not sampled again. All other turns are sampled and recorded. The random stream
    of a turn after the first is derived from the content of its request, so the order of the requests does not matter.

    Args:
        engine: The object that samples the turns that are not in the journal.
        journal: The journal of the run.
        seed: Seed of the run or of the evaluation.
        recorded: The recorded actions of the trajectory, as `TurnJournal.results_by_request` returns them.
    """

    def __init__(self, engine: Sampler, journal: TurnJournal, seed: int, recorded: Mapping[str, TurnResult]) -> None:
        self.engine, self.journal, self.seed, self.recorded = engine, journal, seed, recorded

    async def sample(self, request: TurnRequest) -> TurnResult:
        """Return the recorded action of a turn, or sample the action and write it to the journal."""
        content = content_digest(request)
        found = self.recorded.get(content)
        if found is not None and fills(found, request):
            return replace(found, key=request.key)
        uid, sample, number = request.key
        if number:
            request = replace(request, seed=stream_seed(self.seed, uid, sample, int(content[:16], 16)))
        result = await self.engine.sample(request)
        if result.action is not None and not result.error:
            self.journal.add(request, result, content)
        return result


def fills(result: TurnResult, request: TurnRequest) -> bool:
    """Return whether a recorded action fits into the room of a request, and was not cut off before the room's end.

    The room of a request depends on the number of tokens that were recorded before the request.
    """
    observed = 0 if request.key[2] == 0 else len(result.observation_ids)
    most = min(request.max_tokens, request.room - observed)
    size = len(result.token_ids)
    return size == most if result.finish_reason == "length" else size <= most


def content_digest(request: TurnRequest) -> str:
    """Return a digest of the part of a request that does not depend on the order of the trajectory's requests.

    The digest tells the first turn apart, because the messages of the first turn are never cut off.
    """
    uid, sample, number = request.key
    return digest(replace(request, key=(uid, sample, min(number, 1)), room=0, seed=0))


def digest(request: TurnRequest) -> str:
    """Return a digest of everything that decides the distribution of a turn's action, besides the weights."""
    own = ("context_ids", "action_ids", "serial")
    plain = {name: value for name, value in vars(request).items() if name not in own}
    found = hashlib.sha256(json.dumps(plain, sort_keys=True, default=repr).encode())
    for ids in (request.context_ids, request.action_ids):
        found.update(array("q", [len(ids), *ids]).tobytes())
    return found.hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of the journal, or no lines if the file cannot be read."""
    lines = []
    with contextlib.suppress(OSError):
        for text in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def _state_of(result: TurnResult) -> dict[str, Any]:
    """Convert a turn's result with an action to plain values, which JSON can represent."""
    assert result.action is not None, "a turn without an action is not recorded"
    calls = [asdict(call) for call in result.action.calls]
    numbers = {name: list(getattr(result, name)) for name in ("observation_ids", "token_ids", "log_probs", "versions")}
    return vars(result) | numbers | {"action": {"content": result.action.content, "calls": calls}}


def _result_of(state: Mapping[str, Any]) -> TurnResult:
    """Convert the JSON form of a turn's result to a `TurnResult`."""
    action = state["action"]
    calls = [ToolCall(**call) if "arguments" in call else BrokenCall(**call) for call in action["calls"]]
    parsed = ParsedAction(action["content"], calls)
    return TurnResult(**{**state, "key": tuple(state["key"]), "action": parsed, "serial": 0})
