"""The part of a rollout worker that samples turns of trajectories for environment processes."""

import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rltrain.base.errors import described
from rltrain.batch.token_arrays import int_array
from rltrain.data.turn_rendering import TurnRenderer
from rltrain.environments.tool_calls import TOOL_CALL_FORMATS, BrokenCall, ParsedAction, plain_text
from rltrain.rewards.loading import import_function
from workers.rollout.messages import Completion, Request
from workers.rollout.turns import TurnFormat, TurnRequest, TurnResult

Parser = Callable[[str], ParsedAction]  # Function that finds the tool calls in the text of an action.
RENDERERS = 64  # Maximum number of cached renderers for requests that bring their own tools.
PROMPTS = 64  # Maximum number of cached prompts.
CUT = "\n[cut off after {tokens} tokens]"  # Mark that is appended to a message whose text was cut off.


class TurnServer:
    """Converter from turn requests to engine requests, and from the engine's answers to turn results.

    Args:
        tokenizer: Tokenizer of the model.
        renderer: Object that converts new messages to the token ids that are appended to a context.
        parse: Function that finds the tool calls in the text of an action. Only actions in turns with tools are parsed.

    Attributes:
        open: Maps the engine's request key of each unfinished turn to a tuple: the client that requested the turn, the
            unfinished result, and the function that finds the tool calls in the text of the action.
        finished: Maps each client to the finished turns that the client has not polled yet.
    """

    def __init__(self, tokenizer: Any, renderer: TurnRenderer, parse: Parser) -> None:
        self.tokenizer, self.renderer, self.parse = tokenizer, renderer, parse
        self.open: dict[tuple[int, ...], tuple[str, TurnResult, Parser]] = {}
        self.finished: dict[str, list[TurnResult]] = {}
        self._numbers = itertools.count()
        self._renderers: dict[str, TurnRenderer] = {}  # Renderers for requests that bring their own tools.
        # Token ids of rendered prompts. The trajectories of a prompt group mostly have the same prompt.
        self._prompts: dict[str, list[int]] = {}
        # A lock is needed, because several threads call `begin` and the renderer has only one rendering process.
        self._rendering = threading.Lock()

    def begin(self, client: str, turns: Sequence[TurnRequest]) -> tuple[list[Request], list[TurnResult]]:
        """Render the messages of the requested turns.

        Returns:
            The requests to send to the engine, and the results of turns without an action. A turn has no action if its
            messages leave no tokens for an action or cannot be rendered.
        """
        requests, ended = [], []
        for turn in turns:
            with self._rendering:
                result, prompt_ids, max_tokens = self._begun(turn)
            if result.error or result.full:
                ended.append(result)
                continue
            # A request key for the engine ends with a consecutive number instead of the index of the turn, so that
            # every request key is unique. With the index of the turn, a request key could equal the key of an
            # unfinished request that a dead client process has left for the same turn.
            key = (*turn.key[:2], next(self._numbers))
            tools = self.renderer.tools if turn.tools is None else turn.tools
            # Without tools, a text that looks like a call is an ordinary answer.
            self.open[key] = client, result, self.parse if tools else plain_text
            requests.append(Request(key, prompt_ids, turn.temperature, max_tokens, turn.seed))
        return requests, ended

    def store(self, client: str, results: Sequence[TurnResult]) -> None:
        """Store finished turns of a client until the client polls."""
        self.finished.setdefault(client, []).extend(results)

    def _begun(self, turn: TurnRequest) -> tuple[TurnResult, list[int], int]:
        """Return a turn's unfinished result, the context of the action, and the action's maximum number of tokens."""
        first, messages = turn.key[2] == 0, list(turn.messages)
        new_context = not turn.context_ids and not turn.action_ids
        try:
            renderer = self.renderer if turn.tools is None else self._renderer_with(turn.tools)
            if not first:
                prompt = _prompt_of(messages) if new_context else []
                messages = prompt + [self._shortened(one, turn.max_message_tokens) for one in messages[len(prompt) :]]
            if first and new_context:
                observed = self._first_prompt(renderer, messages, turn.tools)
            elif new_context:
                observed = renderer.prompt_ids(messages)
            else:
                observed = renderer.observation_ids(messages, turn.action_ids)
        # The chat template may raise any exception, because an agent program can send messages and tools for which the
        # template was not written.
        except Exception as error:
            refused = isinstance(error, ValueError)
            said = str(error) if refused else f"the messages cannot be rendered: {described(error)}"
            return TurnResult(turn.key, error=said, serial=turn.serial), [], 0
        result = TurnResult(turn.key, int_array(observed), messages=messages, serial=turn.serial)
        if first and len(observed) > turn.max_prompt_tokens:
            said = (
                f"the prompt has {len(observed)} tokens (including the descriptions of the tools and the text of "
                f"the environment's reset), above rollout.max_prompt_length={turn.max_prompt_tokens}"
            )
            return replace(result, error=said), [], 0
        room = turn.room if first else turn.room - len(observed)
        context = [*turn.context_ids, *turn.action_ids, *observed]
        return replace(result, full=room < 1), context, min(room, turn.max_tokens)

    def _first_prompt(
        self, renderer: TurnRenderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Return the token ids of a trajectory's prompt, rendered once for all trajectories with the same prompt."""
        try:
            key = json.dumps([messages, tools])
        except TypeError:  # JSON cannot express a value in the messages, so the prompt cannot be cached.
            return renderer.prompt_ids(messages)
        if key not in self._prompts:
            ids = renderer.prompt_ids(messages)
            _make_room(self._prompts, PROMPTS)
            self._prompts[key] = ids
        return self._prompts[key]

    def _renderer_with(self, tools: Sequence[Mapping[str, Any]]) -> TurnRenderer:
        """Return a renderer whose prompts describe the tools in `tools`.

        Raises:
            ValueError: the chat template cannot add turns to conversations with `tools`.
        """
        key = json.dumps(tools, sort_keys=True)
        if key not in self._renderers:
            renderer = self.renderer.with_tools(tools)
            if refusal := renderer.probe(["tool", "user"] if tools else ["user"]):
                raise ValueError(f"the model's chat template cannot add turns to a conversation: {refusal}")
            _make_room(self._renderers, RENDERERS)
            self._renderers[key] = renderer
        return self._renderers[key]

    def _shortened(self, message: Mapping[str, Any], limit: int) -> Mapping[str, Any]:
        """Return a message with its text cut off after `limit` tokens, and with a mark at the end of a cut-off text.

        A message of the assistant is returned unchanged.
        """
        text = message["content"]
        if message["role"] == "assistant":
            return message
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return message
        kept = self.tokenizer.decode(ids[:limit], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return {**message, "content": kept + CUT.format(tokens=limit)}

    def deliver(self, completions: Sequence[Completion]) -> None:
        """Convert the engine's answers to finished turns, and store the turns until the clients poll."""
        for one in completions:
            if (turn := self.open.pop(one.key, None)) is None:
                continue  # The turn was aborted before it was submitted to the engine, so no client waits for it.
            client, result, parse = turn
            ids = list(one.token_ids)
            written = self.renderer.action_text(ids)
            action = parse(written)
            done = replace(
                result,
                token_ids=one.token_ids,
                log_probs=one.log_probs,
                versions=one.versions,
                finish_reason=one.finish_reason,
                text=self.tokenizer.decode(ids, skip_special_tokens=True),
                action=action,
                written=written if any(isinstance(call, BrokenCall) for call in action.calls) else "",
            )
            self.store(client, [done])

    def has(self, client: str) -> bool:
        """Return whether there are finished turns that a client has not polled yet."""
        return bool(self.finished.get(client))

    def take(self, client: str) -> list[TurnResult]:
        """Return and forget the finished turns of a client."""
        return self.finished.pop(client, [])

    def abort(self) -> None:
        """Forget all turns."""
        self.open.clear()
        self.finished.clear()


def _prompt_of(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the prompt of a new context: all messages before the assistant's first message."""
    return list(itertools.takewhile(lambda message: message["role"] != "assistant", messages))


def _make_room(cache: dict[str, Any], most: int) -> None:
    """Remove the oldest entries of a cache until one more entry fits, so that the cache has at most `most` entries."""
    while len(cache) >= most:
        cache.pop(next(iter(cache)))


def turn_server(tokenizer: Any, turn_format: TurnFormat, stop_ids: Sequence[int]) -> TurnServer:
    """Return the `TurnServer` of a rollout worker."""
    renderer = TurnRenderer(tokenizer, tools=turn_format.tools, stop_ids=stop_ids)
    return TurnServer(tokenizer, renderer, parser_of(turn_format.tool_format))


def parser_of(tool_format: str) -> Parser:
    """Return the function that finds tool calls in a text.

    Args:
        tool_format: name of a format in `TOOL_CALL_FORMATS`, or path of the user's function, `package.module:function`
            or `file.py:function`.

    Raises:
        ConfigError: the user's function cannot be imported.
    """
    if tool_format in TOOL_CALL_FORMATS:
        return TOOL_CALL_FORMATS[tool_format]
    return import_function(tool_format, f"rollout.tool_format={tool_format}")
