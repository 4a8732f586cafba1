import statistics
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from rltrain.rewards.final_answer import exact_answer, final_answer
from rltrain.tasks import TASKS, Task
from rltrain.tasks.base import split_of

REWARDS = {
    "rltrain.rewards.final_answer:final_answer": final_answer,
    "rltrain.rewards.final_answer:exact_answer": exact_answer,
}


@pytest.fixture(params=["median", "sort"])
def task(request: pytest.FixtureRequest) -> Task:
    return text_task(request.param)


def text_task(name: str) -> Task:
    task = TASKS[name]
    assert isinstance(task, Task)
    return task


def by_counting(digits: str) -> str:
    """Sort digits with a counting sort.

    As an oracle, the function shares no code with the sorting tasks.
    """
    count = Counter(digits)
    return "".join(digit * count[digit] for digit in "0123456789")


def test_the_two_examples_of_the_readme() -> None:
    assert text_task("median").solve("2299907") == "7"
    assert text_task("sort").solve("371924") == "123479"


def test_median_answers_agree_with_the_statistics_module() -> None:
    for row in text_task("median").prompts("train", 3, 300):
        assert row["prompt"].endswith("=")
        assert row["answer"] == str(statistics.median(map(int, row["prompt"][:-1])))


def test_sort_answers_agree_with_counting() -> None:
    for row in text_task("sort").prompts("train", 3, 300):
        assert row["prompt"].endswith(">")
        assert row["answer"] == by_counting(row["prompt"][:-1])


def test_every_prompt_has_the_promised_length_and_leading_zeros_are_kept(task: Task) -> None:
    rows = task.prompts("train", 0, 300)
    assert {len(row["prompt"]) for row in rows} == {task.max_prompt_length}
    assert any(row["prompt"].startswith("0") for row in rows)


def test_the_same_seed_gives_the_same_distinct_rows_and_another_seed_gives_others(task: Task) -> None:
    rows = task.prompts("train", 0, 200)
    assert task.prompts("train", 0, 200) == rows
    assert task.prompts("train", 0, 50) == rows[:50]
    assert len({row["prompt"] for row in rows}) == 200
    assert len({row["prompt"] for row in task.prompts("train", 1, 200)} & {row["prompt"] for row in rows}) < 5


def test_no_prompt_can_be_in_both_splits(task: Task) -> None:
    """For any seed, `split_of` assigns every prompt of a split to that split, so no splits overlap."""
    for split in ("train", "val"):
        for seed in range(3):
            assert {split_of(row["prompt"]) for row in task.prompts(split, seed, 100)} == {split}


def test_about_a_tenth_is_held_out_and_the_split_is_the_same_on_every_machine() -> None:
    held_out = sum(split_of(f"{number:07d}=") == "val" for number in range(5000))
    assert 400 < held_out < 600
    assert [number for number in range(40) if split_of(f"{number:06d}>") == "val"] == [11, 13, 18, 36, 39]


def test_an_unknown_split_is_refused_with_the_known_ones(task: Task) -> None:
    with pytest.raises(ValueError, match=r"split='test'.*train, val"):
        task.prompts("test", 0, 1)


def test_more_prompts_than_there_are_is_an_error_and_not_an_endless_loop(task: Task) -> None:
    with pytest.raises(ValueError, match=r"count=\d+.*ask for fewer"):
        task.prompts("val", 0, 10**task.digits)


def test_an_endless_messy_answer_fills_the_limit_and_a_finished_one_leaves_room_for_its_end(task: Task) -> None:
    rng = Random(0)
    for row in task.prompts("train", 0, 500):
        text, finished = task.messy_answer(row, rng)
        if finished:
            assert len(text) < task.max_response_length
        else:
            assert len(text) == task.max_response_length


def test_messy_answers_are_a_mixture_of_right_wrong_and_endless(task: Task) -> None:
    rng, reward = Random(0), REWARDS[task.reward]
    outcomes: Counter[str] = Counter()
    for row in task.prompts("train", 0, 2000):
        text, finished = task.messy_answer(row, rng)
        right = reward(row["prompt"], text, answer=row["answer"], finish_reason="stop")
        outcomes["endless" if not finished else "right" if right else "wrong"] += 1
    assert min(outcomes["endless"], outcomes["right"], outcomes["wrong"]) > 100


def test_a_quarter_of_the_messy_median_answers_uses_the_scratch_pad() -> None:
    task, rng = text_task("median"), Random(0)
    rows = task.prompts("train", 0, 2000)
    pads = [text for row in rows if not (text := task.messy_answer(row, rng)[0]).startswith("#")]
    assert 0.2 < len(pads) / len(rows) < 0.3


def test_the_answer_that_solves_the_task_earns_the_reward(task: Task) -> None:
    mark = "#" if task.name == "median" else ""
    for row in task.prompts("val", 0, 20):
        text = mark + row["answer"]
        assert REWARDS[task.reward](row["prompt"], text, answer=row["answer"], finish_reason="stop") == 1.0


def test_importing_the_tasks_loads_neither_torch_nor_transformers() -> None:
    script = "import sys, rltrain.tasks; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
