import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.monitoring.console import (
    TRAINING_DATA,
    ConsoleDisplay,
    downloading,
    next_command,
    sample_text,
    step_text,
    summary,
)
from rltrain.monitoring.heartbeat import Heartbeat, duration

METRICS = {
    "reward/mean": 0.5, "reward/right/mean": 0.5, "reward/accuracy": 0.25, "rollout/length_mean": 12.3,
    "perf/tokens_per_s": 12345.6, "actor/ppo_kl": 0.01,
}  # fmt: skip


def sample(
    response="answer", prompt="1+1=", reason="stop", score=1.0, valid=True, error="", excluded=False
) -> DataProto:
    component = [score if valid else float("nan")]
    return DataProto.from_dict(
        {
            "scores": torch.tensor([score]),
            "valid": torch.tensor([valid and not excluded]),
            "reward_components": torch.tensor([component]),
        },
        {"prompt_text": [prompt], "response_text": [response], "finish_reason": [reason], "reward_error": [error]},
    )


def console(*, terminal=False, width=80) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, color_system=None if not terminal else "auto"
    )


def screens(where: Console) -> list[str]:
    """Return the lines that were drawn on a terminal, without control sequences."""
    return [line for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", where.file.getvalue()).splitlines() if line]


def shown(batch: DataProto, *, terminal=False) -> str:
    """Return the text that the console display prints for a batch with a single sample."""
    where = console(terminal=terminal)
    display = ConsoleDisplay(10, 1, Heartbeat(where))
    display.step(1, METRICS, batch)
    return where.file.getvalue()


# Tests of console output that goes to a file or pipe instead of a terminal.


def test_a_cut_answer_that_is_in_no_statistic_is_shown_with_its_score_and_has_not_failed():
    assert "(cut at the length limit)\n    reward  0.5" in shown(sample(reason="length", score=0.5, excluded=True))
    assert "reward  failed" in shown(sample(valid=False))


def test_a_sample_of_a_run_without_rewards_is_shown_without_a_score():
    without = {"reward_components": torch.zeros(1, 0)}
    for error, text in (("", "none"), ("reset raised", "failed")):
        made = sample(error=error)
        changed = DataProto.from_dict({**made.batch, **without}, made.non_tensor_batch)
        assert f"reward  {text}" in shown(changed)


def test_failed_rewards_are_told_at_the_first_step_that_has_any_and_then_now_and_then():
    where = console()
    display = ConsoleDisplay(30, 0, Heartbeat(where))
    for step in range(1, 26):
        display.step(step, METRICS, sample(error="it [b]broke[/b]" if step > 2 else "", valid=step <= 2))
    lines = [line for line in where.file.getvalue().splitlines() if "failed" in line]
    assert [line.split(":")[0].strip() for line in lines] == ["step 3", "step 10", "step 20"]
    assert lines[0].endswith("1 of 1 rewards failed and are left out: it [b]broke[/b]")


def test_failed_conversations_are_not_told_as_failed_rewards():
    for reasons, told in ((["error", "done"], "1 of 2 conversations failed"), (["done"] * 2, "1 of 2 rewards failed")):
        where = console()
        objects = {"reward_error": ["reset raised", ""], "stop_reason": reasons}
        ConsoleDisplay(30, 0, Heartbeat(where)).failures(1, DataProto.from_dict({"x": torch.zeros(2)}, objects))
        assert f"step 1: {told} and are left out: reset raised" in where.file.getvalue()


def test_of_several_rewards_each_is_shown_before_the_accuracy():
    parts = {"reward/right/mean": 0.5, "reward/short/mean": -1.25}
    assert "reward 0.50  right 0.50  short -1.25  acc 25%  kl" in step_text({**METRICS, **parts})
    assert "reward 0.50  acc 25%" in step_text(METRICS)
    undecided = {name: value for name, value in METRICS.items() if name != "reward/accuracy"}
    assert step_text(undecided).startswith("reward 0.50  kl")


def test_a_run_without_rewards_is_told_without_a_reward():
    without = {name: value for name, value in METRICS.items() if not name.startswith("reward/")} | {"reward/mean": 0.0}
    assert step_text(without).startswith("kl 0.0100  len 12.3")
    lengths = {name: value for name, value in evaluated().items() if name.endswith("length")}
    assert lines_of(lengths) == ["held-out answers after 3 steps: 9.0 tokens"]


def evaluated(prefix="eval/", **changes):
    """Return the metrics of one evaluation set, in which the keyword arguments replace default values."""
    values = {"reward": 0.5, "accuracy": 0.5, "length": 9.0} | changes
    return {f"{prefix}{kind}_{name}": value for kind in ("sampled", "greedy") for name, value in values.items()}


def lines_of(metrics):
    where = console()
    ConsoleDisplay(10, 0, Heartbeat(where)).evaluation(3, metrics)
    return where.file.getvalue().splitlines()


def test_an_evaluation_without_a_function_that_decides_is_told_by_its_reward():
    metrics = evaluated(reward=0.125, **{"reward/format": 0.9, "reward/right": 0.1})
    metrics = {name: value for name, value in metrics.items() if "accuracy" not in name}
    assert lines_of(metrics) == [
        "held-out reward after 3 steps: sampled 0.125, greedy 0.125; format 0.90, right 0.10; 9.0 tokens"
    ]


def test_prompts_of_the_training_data_are_not_called_held_out():
    where = console()
    ConsoleDisplay(10, 0, Heartbeat(where), evaluated=TRAINING_DATA).evaluation(1, evaluated())
    assert where.file.getvalue().startswith("training-data accuracy after 1 step: sampled 50.0%")


def test_each_evaluation_set_has_a_line():
    assert lines_of(evaluated() | evaluated("eval/aime/", accuracy=0.1, pass_at_4=0.25)) == [
        "held-out accuracy after 3 steps: sampled 50.0%, greedy 50.0%; 9.0 tokens",
        "aime accuracy after 3 steps: sampled 10.0%, greedy 10.0%; pass@4 25.0%; 9.0 tokens",
    ]


def test_without_a_terminal_there_is_one_line_every_ten_steps_and_one_at_the_end():
    where = console()
    with ConsoleDisplay(25, 0, Heartbeat(where)) as display:
        for step in range(1, 26):
            display.step(step, METRICS, sample())
    lines = where.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert lines[0] == "step   10/25  reward 0.50  acc 25%  kl 0.0100  len 12.3  12,346 tok/s  0 s left"
    assert lines[2].endswith("tok/s")


class Clock:
    """A fake clock whose time advances only when a test sets the time."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in ("console", "heartbeat"):
        monkeypatch.setattr(f"rltrain.monitoring.{module}.time", made)
    return made


def beats(heartbeat, clock, *, seconds=200):
    """Let time pass, in which the heartbeat looks once a second whether a line is due."""
    for _ in range(seconds):
        clock.now += 1
        heartbeat.beat()
    return heartbeat.console.file.getvalue().splitlines()


def test_slow_steps_have_a_line_each_with_the_time_left(clock):
    """The remaining time is estimated from the steps that take 60 s, without the first step, which takes 100 s."""
    where = console()
    display = ConsoleDisplay(7, 0, Heartbeat(where))
    for step, seconds in ((1, 100), (2, 60), (3, 60), (4, 60)):
        clock.now += seconds
        display.step(step, METRICS, sample())
    ends = [line.partition("tok/s")[2] for line in where.file.getvalue().splitlines()]
    assert ends == ["", "", "  4 min left", "  3 min left"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.4, "12 s"), (89, "89 s"), (90, "2 min"), (3599, "1 h 0 min"), (11100, "3 h 5 min")]
)
def test_a_duration_reads_well(seconds, text):
    assert duration(seconds) == text


def test_a_step_that_takes_minutes_says_once_a_minute_what_it_does(clock):
    heartbeat = Heartbeat(console())
    display = ConsoleDisplay(7, 0, heartbeat)
    display.step(1, METRICS, sample())
    with display.training(lambda: "update_actor"):
        assert beats(heartbeat, clock) == [
            "step    2/7  for 60 s, now: update actor",
            "step    2/7  for 2 min, now: update actor",
            "step    2/7  for 3 min, now: update actor",
        ]


def test_a_step_that_takes_minutes_says_for_which_processes_it_waits(clock):
    heartbeat = Heartbeat(console())
    display = ConsoleDisplay(7, 0, heartbeat)
    display.step(1, METRICS, sample())
    with display.training(lambda: "update_actor", lambda: "training rank 1 (pid 7 on two)"):
        assert beats(heartbeat, clock)[0] == (
            "step    2/7  for 60 s, now: update actor; waiting for training rank 1 (pid 7 on two)"
        )


def test_a_resumed_run_names_the_step_after_its_checkpoint_and_a_finished_one_its_last_evaluation(clock):
    heartbeat = Heartbeat(console())
    display = ConsoleDisplay(7, 0, heartbeat)
    with display.training(lambda: "evaluate"):
        display.restore(4)
        assert beats(heartbeat, clock, seconds=60) == ["step    5/7  for 60 s, now: evaluate"]
        display.step(7, METRICS, sample())
        assert beats(heartbeat, clock, seconds=60)[-1] == "after the last step  for 60 s, now: evaluate"


def test_the_start_of_the_workers_and_of_the_model_have_a_line_a_minute(clock):
    heartbeat = Heartbeat(console())
    display = ConsoleDisplay(7, 0, heartbeat)
    with display.waiting("starting the workers"):
        assert beats(heartbeat, clock) == [
            "starting the workers",
            "still starting the workers after 60 s",
            "still starting the workers after 2 min",
            "still starting the workers after 3 min",
        ]
    clock.now += 3
    with display.counting("making the model") as on_step:
        on_step(1, 400)
        on_step(30, 400)
        assert beats(heartbeat, clock, seconds=90)[4:] == ["making the model", "making the model: 30/400"]


def test_a_line_is_one_line_however_long_it_is():
    where = console(width=40)
    display = ConsoleDisplay(10_000, 10, Heartbeat(where))
    display.step(10_000, {**METRICS, "perf/tokens_per_s": 12345678.0}, sample("long " * 30))
    display.evaluation(10_000, evaluated())
    lines = where.file.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("step 10000/10000")
    assert lines[0].endswith("12,345,678 tok/s")
    assert lines[3] == "    answer  " + "long " * 30
    assert lines[5] == "held-out accuracy after 10000 steps: sampled 50.0%, greedy 50.0%; 9.0 tokens"


def test_no_escape_sequence_is_written_where_there_is_no_terminal():
    where = console()
    display = ConsoleDisplay(10, 5, Heartbeat(where))
    with display, display.waiting("starting"):
        display.step(10, METRICS, sample())
    assert "\x1b" not in where.file.getvalue()
    assert where.file.getvalue().splitlines()[0] == "starting"


@pytest.mark.parametrize(("every", "steps"), [(0, []), (4, [1, 4, 8]), (1, list(range(1, 10)))])
def test_samples_come_at_the_first_step_and_then_as_often_as_asked(every, steps):
    where = console()
    display = ConsoleDisplay(100, every, Heartbeat(where))
    for step in range(1, 10):
        display.step(step, METRICS, sample())
    heads = [line for line in where.file.getvalue().splitlines() if line.startswith("  sample")]
    assert heads == [f"  sample of step {step}" for step in steps]


def test_on_a_terminal_a_bar_moves_and_no_lines_are_written():
    where = console(terminal=True)
    with ConsoleDisplay(25, 0, Heartbeat(where)) as display, display.waiting("starting"):
        pass
    with ConsoleDisplay(25, 0, Heartbeat(where)) as display:
        for step in range(1, 26):
            display.step(step, METRICS, sample())
    assert "step   10/25" not in where.file.getvalue()
    assert "25/25" in where.file.getvalue()


@pytest.mark.parametrize(
    ("extra", "kl"), [({}, 0.01), ({"reward/kl": 0.02}, 0.02), ({"reward/kl": 0.02, "actor/ref_kl": 0.03}, 0.03)]
)
def test_the_kl_shown_is_that_to_the_reference_where_there_is_one(extra, kl):
    where = console()
    ConsoleDisplay(1, 0, Heartbeat(where)).step(1, METRICS | extra, sample())
    assert f"kl {kl:.4f}" in where.file.getvalue()


# Tests that responses of a model are printed as plain text, without interpreting console markup.


MARKUP = [
    "[bold]x[/]",
    "[/]",
    "[red]",
    "[link=http://x]y[/link]",
    "a[",
    "a\\",
    "a\\\\",
    "a\\\\\\",
    "\\[/]",
    ":smile:",
    "[i]\\",
]


@pytest.mark.parametrize("text", MARKUP)
@pytest.mark.parametrize("terminal", [False, True])
def test_markup_in_a_sample_is_shown_as_it_is(text, terminal):
    assert text in shown(sample(response=text), terminal=terminal)
    assert text in shown(sample(prompt=text), terminal=terminal)
    assert sample_text(1, sample(text, text)).plain == (
        f"  sample of step 1\n    prompt  {text}\n    answer  {text}\n    reward  1"
    )


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b[2J\x1b[31mred", "\\x1b[2J\\x1b[31mred"), ("a\rb", "a\\rb"), ("a\nb", "a\\nb"),
        ("\x07\x08\x00", "\\x07\\x08\\x00"),
        ("\x9b31m", "\\x9b31m"), ("a\u202eb\u2028c", "a\\u202eb\\u2028c"), ("\ud800", "\\ud800"), ("\ttab", "\\ttab"),
        ("日本 é 😀", "日本 é 😀"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_in_a_sample_are_shown_and_never_sent(text, seen, terminal):
    written = shown(sample(response=text), terminal=terminal)
    assert seen in written
    assert not {"\r", "\x07", "\x08", "\x00", "\x9b", "\u202e"} & set(written)
    assert "\x1b[2J" not in written
    if not terminal:
        assert written.count("\n") == 4
        assert "\x1b" not in written
    written.encode()


@pytest.mark.parametrize(
    ("batch", "ending"),
    [
        (sample(), "answer  answer\n    reward  1"),
        (sample(reason="length"), "answer  answer (cut at the length limit)\n    reward  1"),
        (sample(reason="abort"), "answer  answer (aborted)\n    reward  1"), (sample(score=0.25), "reward  0.25"),
        (sample(score=0.0, valid=False), "reward  failed"),
    ],
)  # fmt: skip
def test_a_sample_says_how_it_ended_and_what_it_got(batch, ending):
    assert sample_text(1, batch).plain.endswith(ending)


def test_a_long_sample_is_cut_in_the_middle():
    text = sample_text(1, sample("b" * 300 + "e" * 300)).plain
    assert "b" * 200 + " ... " + "e" * 200 + "\n" in text
    assert "b" * 201 not in text


def test_a_sample_shows_special_tokens_and_the_score_of_each_function():
    """The test converts token ids to text with a function that writes each id in angle brackets."""
    batch = sample(score=0.5).union(
        DataProto.from_dict({"prompts": jagged([[5, 6]], torch.int64), "responses": jagged([[7]], torch.int64)})
    )
    batch.batch["reward_components"] = torch.tensor([[1.0, float("nan"), -0.5]])
    text = sample_text(1, batch, ["right", "form", "short"], lambda ids: "".join(f"<{number}>" for number in ids)).plain
    assert text.splitlines()[1:] == ["    prompt  <5><6>", "    answer  <7>", "    reward  0.5  (right 1, short -0.5)"]


def test_a_sample_shows_one_token_for_each_image():
    images = jagged([[0, 7, 7, 7, 8, 8, 0]], torch.int64)
    batch = sample(score=0.5).union(
        DataProto.from_dict(
            {
                "prompts": jagged([[5, 4, 4, 4, 4, 4, 6]], torch.int64),
                "prompt_images": images,
                "responses": jagged([[7]], torch.int64),
            }
        )
    )
    text = sample_text(1, batch, text_of=lambda ids: "".join(f"<{number}>" for number in ids)).plain
    assert text.splitlines()[1] == "    prompt  <5><4><4><6>"


def conversation(messages, *, stop_reason="answer"):
    objects = {"messages": [json.dumps(messages)], "stop_reason": [stop_reason]}
    return sample(score=1.0).union(DataProto.from_dict(non_tensors=objects))


def test_a_sample_of_a_conversation_shows_its_messages():
    call = {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": {"key": 5, "table": "t\x1b[2J"}}}
    messages = [
        {"role": "user", "content": "Start at 5"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "7\n", "name": "lookup"},
        {"role": "assistant", "content": "[bold]7"},
    ]
    assert sample_text(3, conversation(messages)).plain.splitlines() == [
        "  sample of step 3",
        "    user       Start at 5",
        "    assistant  I look. lookup(key=5, table='t\\x1b[2J')",
        "    tool       7\\n",
        "    assistant  [bold]7",
        "    reward     1  (ended by: answer)",
    ]


def test_a_long_conversation_is_cut_after_twelve_messages():
    messages = [{"role": "user", "content": str(n)} for n in range(20)]
    lines = sample_text(1, conversation(messages, stop_reason="max_turns")).plain.splitlines()
    assert lines[-3:] == [
        "    user       11",
        "    ... and 8 more messages",
        "    reward     1  (ended by: max_turns)",
    ]
    assert len(lines) == 15


def test_each_time_another_sample_is_shown():
    batch = DataProto.concat([sample(str(n)) for n in range(64)])
    assert len({sample_text(step, batch).plain.splitlines()[2] for step in range(20, 200, 20)}) == 9


# Tests of the console output at the end of a run.


def summary_of(tmp_path, *, overrides=(), finished=True, evaluations=(), other_algorithm=True):
    where = console()
    (tmp_path / "model").mkdir(parents=True)
    summary(
        where, evaluations=evaluations, steps=3, seconds=12.4, output_dir=tmp_path, curve=None,
        overrides=overrides, finished=finished, other_algorithm=other_algorithm,
    )  # fmt: skip
    return where.file.getvalue()


def test_the_summary_says_what_was_learnt_and_where_it_lies(tmp_path):
    before, after = (
        evaluated(length=c) | {"eval/sampled_accuracy": a, "eval/greedy_accuracy": b}
        for a, b, c in ((0.1, 0.2, 9.0), (0.8, 0.9, 7.5))
    )
    text = summary_of(tmp_path, evaluations=[before, before, after])
    rows = [line.split() for line in text.splitlines()]
    assert "Done after 3 steps, 12 s" in text
    assert ["sampled", "accuracy", "10.0%", "80.0%"] in rows
    assert ["greedy", "accuracy", "20.0%", "90.0%"] in rows
    assert ["answer", "length", "9.0", "7.5"] in rows
    assert ["model:", str(tmp_path / "model")] in rows
    assert "learning curve" not in text
    assert "tensorboard" not in text
    assert "Stopped early after 3 steps" in summary_of(tmp_path / "b", finished=False)


def test_a_run_that_no_other_algorithm_can_repeat_is_followed_only_by_tensorboard(tmp_path):
    assert "next:" not in summary_of(tmp_path / "a", other_algorithm=False)
    (tmp_path / "b" / "tensorboard").mkdir(parents=True)
    (line,) = [line for line in summary_of(tmp_path / "b", other_algorithm=False).splitlines() if "tensorboard" in line]
    assert line.startswith("next:           ")
    assert line.endswith(f"tensorboard --logdir {tmp_path}")


def test_brackets_in_paths_and_overrides_are_printed_as_they_are(tmp_path):
    folder = tmp_path / "[red] run :smile: 1"
    overrides = ["reward.functions=[my_reward.py:score]", "trainer.seed=3"]
    (folder / "tensorboard").mkdir(parents=True)
    text = summary_of(folder, overrides=overrides)
    assert str(folder / "model") in text
    (command,) = [line for line in text.splitlines() if line.startswith("next:")]
    assert shlex.split(command)[2:] == ["-m", "rltrain.main", "algorithm=ppo", *overrides]
    assert Path(shlex.split(command)[1]).absolute() == Path(sys.executable)
    (board,) = [line for line in text.splitlines() if "tensorboard" in line]
    assert shlex.split(board)[1:] == ["--logdir", str(folder.parent)]


def test_the_next_command_leaves_out_the_supervised_answers_of_which_nothing_would_be_learned():
    overrides = ["algorithm.sft_coef=0.1", "data.sft_response=answer", "data=sort"]
    assert next_command(overrides).endswith(" -m rltrain.main algorithm=ppo data=sort")


@pytest.mark.parametrize(
    ("overrides", "algorithm"), [([], "ppo"), (["algorithm=ppo"], "grpo"), (["algorithm=rloo", "data=sort"], "grpo")]
)
def test_the_next_command_tries_another_algorithm_in_a_folder_of_its_own(tmp_path, overrides, algorithm):
    own = [f"trainer.output_dir={tmp_path}", f"trainer.checkpoint_dir={tmp_path}/kept", "trainer.resume=auto"]
    first = next_command([*overrides, *own])
    kept = [override for override in overrides if not override.startswith("algorithm=")]
    assert shlex.split(first)[1:] == ["-m", "rltrain.main", f"algorithm={algorithm}", *kept]


def test_the_next_command_leaves_out_what_the_other_algorithm_may_refuse():
    own = ["algorithm=dapo", "algorithm.loss.clip_ratio_high=0.3", "~algorithm.loss.clip_ratio_c", "trainer.seed=3"]
    first = next_command(own)
    assert shlex.split(first)[1:] == ["-m", "rltrain.main", "algorithm=grpo", "trainer.seed=3"]


def test_of_two_overrides_for_one_key_the_next_command_keeps_the_later():
    command = next_command(["trainer.seed=1", "trainer.seed=2"])
    assert shlex.split(command)[-1] == "trainer.seed=2"
    assert "trainer.seed=1" not in command


# Downloads


def test_a_download_is_a_line_at_its_start_and_then_one_a_minute_without_a_terminal(clock):
    heartbeat = Heartbeat(console())
    with downloading(heartbeat, "org/model") as on_bytes:
        assert beats(heartbeat, clock, seconds=60) == ["still asking the hub for org/model after 60 s"]
        on_bytes(1_000_000, 90_000_000)
        on_bytes(61_000_000, 90_000_000)
        assert beats(heartbeat, clock, seconds=119)[1:] == [
            "downloading org/model",
            "downloading org/model: 61.0 MB of 90.0 MB",
        ]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_download_is_a_bar_with_its_bytes_and_its_time_on_a_terminal(clock, width):
    where = console(terminal=True, width=width)
    with downloading(Heartbeat(where), "org/a-model-with-a-long-name@" + "0" * 40) as on_bytes:
        on_bytes(5_000_000, 90_000_000)
        clock.now += 10
        on_bytes(45_000_000, 90_000_000)
    last = screens(where)[-1]
    assert "45.0 MB/90.0 MB" in last
    assert last.endswith("11 s left")
    assert len(last) <= width


def test_nothing_is_shown_of_a_model_that_is_in_the_cache():
    for terminal in (False, True):
        where = console(terminal=terminal)
        with downloading(Heartbeat(where), "org/model"):
            pass
        assert where.file.getvalue() == ""
