"""The driver's part of distillation: chooses teachers, makes their prompts, and adds their outputs to batches."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import ConfigError
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.data.chat_templates import ChatTemplates
from rltrain.data.model_directory import longest_row
from rltrain.data.prompt_encoding import Overlong, PromptEncoder, SpecialTokens
from rltrain.data.prompt_form import filled, template_parts
from rltrain.data.prompts import Prompt
from rltrain.data.row_error import RowError
from rltrain.settings.distillation_config import DistillationConfig, TeacherConfig
from rltrain.settings.schema import Config
from rltrain.trajectories.teacher_endpoint import TeacherEndpoint
from workers.training.kept_columns import place_column
from workers.training.shared_columns import FORWARD
from workers.training.teacher import TeacherWorker
from workers.training.worker_group import WorkerGroup

logger = logging.getLogger(__name__)
Columns = dict[str, Tensor]
PLACE = place_column("teacher_hidden")
_NOBODY = -1  # Value of the column `teacher` in a row that no teacher has scored.


class TeacherPrompts:
    """Makes the prompts that a teacher with a `prompt_template` sees instead of the policy's prompts.

    Args:
        teacher: settings of the teacher.
        tokenizer: the policy's tokenizer.
        special_tokens: how prompts that contain the name of a control token are encoded.
    """

    def __init__(self, teacher: TeacherConfig, tokenizer: Any, special_tokens: SpecialTokens) -> None:
        assert teacher.prompt_template is not None, "a teacher without a template sees the policy's prompts"
        key = f"prompt_template of the teacher '{teacher.name}'"
        parts = template_parts(teacher.prompt_template, key=key)
        self.fields = [name for _, name in parts if name is not None and name != "prompt"]
        self._write = filled(parts, key)
        self._encoder = PromptEncoder(tokenizer, special_tokens=special_tokens, templates=ChatTemplates())

    def text(self, prompt: Prompt) -> Any:
        """Return the teacher's prompt: text, or chat messages whose last user message is the filled-in template.

        Raises:
            RowError: a column that the teacher's template names has no value, or the chat messages have no user
                message.
        """
        if prompt.messages is None:
            return self._write(prompt.columns | {"prompt": prompt.text})
        last = max((n for n, one in enumerate(prompt.messages) if one["role"] == "user"), default=None)
        if last is None:
            raise RowError("the chat messages have no user message, but the teacher's template must replace one")
        said = self._write(prompt.columns | {"prompt": prompt.messages[last]["content"]})
        messages = [*prompt.messages]
        messages[last] = {**prompt.messages[last], "content": said}
        return messages

    def ids(self, prompt: Prompt, limit: int | None) -> list[int] | str:
        """Return the token ids of the teacher's prompt, or the reason as text if the teacher's prompt cannot be made.

        Args:
            prompt: the policy's prompt, with the columns of the prompt's data row.
            limit: maximum number of tokens in the teacher's prompt; None for no limit.
        """
        longest = limit if limit is not None else 1 << 62
        try:
            ((_, found),) = self._encoder.encode({0: self.text(prompt)}, lambda _: "the teacher's prompt", longest)
        except (ConfigError, RowError) as error:
            return str(error)
        return f"the teacher's prompt has more than {limit} tokens" if isinstance(found, Overlong) else found


class Teacher:
    """A teacher, which scores the batch rows assigned to it, either on the training ranks or through an endpoint.

    Args:
        config: the run's whole config.
        teacher: settings of this teacher.
        group: worker group of the teacher; None if the teacher is an endpoint.
        tokenizer: the policy's tokenizer.
    """

    def __init__(
        self, config: Config, teacher: TeacherConfig, group: WorkerGroup[TeacherWorker] | None, tokenizer: Any
    ) -> None:
        self.config, self.teacher, self.group = config, teacher, group
        self.endpoint = TeacherEndpoint(teacher, config.algorithm.distillation) if group is None else None
        self.longest = longest_row(teacher.path) if teacher.is_model else None
        self.prompts = None
        if teacher.prompt_template is not None:
            self.prompts = TeacherPrompts(teacher, tokenizer, config.data.special_tokens)

    async def score(self, batch: DataProto, rows: list[int], prompts: Sequence[Prompt]) -> tuple[DataProto, list[str]]:
        """Score the responses in the rows that are assigned to the teacher.

        Args:
            batch: the batch of the training step, including the rows that are assigned to other teachers.
            rows: indices in `batch` of the rows that the teacher scores, in ascending order.
            prompts: the policy's prompts of the rows in `rows`, in the same order.

        Returns:
            A batch with the teacher's columns, and a list of reasons why the teacher could not score a row. The batch
            and the list have one entry for each row in `rows`. The reason of a row that the teacher has scored is "".
            The teacher's columns are undefined in a row that was not scored.
        """
        if self.prompts is None and self.group is not None:
            return await self._on_ranks(self.group, batch, rows), [""] * len(rows)
        own = batch[rows].select([name for name in FORWARD if name in batch])
        seen, why = self._in_context(own, prompts)
        if self.group is not None:
            return await self._on_ranks(self.group, seen, list(range(len(seen)))), why
        return await self._at_endpoint(seen, why)

    def _in_context(self, own: DataProto, prompts: Sequence[Prompt]) -> tuple[DataProto, list[str]]:
        """Replace the policy's prompts in the batch `own` with the teacher's prompts, if the teacher has a template.

        Returns:
            The batch with the prompts that the teacher reads, and a list that contains for each row the reason why the
            teacher cannot score the row, or "" for a row that the teacher can score. If the teacher's prompt of a row
            cannot be made, the row keeps the policy's prompt.
        """
        if self.prompts is None:
            return own, several_contexts(own)
        ids, why = list[list[int]](), several_contexts(own)
        for row, (prompt, response) in enumerate(zip(prompts, own.lengths("responses").tolist(), strict=True)):
            found = self.prompts.ids(prompt, None if self.longest is None else self.longest - response)
            if isinstance(found, str):
                why[row] = found
            ids.append(batch_ids(own, row, "prompts") if isinstance(found, str) else found)
        _, others = own.pop(["prompts"])
        return DataProto.from_dict({"prompts": jagged(ids, torch.int64)}).union(others), why

    async def _on_ranks(self, group: WorkerGroup[TeacherWorker], batch: DataProto, rows: list[int]) -> DataProto:
        longest = max(batch.lengths("prompts")[rows] + batch.lengths("responses")[rows]).item()
        budget = max(self.config.actor.max_tokens_per_microbatch, int(longest))
        only = None if len(rows) == len(batch) else rows
        keep = "teacher_hidden" if self.config.algorithm.distillation.full else None
        return await group.rows(TeacherWorker.score_responses, batch, FORWARD, max_tokens=budget, only=only, keep=keep)

    async def _at_endpoint(self, batch: DataProto, why: list[str]) -> tuple[DataProto, list[str]]:
        assert self.endpoint is not None, "a teacher must score either on the training ranks or through an endpoint"
        asked = [row for row, reason in enumerate(why) if not reason]
        sent = [(batch_ids(batch, row, "prompts"), batch_ids(batch, row, "responses")) for row in asked]
        answers = dict(zip(asked, await self.endpoint.log_probs(sent), strict=True))
        why = [answer if isinstance(answer := answers.get(row), str) else reason for row, reason in enumerate(why)]
        lengths = batch.lengths("responses").tolist()
        values = [
            torch.tensor(answer) if isinstance(answer := answers.get(row), list) else torch.zeros(length)
            for row, length in enumerate(lengths)
        ]
        columns = batch.with_values("responses", teacher_log_probs=torch.cat(values))
        return columns.select(["teacher_log_probs"]), why


class Teachers:
    """All teachers of a run.

    Args:
        config: the run's whole config.
        groups: dict that maps the name of each teacher on the training ranks to the teacher's worker group.
        tokenizer: the policy's tokenizer.
        tasks: the run's background tasks. If the run is interrupted, the teachers stop waiting for replies of their
            endpoints.
    """

    def __init__(
        self,
        config: Config,
        groups: Mapping[str, WorkerGroup[TeacherWorker]],
        tokenizer: Any,
        tasks: BackgroundTasks,
    ) -> None:
        self.config, self.tasks = config.algorithm.distillation, tasks
        self.teachers = [Teacher(config, one, groups.get(one.name), tokenizer) for one in self.config.teachers]
        self._numbers = {one.name: number for number, one in enumerate(self.config.teachers)}

    async def scored(self, batch: DataProto, prompts: Sequence[Prompt]) -> tuple[DataProto, dict[str, float]]:
        """Add the columns `teacher`, `teacher_log_probs` and, for the exact KL, `teacher_hidden` to a batch.

        If the teachers' ranks keep the hidden states, the batch gets the places of its rows instead.

        The column `teacher` is -1 in a row that the row's teacher could not score. For each teacher, the number of rows
        without a score and the most common reason for a missing score are logged.

        Args:
            batch: the batch, with the columns `prompts` and `responses`.
            prompts: the policy's prompt of each row.

        Returns:
            The batch with the columns that hold the teachers' results, and the metric `actor/teacher_missing_fraction`.
        """
        numbers = [teacher_number(prompt, self.config) for prompt in prompts]
        found: list[tuple[list[int], DataProto]] = []
        for number, teacher in enumerate(self.teachers):
            rows = [row for row, own in enumerate(numbers) if own == number]
            if not rows:
                continue
            columns, why = await self._score(teacher, batch, rows, [prompts[row] for row in rows])
            found.append((rows, columns))
            for row, reason in zip(rows, why, strict=True):
                numbers[row] = _NOBODY if reason else number
            self._report(teacher.teacher.name, why)
        missing = numbers.count(_NOBODY) / len(numbers)
        batch = batch.with_values("responses", **merged(batch, found))
        batch = batch.union(DataProto.from_dict({"teacher": torch.tensor(numbers)} | merged_places(batch, found)))
        return batch, {"actor/teacher_missing_fraction": missing}

    async def _score(
        self, teacher: Teacher, batch: DataProto, rows: list[int], prompts: Sequence[Prompt]
    ) -> tuple[DataProto, list[str]]:
        """Score the rows of one teacher.

        If the run is interrupted, `_score` stops waiting for the replies of the teacher's endpoint.
        """
        scoring = teacher.score(batch, rows, prompts)
        return await (scoring if teacher.endpoint is None else self.tasks.until(scoring))

    def _report(self, name: str, why: list[str]) -> None:
        reasons = Counter(reason for reason in why if reason)
        if reasons:
            (reason, _), *_ = reasons.most_common(1)
            logger.warning(
                "teacher '%s': %d of %d answers have no distillation term: %s", name, reasons.total(), len(why), reason
            )


def teacher_number(prompt: Prompt, config: DistillationConfig) -> int:
    """Return the index of a prompt's teacher in the config's list of teachers.

    Raises:
        ConfigError: the prompt's row names no teacher of the config.
    """
    if config.teacher_column is None:
        return 0
    named = prompt.columns.get(config.teacher_column)
    return number_of(named, config, f"training prompt {prompt.index}")


def number_of(named: Any, config: DistillationConfig, place: str) -> int:
    """Return the index of the teacher whose name is given in the teacher column of a data row.

    Args:
        named: the value of the data row in the teacher column, which should be the name of a teacher.
        config: section of the config that names the teachers and the teacher column.
        place: location of the data row, for the error message.

    Raises:
        ConfigError: the value in the teacher column is not the name of a teacher in the config.
    """
    names = [teacher.name for teacher in config.teachers]
    if named in names:
        return names.index(named)
    shown = "has no value" if named is None else f"is {str(named)[:60]!r}"
    raise ConfigError(
        f"{place}: the column '{config.teacher_column}' {shown}, but must name one of the teachers "
        f"{', '.join(names)}; correct the row, or add the teacher to algorithm.distillation.teachers"
    )


def merged(batch: DataProto, found: Sequence[tuple[list[int], DataProto]]) -> Columns:
    """Merge the columns of all teachers into columns (N, ...) for the N response tokens of the whole batch.

    Each row of the batch is assigned to one teacher. The columns of a teacher contain only the rows that are assigned
    to the teacher. If teachers differ in the width of their hidden states, the hidden states are padded with zeros to
    the largest width.

    Args:
        batch: the batch whose rows the teachers have scored.
        found: for each teacher, the indices of the rows that are assigned to the teacher, in ascending order, and the
            columns that the teacher has computed for these rows.
    """
    lengths = batch.lengths("responses")
    names = {name for _, columns in found for name in columns.keys()}  # noqa: SIM118 (iterating a batch gives rows)
    names.discard(PLACE)
    result: Columns = {}
    for name in sorted(names):
        parts = [(rows, columns.values(name)) for rows, columns in found]
        if len(parts) == 1 and len(parts[0][0]) == len(batch):
            result[name] = parts[0][1]
            continue
        width = [max(values.size(1) for _, values in parts)] if name == "teacher_hidden" else []
        whole = torch.zeros(int(lengths.sum()), *width, dtype=parts[0][1].dtype)
        for rows, values in parts:
            own = torch.zeros(len(batch), dtype=torch.bool)
            own[rows] = True
            at = own.repeat_interleave(lengths).nonzero()[:, 0]
            if width:
                whole[at, : values.size(1)] = values
            else:
                whole[at] = values
        result[name] = whole
    return result


def merged_places(batch: DataProto, found: Sequence[tuple[list[int], DataProto]]) -> Columns:
    """Merge the places of hidden states that the teachers' ranks keep, into one column for the whole batch.

    The arguments are those of `merged`. If no hidden states are kept, the result is {}.
    """
    places = torch.full((len(batch),), -1)
    for rows, columns in found:
        if PLACE not in columns:
            return {}
        places[rows] = columns.batch[PLACE]
    return {PLACE: places} if found else {}


def several_contexts(batch: DataProto) -> list[str]:
    """Return for each row why a teacher cannot score the row, or "" if the row has a single context.

    A row has several contexts if, for example, an agent program shortened the conversation. Only a teacher that runs on
    the training ranks and reads the same prompts as the policy can score a row with several contexts.
    """
    if "context_starts" not in batch:
        return [""] * len(batch)
    why = (
        "the trajectory has several contexts; only a teacher that runs on the training ranks and has no prompts of its "
        "own can score it"
    )
    return [why if several else "" for several in batch.padded("context_starts").any(-1).tolist()]


def batch_ids(batch: DataProto, row: int, column: str) -> list[int]:
    """Return the token ids of one row of a column."""
    begin, end = batch.offsets(column)[row : row + 2].tolist()
    ids: list[int] = batch.values(column)[begin:end].tolist()
    return ids
