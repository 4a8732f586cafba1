"""Reward models as the driver sees them: the text that each reads, in its own tokens, and its scores.

The functions score an answer as soon as it is finished; the models, which live on the training ranks, score groups that
all functions are done with.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.data.chat_templates import ChatTemplates, TemplateError
from rltrain.data.control_tokens import ControlTokenError, ControlTokens
from rltrain.data.model_directory import load_tokenizer, longest_row, text_config
from rltrain.data.prompt_encoding import one_bos
from rltrain.data.prompts import Prompt
from rltrain.settings.reward_config import RewardModelConfig
from rltrain.settings.schema import Config
from rltrain.trajectories.prompt_groups import Group
from workers.training.worker_group import WorkerGroup


class RewardModel:
    """One reward model: its tokenizer is here, its weights are on the training ranks.

    Args:
        config: its own.
        group: its workers.
        number: its column of `reward_components`.
        tokenizer: the model's own, which need not be the policy's.
        longest: tokens of the longest row that it can read; None: any.
        pad: the model's padding token; it scores a row at the last other token, as transformers does.
        max_tokens: of one forward pass; a longer row is a pass of its own.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        group: WorkerGroup,
        *,
        number: int,
        tokenizer: Any,
        longest: int | None,
        pad: int | None,
        max_tokens: int,
    ) -> None:
        self.config, self.group, self.number, self.tokenizer = config, group, number, tokenizer
        self.longest, self.pad, self.max_tokens = longest, pad, max_tokens
        self._control, self._templates = ControlTokens(tokenizer), ChatTemplates()

    def scores(self, samples: Sequence[tuple[Prompt, str]]) -> list[float | str]:
        """Score (prompt, response text) each; a text in a score's place says why there is none.

        Samples of the same tokens are computed once: their scores are equal to the last bit, so that a group of equal
        answers has no spread.
        """
        found: list[float | str | tuple[int, ...]] = [self._tokens(prompt, response) for prompt, response in samples]
        rows = list(dict.fromkeys(row for row in found if isinstance(row, tuple)))
        scores = dict(zip(rows, self._scores_of(rows), strict=True))
        return [scores[row] if isinstance(row, tuple) else row for row in found]

    def _scores_of(self, rows: list[tuple[int, ...]]) -> list[float | str]:
        if not rows:
            return []
        tokens, nothing = jagged([list(row) for row in rows], torch.int64), jagged([[] for _ in rows], torch.int64)
        batch = DataProto.from_dict({"prompts": tokens, "responses": nothing})
        budget = max(self.max_tokens, *map(len, rows))
        scored = self.group.rows("compute_scores", batch, max_tokens=budget).batch["model_scores"].tolist()
        return [score if math.isfinite(score) else f"gave {score}" for score in scored]

    def _tokens(self, prompt: Prompt, response: str) -> tuple[int, ...] | str:
        """Return the row of this sample, never cut, or why there is none.

        What the prompt and the response spell is text: an answer cannot end its turn by writing the name of a token.
        """
        own = self.config.prompt_template is None and bool(self.tokenizer.chat_template)
        try:
            if own and prompt.messages is not None:
                ids = self._ids([*prompt.messages, {"role": "assistant", "content": response}], self._chat, chat=True)
            else:
                ids = self._ids([prompt.text, response], self._plain, chat=False)
        except TemplateError as error:
            return f"its chat template {error}"
        except ControlTokenError as error:
            return f"cannot read control tokens that are spelled in the text as text ({error})"
        row = tuple(one_bos(ids, self.tokenizer.bos_token_id))
        while len(row) > 1 and row[-1] == self.pad:
            row = row[:-1]
        if self.longest is not None and len(row) > self.longest:
            return f"cannot read {len(row)} tokens, its limit is {self.longest}; shorten rollout.max_response_length"
        return row or "has no token for this text"

    def _ids(self, sample: list[Any], write: Callable[[list[Any]], str], *, chat: bool) -> list[int]:
        """The ids of a sample, which `write` makes the text of; a chat template has written its own special tokens."""
        text = write(sample)
        if self._control.first_in(sample) is not None:
            return self._control.encode(sample, write, written=text, add_special_tokens=not chat)
        ids: list[int] = self.tokenizer(text, add_special_tokens=not chat, truncation=False, verbose=False)["input_ids"]
        return ids

    def _chat(self, messages: list[Any]) -> str:
        return next(self._templates.render(self.tokenizer, [messages], add_generation_prompt=False))

    def _plain(self, sample: list[Any]) -> str:
        values = dict(zip(("{prompt}", "{response}"), sample, strict=True))
        return re.sub(r"\{(?:prompt|response)\}", lambda field: values[field[0]], self.config.prompt_template or _PLAIN)


_PLAIN = "{prompt}{response}"


def reward_models(config: Config, groups: Sequence[WorkerGroup]) -> list[RewardModel]:
    """The reward models of a run, given their workers in the order of the config."""
    first, budget = len(config.reward.functions), config.actor.max_tokens_per_microbatch
    return [
        RewardModel(
            model,
            group,
            number=number,
            tokenizer=load_tokenizer(Path(model.path).expanduser(), model.key),
            longest=longest_row(Path(model.path).expanduser()),
            pad=text_config(Path(model.path).expanduser()).get("pad_token_id"),
            max_tokens=budget,
        )
        for number, (model, group) in enumerate(zip(config.reward.models, groups, strict=True), start=first)
    ]


def with_model_scores(groups: Sequence[Group], models: Sequence[RewardModel]) -> None:
    """Append the models' scores to the results of these groups, in place; those that have them keep them.

    A sample whose function failed is not looked at. One that a model cannot score is failed.
    """
    for model in models:
        due = [(g, n) for g in groups for n, result in g.results.items() if len(result.scores) == model.number]
        alive = [(g, n) for g, n in due if not g.results[n].failed]
        found = model.scores([(group.prompt, group.completions[n].text) for group, n in alive])
        scores = {(group.uid, n): score for (group, n), score in zip(alive, found, strict=True)}
        for group, n in due:
            result, score = group.results[n], scores.get((group.uid, n))
            if isinstance(score, str):
                result = replace(
                    result,
                    scores=(None,) * model.number,
                    failed=True,
                    failed_function=model.number,
                    error=f"reward model '{model.config.name}' {score}",
                )
                score = None
            group.results[n] = replace(result, scores=(*result.scores, score))
