"""A built-in task with several turns: the policy calls tools or plays a game with an environment.

The task's starting model is trained to imitate flawed conversations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from rltrain.tasks.base import SPLITS, Example

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

Message = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class ConversationTask:
    """A task in which the policy finds the answer to a question in a conversation with an environment.

    `max_prompt_length` and `max_response_length` are counted in tokens of the task's own tokenizer.

    Attributes:
        name: key in `rltrain.tasks.TASKS`.
        environment: import path `module:class` of the environment.
        reward: import path `module:function` of the reward function that scores the conversation.
        draw: function that takes a split and a random generator, and returns a row with the column `question` and the
            columns for the environment and the reward.
        mess: function that takes a row and a random generator, and returns a flawed conversation: the messages from the
            user's question to the last message of the assistant.
        max_turns: suggested maximum number of the assistant's messages in a conversation.
        max_prompt_length: number of tokens in the longest prompt, including the description of the tools.
        max_response_length: suggested maximum number of tokens after the prompt, including the environment's tokens.
        tools: functions that the policy can call.
        phrases: texts that the task's tokenizer encodes as one token each.
        examples_per_step: number of flawed conversations in one optimizer step when the starting model is trained.
        model: value of the config key `model.path` that names the task's starting model.
    """

    name: str
    environment: str
    reward: str
    draw: Callable[[str, Random], Row]
    mess: Callable[[Mapping[str, Any], Random], list[Message]]
    max_turns: int
    max_prompt_length: int
    max_response_length: int
    tools: Sequence[Callable[..., Any]] = ()
    phrases: Sequence[str] = ()
    examples_per_step: int = 24
    model: str = "builtin"

    def prompts(self, split: str, seed: int, count: int) -> list[Row]:
        """Draw `count` rows with the column `question` and the columns for the environment and the reward.

        With the same seed, a call with a smaller `count` returns the first rows of a call with a larger `count`.

        Raises:
            ValueError: the split is unknown, or `count` is below 0.
        """
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: a built-in task has the splits {', '.join(SPLITS)}")
        if count < 0:
            raise ValueError(f"count={count}: the number of rows must be at least 0")
        rng = Random(f"{self.name}/{split}/{seed}")
        return [self.draw(split, rng) for _ in range(count)]

    def tokenizer(self) -> "Qwen2Tokenizer":
        """Build the task's tokenizer, which has a chat template."""
        from rltrain.tasks.chat_tokenizer import chat_tokenizer

        return chat_tokenizer(self.tools, self.phrases)

    def examples(self, tokenizer: "Qwen2Tokenizer", rng: Random, size: int) -> list[Example]:
        """Draw `size` flawed conversations for supervised training."""
        from rltrain.tasks.chat_tokenizer import schemas

        rows = self.prompts("train", rng.getrandbits(64), size)
        described = schemas(self.tools)
        return [_encoded(tokenizer, described, self.mess(row, rng)) for row in rows]


def _encoded(tokenizer: "Qwen2Tokenizer", schemas: list[Any] | None, messages: list[Message]) -> Example:
    """Convert a conversation to a training example in which the model learns to predict only the assistant's tokens."""
    from rltrain.tasks.chat_tokenizer import sampled

    text = str(tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False))
    ids = tokenizer.encode(text.removesuffix("\n"), add_special_tokens=False)
    return Example(ids, sampled(ids, tokenizer))
