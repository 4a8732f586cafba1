"""Built-in reward functions, each of which computes a score from a prompt, a response and columns of the data.

The config names a reward function by its import path, for example `rltrain.rewards.exact_match:exact_match`. A reward
function returns None as the score if it does not apply to a sample, for example because the sample has no answer. No
module in `rltrain.rewards` imports torch. The table below lists the built-in reward functions; the options in
parentheses are optional.

| function | column | options | score |
|---|---|---|---|
| `final_answer.final_answer` | answer | | 1 if the text after the last `#` is the answer and the response is finished |
| `final_answer.exact_answer` | answer | | 1 if the whole response is the answer and the response is finished |
| `exact_match.exact_match` | answer | (ignore_case, ignore_whitespace) | 1 if the whole response is the answer |
| `numeric_match.numeric_match` | answer | (marker, answer_marker, rel_tol, abs_tol) | 1 if the last number is right |
| `math_answer.math_answer` | answer | (answer_marker, float_rounding, strict) | 1 if the expressions are equal |
| `multiple_choice.multiple_choice` | answer | (choices) | 1 if the chosen letter is the answer |
| `regex_format.regex_format` | | pattern, (full, flags) | 1 if the pattern matches |
| `json_schema.json_schema` | schema | | 1 if the response is JSON that is valid under the schema |
| `code_tests.code_tests` | tests | (timeout_s, memory_mb, all_or_nothing, entry_point) | share of tests passed |
| `length.length_penalty` | | target, (unit, both_sides) | 0 to -1: excess over the target, relative to the target |
| `length.overlong_penalty` | | max_length, buffer, (unit) | 0 to -1: share of the buffer that the response uses |
| `repetition.repetition_penalty` | | (ngram, max_penalty) | 0 to -1: share of repeated n-grams |
| `environment_reward.environment_reward` | | | the reward that the environment gave |
| `judge.judge` | all | base_url, model, (question, score, scale, ...) | the number in the answer of a judge model |
"""
