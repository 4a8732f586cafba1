"""Runs the commands that README.md and the guides in docs/ show, scaled down by overrides.

Stand-ins take the place of what only a user has: a model, files with prompts, a reward function and a finished run. The
commands of one document run one after another in one process.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chat_model import save_chat_model
from tests.documents import ROOT, bash_lines
from tests.e2e.test_readme import GUIDES, TINY, WITHOUT_COMMANDS, named_files

# Commands that this file does not run. Maps a part of each such command to the test that runs the command.
ELSEWHERE = {
    "make ": "the targets of the Makefile, of which CI runs `make check test optional-test`",
    "rltrain[wandb,mlflow,trackio]": "make tracker-test",
    "trainer.trackers=[tensorboard,wandb]": "make tracker-test",
    "trainer.trackers=[wandb,mlflow,trackio]": "make tracker-test",
    "data=higher_lower rollout.environment=my_env.py": "tests/e2e/test_readme.py",
    "rollout.environment=my_table.py": "tests/e2e/test_readme.py",
    "rollout.agent=my_agent.py": "tests/e2e/test_readme.py",
    "spelling.py:Spelling": "make environment-test",
    "python my_server.py": "tests/unit/workers/environments/test_mcp_tools.py, which starts MCP servers",
    "path: http://127.0.0.1:8000/v1}": "tests/unit/test_distillation_in_process.py, which starts an endpoint",
    "path: judge": "tests/unit/rewards/test_judge.py, which starts an endpoint",
    "rltrain.main -m": "tests/e2e/test_sweep.py",
    "sbatch": "tests/cluster/test_slurm.py",
    "ray ": "tests/cluster/test_guide.py",
    "rollout.vllm.arguments": "tests/cluster/test_guide.py",
}
MODEL = r"(?<==)(?:MODEL|DIR|path/to/(?:model|student)|Qwen/Qwen2\.5-0\.5B-Instruct(?:@main)?)(?=\s|$)"
HUB_DATA = r"openai/gsm8k:main:(?:train|test)"
# Maps an override of `TINY` to a setting. Commands with this setting run without the override. For example, a command
# with several ranks needs several processes.
NOT_WITH = {"placement=inprocess": "placement.actor_ranks=", "rollout=hf": "rollout=stored"}
SMALLER = {"groups: 16": "groups: 2", "critic.warmup_steps=10": "critic.warmup_steps=1"}
ROW = {"prompt": "What is 2 + 3?", "question": "What is 2 + 3?", "answer": "#### 5", "demonstration": "2 + 3 = 5"}
REWARD = '''"""Two reward functions."""


def score(response):
    return float(len(response))


def right(response, answer):
    return float(response == answer)
'''
EACH = """
import importlib, json, sys
for program, words in json.loads(sys.argv[1]):
    print(json.dumps([program, words]), file=sys.stderr, flush=True)
    try:
        status = importlib.import_module(program).main(words)
    except SystemExit as end:
        status = end.code
    if status:
        sys.exit(f"exit status {status}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, reward_model):
    """Return a folder with a chat model, a reward model, prompts, a reward function, and the project's examples."""
    made = tmp_path_factory.mktemp("user")
    save_chat_model(made / "chat")
    (made / "path" / "to").mkdir(parents=True)
    (made / "path" / "to" / "reward_model").symlink_to(reward_model)
    (made / "path" / "to" / "teacher").symlink_to(made / "chat")
    for name in ("train", "my", "prompts", "demonstrations", "shop", "gsm8k"):
        (made / f"{name}.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8)
    (made / "my_reward.py").write_text(REWARD)
    (made / "my.yaml").write_text("algorithm: ppo\n")
    (made / "examples").symlink_to(ROOT / "examples")
    finished([("rltrain.main", [*TINY, "trainer.output_dir=outputs/RUN"])], made)
    for name in ("OTHER_RUN", "earlier"):
        shutil.copytree(made / "outputs" / "RUN", made / "outputs" / name)
    return made


def finished(commands, folder):
    """Run commands in one process, and fail unless all of them end with exit status 0."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "JUDGE_KEY": "none"}
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(commands)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


def shown(document):
    """Return (module, arguments) of each command in a document that starts a program of rltrain on one machine."""
    lines = [line for line in bash_lines(document) if not any(part in line for part in ELSEWHERE)]
    found = [re.fullmatch(r"python -m (rltrain\.\w+)(.*)", " ".join(line.split())) for line in lines]
    assert all(found), lines
    return [(match[1], match[2]) for match in found if match is not None]


def small(program, text, output):
    """Return a command's arguments with stand-ins for models and data, and with overrides that make a run short."""
    text = re.sub(MODEL, "chat", re.sub(HUB_DATA, "gsm8k.jsonl", text))
    for part, other in SMALLER.items():
        text = text.replace(part, other)
    words = shlex.split(text, comments=True)
    if program != "rltrain.main" or "--plan" in words:
        return words
    if any("gsm8k.yaml" in word for word in words):
        words += ["model.path=chat", "data.train=gsm8k.jsonl", "data.val=gsm8k.jsonl"]
    if "model.path=chat" in words:
        words += ["rollout.max_prompt_length=400", "rollout.max_response_length=64"]
    added = [word for word in TINY if word not in NOT_WITH or NOT_WITH[word] not in text]
    if not any(word.startswith("trainer.output_dir=") for word in words):
        return [*words, *added, f"trainer.output_dir={output}"]
    return [*words, *added, "trainer.total_steps=21"]  # The guide resumes from the checkpoint of step 20.


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "document",
    ["README.md", *(pytest.param(name, marks=pytest.mark.broad) for name in GUIDES if name not in WITHOUT_COMMANDS)],
)
def test_the_commands_of_a_document_run(document, folder):
    for path, content in named_files(document):
        if not (folder / path).exists() and "/" not in path:
            (folder / path).write_text(content)
    runs = f"outputs/{Path(document).stem}"
    commands = [(program, small(program, text, f"{runs}_{n}")) for n, (program, text) in enumerate(shown(document))]
    finished(commands, folder)


def test_each_command_that_runs_elsewhere_is_shown_by_some_document_and_has_a_test():
    lines = [line for document in ["README.md", *GUIDES] for line in bash_lines(document)]
    assert [part for part in ELSEWHERE if not any(part in line for line in lines)] == []
    files = [found[0] for where in ELSEWHERE.values() if (found := re.match(r"tests/[\w/]+\.py", where))]
    assert len(files) == 10
    assert [file for file in files if not (ROOT / file).exists()] == []
