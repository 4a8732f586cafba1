"""STUB"""

from typing import Any


class TurnRenderer:
    def __init__(self, tokenizer: Any, *, tools: Any, stop_ids: Any) -> None:
        self.t, self.tools, self.stops = tokenizer, list(tools), set(stop_ids)

    def prompt_ids(self, messages: Any) -> list[int]:
        text = self.t.apply_chat_template(
            messages, tools=self.tools or None, tokenize=False, add_generation_prompt=True
        )
        return self.t.encode(text, add_special_tokens=False)

    def observation_ids(self, messages: Any, action_ids: Any) -> list[int]:
        a = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        before = self.t.apply_chat_template(a, tokenize=False)
        after = self.t.apply_chat_template(a + list(messages), tokenize=False, add_generation_prompt=True)
        end = before.rindex("y") + 1
        text = after[end:]
        ids = self.t.encode(text, add_special_tokens=False)
        if action_ids and action_ids[-1] in self.stops and ids and ids[0] == action_ids[-1]:
            ids = ids[1:]
        return ids

    def action_text(self, ids: Any) -> str:
        ids = list(ids)
        if ids and ids[-1] in self.stops:
            ids = ids[:-1]
        return self.t.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def probe(self) -> str | None:
        return None
