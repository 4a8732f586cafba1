"""Checks of the teachers before a run: tokenizers, endpoints, and the columns of the data that teachers need."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.data.builtin_models import is_builtin
from rltrain.data.model_directory import load_tokenizer, text_config
from rltrain.data.prompts import PromptSet
from rltrain.settings.distillation_config import TeacherConfig
from rltrain.settings.schema import Config
from rltrain.settings.typed import require


def check_teachers(config: Config, tokenizer: Any, prompts: PromptSet) -> None:
    """Check that the teachers can score the answers of this run.

    Args:
        config: the whole config, in which models from the Hugging Face Hub are pinned to commits.
        tokenizer: the policy's tokenizer.
        prompts: the training prompts.

    Raises:
        ConfigError: a data row names no teacher or lacks a value that a teacher's template needs, a teacher has another
            tokenizer than the policy, or a teacher's endpoint does not answer or gives no prompt log-probs.
    """
    distillation = config.algorithm.distillation
    if not distillation.teachers:
        return
    for teacher in distillation.models:
        _check_tokenizer(config, teacher, tokenizer)
    _check_rows(config, prompts)
    from rltrain.trajectories.teacher_endpoint import TeacherEndpoint

    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    for teacher in distillation.teachers:
        if teacher.is_endpoint:
            asyncio.run(TeacherEndpoint(teacher, distillation).probe(tokenizer, prompts[0].ids, longest))


def _check_tokenizer(config: Config, teacher: TeacherConfig, tokenizer: Any) -> None:
    """Raise ConfigError unless every token of the policy's tokenizer has the same id in the teacher's tokenizer.

    The teacher's tokenizer is allowed to have more tokens than the policy's tokenizer.
    """
    where = f"{teacher.key}={teacher.path}"
    own, theirs = tokenizer.get_vocab(), load_tokenizer(teacher.path, teacher.key).get_vocab()
    differing = sorted((id, token) for token, id in own.items() if theirs.get(token) != id)
    if differing:
        id, token = differing[0]
        there = f"id {theirs[token]}" if token in theirs else "no id"
        raise ConfigError(
            f"{where}: has another tokenizer than the policy: {len(differing)} of {len(own)} tokens differ, the first "
            f"is {token!r}, with id {id} for the policy and {there} for the teacher; use a teacher with the policy's "
            "tokenizer"
        )
    if not is_builtin(config.model.path):
        size, least = text_config(teacher.path).get("vocab_size"), text_config(config.model.path).get("vocab_size")
        require(
            not isinstance(size, int) or not isinstance(least, int) or size >= least,
            f"{where}: has vocab_size={size}, below the policy's {least}: the policy could sample a token that the "
            "teacher does not know; use a teacher with a vocabulary at least as large",
        )


def _check_rows(config: Config, prompts: PromptSet) -> None:
    """Raise ConfigError if a data row names no teacher, or lacks a value that the teacher's prompt template inserts."""
    from rltrain.data.prompt_form import filled, template_parts
    from rltrain.data.row_error import RowError
    from rltrain.trajectories.teachers import number_of

    distillation, readers = config.algorithm.distillation, []
    column = distillation.teacher_column
    _require_columns([column] if column else [], "teacher_column", prompts)
    for teacher in distillation.teachers:
        parts = template_parts(teacher.prompt_template, key=template_key(teacher)) if teacher.prompt_template else []
        _require_columns([name for _, name in parts if name and name != "prompt"], template_key(teacher), prompts)
        readers.append(filled(parts, template_key(teacher)))
    if column is None and distillation.teachers[0].prompt_template is None:
        return
    for place, values in prompts.values():
        number = 0 if column is None else number_of(values[column], distillation, place)
        try:
            readers[number](values | {"prompt": ""})
        except RowError as error:
            raise ConfigError(f"{place}: {error}") from None


def _require_columns(names: Sequence[str], key: str, prompts: PromptSet) -> None:
    for name in names:
        require(
            name in prompts.columns,
            f"algorithm.distillation: {key} names the column '{name}', but {prompts.where} has only the columns "
            f"{', '.join(prompts.columns) or 'of the prompts'}; add the column, or name another one",
        )


def template_key(teacher: TeacherConfig) -> str:
    """Return the text that names a teacher's template in error messages."""
    return f"prompt_template of the teacher '{teacher.name}'"
