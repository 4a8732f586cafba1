"""Implements the driver's part of scoring with reward models: rendering and tokenizing texts, and receiving scores.

Reward functions score an answer as soon as it is finished. Reward models run on the training ranks and score a group
after all reward functions have scored the group.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from workers.training.reward_model import RewardModelWorker
from workers.training.shared_columns import FORWARD
from workers.training.worker_group import WorkerGroup


class RewardModel:
    """The driver's interface to one reward model.

    The driver holds the tokenizer of the reward model, and the training ranks hold the weights of the reward model.

    Args:
        config: config of this reward model.
        group: worker group of this reward model.
        number: index of this reward model's column in the matrix `reward_components`.
        tokenizer: tokenizer of this reward model, which may differ from the policy's tokenizer.
        longest: maximum length of a batch row that the reward model can read, in tokens; None for no limit.
        pad: id of the padding token. The reward model scores a row at the row's last non-padding token, as the library
            transformers does.
        max_tokens: maximum number of tokens in one forward pass. If a row of a batch has more tokens than `max_tokens`,
            a forward pass may have as many tokens as the longest row of the batch.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        group: WorkerGroup[RewardModelWorker],
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

    async def scores(self, samples: Sequence[tuple[Prompt, str]]) -> list[float | str]:
        """Score each pair of a prompt and a response text with the reward model.

        If several samples have the same token ids, their score is computed only once, so identical answers to the same
        prompt in one call of `scores` get exactly the same score.

        Returns:
            For each sample, the sample's score, or a text that says why the sample has no score.
        """
        found: list[float | str | tuple[int, ...]] = [self._tokens(prompt, response) for prompt, response in samples]
        rows = list(dict.fromkeys(row for row in found if isinstance(row, tuple)))
        scores = dict(zip(rows, await self._scores_of(rows), strict=True))
        return [scores[row] if isinstance(row, tuple) else row for row in found]

    async def _scores_of(self, rows: list[tuple[int, ...]]) -> list[float | str]:
        if not rows:
            return []
        tokens, nothing = jagged([list(row) for row in rows], torch.int64), jagged([[] for _ in rows], torch.int64)
        batch = DataProto.from_dict({"prompts": tokens, "responses": nothing})
        budget = max(self.max_tokens, *map(len, rows))
        columns = await self.group.rows(RewardModelWorker.compute_scores, batch, FORWARD, max_tokens=budget)
        scored = columns.batch["model_scores"].tolist()
        return [score if math.isfinite(score) else f"gave {score}" for score in scored]

    def _tokens(self, prompt: Prompt, response: str) -> tuple[int, ...] | str:
        """Return a sample's untruncated token ids, or a text that says why the reward model cannot read the sample.

        If the prompt or response contains the name of a control token as text, the name is encoded as ordinary tokens,
        so that an answer cannot end the chat turn by writing the name of the end token.
        """
        own = self.config.prompt_template is None and bool(self.tokenizer.chat_template)
        try:
            if own and prompt.messages is not None:
                ids = self._ids([*prompt.messages, {"role": "assistant", "content": response}], self._chat, chat=True)
            else:
                ids = self._ids([prompt.text, response], self._plain, chat=False)
        except TemplateError as error:
            return f"cannot read the sample: {error}"
        except ControlTokenError as error:
            return f"the text contains the name of a control token and cannot be encoded as ordinary text ({error})"
        row = tuple(one_bos(ids, self.tokenizer.bos_token_id))
        while len(row) > 1 and row[-1] == self.pad:
            row = row[:-1]
        if self.longest is not None and len(row) > self.longest:
            return (
                f"cannot read {len(row)} tokens, because the model's limit is {self.longest}; lower "
                "rollout.max_response_length"
            )
        return row or "cannot score a text without tokens"

    def _ids(self, sample: list[Any], write: Callable[[list[Any]], str], *, chat: bool) -> list[int]:
        """Return the token ids of the text that the function `write` renders from a sample.

        If `chat` is True, the tokenizer adds no special tokens, because the rendered chat template already contains
        them.
        """
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


def reward_models(config: Config, groups: Sequence[WorkerGroup[RewardModelWorker]]) -> list[RewardModel]:
    """Create the reward models of a run from their worker groups, which are in the order of `reward.models`."""
    first, budget = len(config.reward.functions), config.actor.max_tokens_per_microbatch
    return [
        RewardModel(
            model,
            group,
            number=number,
            tokenizer=load_tokenizer(model.path, model.key),
            longest=longest_row(model.path),
            pad=text_config(model.path).get("pad_token_id"),
            max_tokens=budget,
        )
        for number, (model, group) in enumerate(zip(config.reward.models, groups, strict=True), start=first)
    ]


async def with_model_scores(groups: Sequence[Group], models: Sequence[RewardModel]) -> None:
    """Compute the scores of the reward models, and append them in place to the results of the given groups.

    Results that already have the scores of the reward models do not change. The reward models do not score a sample for
    which a reward function failed. A sample that a reward model cannot score is marked as failed.
    """
    for model in models:
        due = [(g, n) for g in groups for n, result in g.results.items() if len(result.scores) == model.number]
        alive = [(g, n) for g, n in due if not g.results[n].failed]
        found = await model.scores([(group.prompt, group.trajectories[n].text) for group, n in alive])
        scores = {(group.uid, n): score for (group, n), score in zip(alive, found, strict=True)}
        for group, n in due:
            result, score = group.results[n], scores.get((group.uid, n))
            if isinstance(score, str):
                result = replace(
                    result,
                    scores=(None,) * model.number,
                    failed=True,
                    success=None,
                    failed_function=model.number,
                    error=f"reward model '{model.config.name}' {score}",
                )
                score = None
            group.results[n] = replace(result, scores=(*result.scores, score))
