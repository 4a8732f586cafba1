"""A teacher behind an HTTP endpoint, which returns the log-probs of given tokens.

The endpoint must have vLLM's OpenAI-compatible completions API, for example `vllm serve MODEL`. Each request sends the
token ids of a prompt and its response as one token sequence, which the completions API treats as a prompt. The request
asks for `prompt_logprobs` and for a single new token, which is ignored. The run does not start the server behind the
endpoint. The HTTP client comes from the package `openai`, which is installed with vLLM; the client reuses connections
and retries failed requests.
"""

import asyncio
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.base.errors import ConfigError, one_line
from rltrain.base.secret_values import redacted
from rltrain.settings.distillation_config import DistillationConfig, TeacherConfig

_SHOWN = 160  # Maximum number of characters that an error message quotes from a server's error.
_PROBED = 64  # Number of tokens whose texts are compared between the tokenizers of policy and endpoint.
_PLAIN = re.compile(r"[A-Za-z0-9]+")


class TeacherEndpoint:
    """HTTP client of one teacher endpoint.

    Args:
        teacher: settings of the teacher.
        config: settings of the distillation, such as the time limit and the number of simultaneous requests.
    """

    def __init__(self, teacher: TeacherConfig, config: DistillationConfig) -> None:
        self.teacher, self.config, self.model = teacher, config, teacher.model

    async def log_probs(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[list[float] | str]:
        """Return the log-probs of the response tokens of each row, in nats.

        If the endpoint does not answer a request after all retries, `log_probs` sends no further requests.

        Args:
            rows: pairs (token ids of a prompt, token ids of a response). Each prompt has at least one token.

        Returns:
            For each row, the log-probs of the response's tokens, or a text that says why the row has no log-probs.
        """
        client, free, down = self._client(), asyncio.Semaphore(self.config.max_concurrent), list[str]()

        async def of_row(prompt: list[int], response: list[int]) -> list[float] | str:
            if not response:
                return []
            async with free:
                return down[0] if down else await self._of_row(client, prompt, response, down)

        async with client:
            return list(await asyncio.gather(*(of_row(*row) for row in rows)))

    async def _of_row(self, client: Any, prompt: list[int], response: list[int], down: list[str]) -> list[float] | str:
        import openai

        try:
            entries = await self._prompt_log_probs(client, prompt + response)
            return _chosen(entries, prompt + response)[len(prompt) - 1 :]
        except (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError) as error:
            down.append(self._shown(error))
            return down[0]
        except (openai.OpenAIError, ValueError) as error:
            return self._shown(error)

    async def probe(self, tokenizer: Any, prompt: list[int], longest: int) -> None:
        """Check before the run that the endpoint can score the answers of the policy.

        Args:
            tokenizer: the policy's tokenizer.
            prompt: token ids of a training prompt, which the check sends to the endpoint.
            longest: maximum number of tokens in a row (prompt and response) that the endpoint must accept.

        Raises:
            ConfigError: the endpoint does not answer, gives no prompt log-probs, accepts only rows shorter than
                `longest`, or has another tokenizer than the policy.
        """
        import openai

        where = f"{self.teacher.key}={self.teacher.path}"
        async with self._client() as client:
            try:
                ids = [*prompt, *_plain_tokens(tokenizer)]
                limit = await self._length_limit(client)
                entries = await self._prompt_log_probs(client, ids[: limit - 1 if limit else None])
            except openai.OpenAIError as error:
                raise ConfigError(
                    f"{where}: does not answer a request with token ids ({self._shown(error)}); start the server, for "
                    "example with `vllm serve MODEL`, and give its address, which ends with /v1"
                ) from None
            except ValueError as error:
                raise ConfigError(f"{where}: {self._shown(error)}; serve the teacher with vLLM") from None
        if limit is not None and limit <= longest:
            raise ConfigError(
                f"{where}: the endpoint accepts {limit} tokens (max_model_len), but a row may have {longest} tokens "
                f"and one more token is generated; start the server with --max-model-len {longest + 1} or more"
            )
        if difference := _difference(tokenizer, entries, ids):
            raise ConfigError(
                f"{where}: has another tokenizer than the policy ({difference}); use a teacher with the policy's "
                "tokenizer"
            )

    def _client(self) -> Any:
        """Return a new client of the endpoint's API."""
        try:
            import openai
        except ImportError:
            raise ConfigError(
                f"{self.teacher.key}={self.teacher.path}: an endpoint needs the package openai, which is not "
                "installed; install it, or vLLM, which depends on it"
            ) from None
        name = self.teacher.api_key_env
        # If `api_key_env` is not set, the API key is "none", because for the API key None the client would use the
        # environment variable OPENAI_API_KEY.
        key = os.environ.get(name, "") if name else "none"
        if not key:
            raise ConfigError(
                f"{self.teacher.key}: api_key_env={name}: this environment variable is not set; export it"
            )
        return openai.AsyncOpenAI(
            base_url=self.teacher.path, api_key=key, timeout=self.config.timeout_s, max_retries=self.config.retries
        )

    async def _length_limit(self, client: Any) -> int | None:
        """Return the endpoint's limit on prompt tokens plus new tokens, or None if the endpoint reports no limit.

        If the config names no model, the first call of `_length_limit` selects the endpoint's first model as the
        teacher.

        Raises:
            ValueError: the endpoint has no model, or no model with the configured name.
        """
        models = {model.id: model async for model in client.models.list()}
        self.model = self.model or next(iter(models), None)
        if self.model not in models:
            if not models:
                raise ValueError("serves no model")
            raise ValueError(f"has no model {self.model}; its models are {', '.join(models)}")
        limit = getattr(models[self.model], "max_model_len", None)
        return limit if isinstance(limit, int) else None

    async def _prompt_log_probs(self, client: Any, ids: list[int]) -> list[Any]:
        """Return the endpoint's mapping from token ids to log-probs for each token in `ids` except the first.

        Raises:
            ValueError: the endpoint's reply contains no prompt log-probs for the given tokens.
        """
        if self.model is None:
            await self._length_limit(client)
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
        answer = await client.post("/completions", body=body, cast_to=object)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError):
            entries = None
        if not isinstance(entries, list) or len(entries) != len(ids):
            count = len(entries) if isinstance(entries, list) else "no"
            raise ValueError(f"the endpoint gave {count} prompt_logprobs for {len(ids)} tokens")
        return entries[1:]

    def _shown(self, error: Exception) -> str:
        name = self.teacher.api_key_env
        key = os.environ.get(name, "") if name else ""
        body = getattr(error, "message", "") or str(error)
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        return one_line(" ".join(redacted(f"{kind}{body}", keys=[key] if key else []).split()), _SHOWN)


def _chosen(entries: list[Any], ids: Sequence[int]) -> list[float]:
    """Return the log-prob of each token in `ids` except the first token.

    Raises:
        ValueError: a token has no finite log-prob.
    """
    found = []
    for entry, token in zip(entries, ids[1:], strict=True):
        value = _of_token(entry, token).get("logprob")
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the endpoint gave no log-prob of token {token}")
        found.append(float(value))
    return found


def _of_token(entry: Any, token: int) -> Mapping[str, Any]:
    values = entry.get(str(token)) if isinstance(entry, Mapping) else None
    return values if isinstance(values, Mapping) else {}


def _plain_tokens(tokenizer: Any) -> list[int]:
    """Return token ids that are spread over the whole vocabulary, in ascending order.

    The text of each returned token consists only of ASCII letters and digits.
    """
    special, ids = set(tokenizer.all_special_ids), sorted(tokenizer.get_vocab().values())
    step = max(1, len(ids) // (4 * _PROBED))
    texts = {token: tokenizer.decode([token]).strip() for token in ids[::step] if token not in special}
    plain = [token for token, text in texts.items() if _PLAIN.fullmatch(text)]
    return plain[:: max(1, len(plain) // _PROBED)]


def _difference(tokenizer: Any, entries: list[Any], ids: Sequence[int]) -> str:
    """Describe the first token whose text differs between the tokenizers of the policy and the endpoint.

    Return "" if the tokenizers of the policy and the endpoint agree on the text of every compared token.
    """
    for entry, token in zip(entries, ids[1:], strict=False):
        own, theirs = tokenizer.decode([token]).strip(), _of_token(entry, token).get("decoded_token")
        # Instead of a token's text, some versions of vLLM return the token's vocabulary entry, in which a special
        # character, such as U+2581, stands for a space.
        bare = theirs.lstrip("\u0120\u2581 ").strip() if isinstance(theirs, str) else own
        if _PLAIN.fullmatch(own) and bare != own:
            return f"token {token} is {own!r} for the policy and {bare!r} for the endpoint"
    return ""
