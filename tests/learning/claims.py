"""Comparisons of methods with `grpo` on tasks that suit the method, beside the table of presets."""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from rltrain.tasks import TASKS
from rltrain.tasks.tiny_model import cached_start
from tests.learning.long_answers import LIMIT, long_start
from tests.learning.trials import Outcome, Trial, over_seeds, run_all, spread, steps_to

SEEDS = (0, 1, 2)
ANSWERS_PER_STEP = 64 * 8  # profile demo
TEACHER_SEED = 100


def teacher(output: Path, steps: int) -> tuple[Path, Outcome]:
    """Train a teacher with `grpo` for `steps` steps, and return its directory and its accuracies."""
    trial = Trial(f"teacher of {steps} steps", TEACHER_SEED, (f"trainer.total_steps={steps}",))
    (outcome,) = run_all([trial], output, 1)[trial.name]
    return trial.folder(output) / "model", outcome


def taught(output: Path, steps: int) -> tuple[dict[str, tuple[str, ...]], Outcome]:
    """Return settings and goals for comparisons with a teacher that was trained with `grpo` for `steps` steps.

    Returns:
        The settings of `distill`, `mopd` and `grpo` by name, and the accuracies of the teacher.
    """
    path, goals = teacher(output, steps)
    own = f"algorithm.distillation.teachers=[{path}]"
    # The loss of `mopd` does not limit how far an update moves the policy, so it gets one update for each answer.
    mopd = ("algorithm=mopd", "trainer.prompts_per_minibatch=64", own)
    return {"distill": ("algorithm=distill", own), "mopd": mopd, "grpo": ()}, goals


def distillation(output: Path, jobs: int) -> Iterator[str]:
    """Compare the accuracies of `distill`, `mopd` and `grpo` after 40 steps."""
    methods, goals = taught(output, 120)
    yield f"teacher: {goals.last:.1%}"
    trials = [
        trial
        for name, settings in methods.items()
        for trial in over_seeds(f"{name} for 40 steps", SEEDS, *settings, "trainer.total_steps=40")
    ]
    for name, outcomes in run_all(trials, output, jobs).items():
        yield f"{name}: {spread([outcome.last for outcome in outcomes])}"


def teacher_accuracy(output: Path, jobs: int) -> Iterator[str]:
    """Compare how many steps `distill`, `mopd` and `grpo` need to reach the accuracy of a teacher.

    The teacher has been trained with `grpo` for 50 steps.
    """
    methods, goals = taught(output, 50)
    greedy = goals.greedy[50]
    yield f"teacher: {goals.last:.1%} with sampled answers, {greedy:.1%} with greedy answers"
    every = ("trainer.total_steps=80", "trainer.eval_every=4")
    trials = [
        trial
        for name, settings in methods.items()
        for trial in over_seeds(f"{name} against teacher", SEEDS, *settings, *every)
    ]
    for name, outcomes in run_all(trials, output, jobs).items():
        yield f"{name}: steps to the teacher's greedy accuracy: {steps_of([one.greedy for one in outcomes], greedy)}"
        yield f"{name}: steps to its sampled accuracy: {steps_of([one.sampled for one in outcomes], goals.last)}"


def pools(output: Path, jobs: int) -> Iterator[str]:
    """Compare the answers until 90% accuracy with and without pools, on data in which most prompts teach nothing."""
    shared = (
        *own_rows("mixed"), "trainer.total_steps=160", "trainer.eval_every=4",
    )  # fmt: skip
    trials = [
        *over_seeds("pools", SEEDS, *shared, "data.difficulty={}"),
        *over_seeds("pools-without", SEEDS, *shared),
    ]
    for name, outcomes in run_all(trials, output, jobs).items():
        answers = [steps_to(outcome.sampled, 0.9) * ANSWERS_PER_STEP for outcome in outcomes]
        yield f"{name}: answers until 90%: {', '.join(f'{count:,.0f}' for count in answers)}"


def few_prompts(output: Path, jobs: int) -> Iterator[str]:
    """Compare `w_reinforce` with `grpo` on data with only 64 prompts, which are repeated in each step."""
    shared = (*own_rows("few"), "trainer.total_steps=120")
    trials = [
        *over_seeds("few-w_reinforce", SEEDS, "algorithm=w_reinforce", *shared),
        *over_seeds("few-grpo", SEEDS, *shared),
    ]
    for name, outcomes in run_all(trials, output, jobs).items():
        each = ", ".join(f"{outcome.last:.1%}" for outcome in outcomes)
        yield f"{name}: {spread([outcome.last for outcome in outcomes])} (seeds 0, 1, 2: {each})"


def repeated_prompts(output: Path, jobs: int) -> Iterator[str]:
    """Compare NSR with `grpo` on data with only 16 prompts: accuracy, and prompts solved by one of four answers."""
    shared = (
        *own_rows("fewer"), "trainer.total_steps=60", "trainer.prompts_per_step=16", "trainer.prompts_per_minibatch=16",
        "rollout.samples_per_prompt=16",
    )  # fmt: skip
    nsr = ("algorithm=w_reinforce", "algorithm.advantage.positive_weight=0")
    trials = [*over_seeds("repeated-NSR", SEEDS, *nsr, *shared), *over_seeds("repeated-grpo", SEEDS, *shared)]
    for name, outcomes in run_all(trials, output, jobs).items():
        for what, values in (
            ("accuracy", [outcome.last for outcome in outcomes]),
            ("solved by one of four answers", [max(outcome.solved.items())[1] for outcome in outcomes]),
        ):
            yield f"{name}: {what}: {spread(values)} (seeds 0, 1, 2: {', '.join(f'{one:.1%}' for one in values)})"


def vapo(output: Path, jobs: int) -> Iterator[str]:
    """Compare `vapo` with `ppo` on answers of 203 tokens, whose first tokens decide whether an answer is right.

    In both, the critic is trained for 5 steps before the policy.
    """
    shared = (
        f"model.path={long_start()}", "profile=demo", f"rollout.max_response_length={LIMIT}",
        "trainer.prompts_per_step=32", "trainer.prompts_per_minibatch=16", "trainer.total_steps=30",
        "trainer.eval_every=5",
    )  # fmt: skip
    trials = [
        *over_seeds("vapo-long", SEEDS, "algorithm=vapo", "algorithm.advantage.alpha=1", *shared),
        *over_seeds("ppo-long", SEEDS, "algorithm=ppo", "critic.warmup_steps=5", *shared),
    ]
    for name, outcomes in run_all(trials, output, jobs).items():
        by_step = {step: fmean(outcome.sampled[step] for outcome in outcomes) for step in outcomes[0].sampled}
        yield f"{name}: {spread([outcome.last for outcome in outcomes])}"
        yield f"{name}: mean by step: {', '.join(f'{step}: {value:.1%}' for step, value in by_step.items())}"


def own_rows(name: str) -> tuple[str, ...]:
    """Return settings that train the built-in model on rows of tests/learning/rows.py."""
    task = TASKS["median"]
    return (
        f"model.path={cached_start(task)}", "profile=demo", f"data.train=tests/learning/rows.py:{name}",
        f"data.val=builtin:{task.name}", "reward=median",
    )  # fmt: skip


def steps_of(runs: list[dict[int, float]], goal: float) -> str:
    """Return the steps until `goal` of each run, separated by commas. A run is a dict from steps to accuracies."""
    return ", ".join(f"{steps_to(accuracies, goal):.0f}" for accuracies in runs)


CLAIMS: dict[str, Callable[[Path, int], Iterator[str]]] = {
    "distillation": distillation,
    "few_prompts": few_prompts,
    "pools": pools,
    "repeated_prompts": repeated_prompts,
    "teacher_accuracy": teacher_accuracy,
    "vapo": vapo,
}
