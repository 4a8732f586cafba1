"""The table of results in config/algorithm/README.md: each preset on the built-in task, over three seeds."""

from pathlib import Path

from tests.learning.claims import SEEDS, teacher
from tests.learning.trials import ROOT, Outcome, over_seeds, run_all, spread

INDEX = ROOT / "config" / "algorithm" / "README.md"
MARK = "<!-- results -->\n"
HEAD = "| preset | sampled | greedy | other settings |\n|---|---|---|---|\n"
CONVERSATIONS = ("turn_rloo", "turn_ppo", "gigpo")  # need a task with several turns
# Variants that are selected by one more setting, and settings that a preset needs on the built-in task.
VARIANTS = {
    "NSR": ("algorithm=w_reinforce", "algorithm.advantage.positive_weight=0"),
    "PSR": ("algorithm=w_reinforce", "algorithm.advantage.negative_weight=0"),
    "INTELLECT-3": ("algorithm=icepop", "algorithm.loss_agg_mode=token-mean"),
    "self-normalised TIS": ("algorithm=tis", "algorithm.correction.batch_normalize=true"),
    "squared log-ratio": ("algorithm.squared_log_ratio_coef=0.05",),
    "advantage clip": ("algorithm.advantage_clip=2",),
    "group length reward": ("algorithm.reward_shaping.group_length_weight=0.2",),
    "TR-DPO": ("algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.reference.refresh_every=10"),
    "vapo": ("algorithm=vapo", "algorithm.advantage.alpha=1"),
    "grpo_s with clipped tokens": ("algorithm=grpo_s", "algorithm.loss_mode=vanilla"),
    # These two losses do not limit how far an update moves the policy, so they need few optimizer steps on an answer.
    "ce_gppo": ("algorithm=ce_gppo", "trainer.prompts_per_minibatch=32"),
    "mopd": ("algorithm=mopd", "trainer.prompts_per_minibatch=64"),
}


def names() -> list[str]:
    """Return the names of all presets for single answers, then those of the variants."""
    presets = [path.stem for path in sorted(INDEX.parent.glob("*.yaml")) if path.stem not in CONVERSATIONS]
    return [*presets, *(name for name in VARIANTS if name not in presets)]


def settings_of(name: str, output: Path) -> tuple[str, ...]:
    """Return the command-line arguments that select a preset or a variant."""
    found = VARIANTS.get(name, (f"algorithm={name}",))
    if name in ("distill", "mopd"):
        return (*found, f"algorithm.distillation.teachers=[{teacher(output, 120)[0]}]")
    return found


def measure(wanted: list[str], output: Path, jobs: int) -> dict[str, list[Outcome]]:
    """Train each of the presets and variants for 60 steps with each seed, and return the outcomes by name."""
    trials = [
        trial
        for name in wanted
        for trial in over_seeds(name, SEEDS, *settings_of(name, output), "trainer.total_steps=60")
    ]
    return run_all(trials, output, jobs)


def write(results: dict[str, list[Outcome]], output: Path) -> None:
    """Replace the rows of the measured presets in the table of the index."""
    before, table = INDEX.read_text().split(MARK)
    rows, after = table.split("\n\n", 1)
    found = {line.split("|")[1].strip(" `"): line for line in rows.splitlines()[2:]}
    for name, outcomes in results.items():
        sampled = spread([outcome.last for outcome in outcomes])
        greedy = spread([max(outcome.greedy.items())[1] for outcome in outcomes])
        used = " ".join(setting for setting in settings_of(name, output) if setting != f"algorithm={name}")
        used = used.replace(str(output), "OUT")
        found[name] = f"| `{name}` | {sampled} | {greedy} | {f'`{used}`' if used else ''} |"
    ordered = [found[name] for name in names() if name in found]
    INDEX.write_text(before + MARK + HEAD + "\n".join(ordered) + "\n\n" + after)
