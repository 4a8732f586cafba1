"""Tests that the documents' commands are accepted, their recipes run, and their files and metrics exist."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from rltrain import doctor, report
from rltrain.main import main
from rltrain.monitoring.catalogue import METRICS
from rltrain.run.preflight import SHM_BYTES
from rltrain.settings.algorithm_rules import check_algorithm
from rltrain.settings.command_line import parse_args
from rltrain.settings.compose import compose
from rltrain.settings.config_groups import choices
from tests.documents import ROOT, bash_lines
from tests.presets import preset

PRESETS = "config/algorithm/README.md"
GUIDES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "examples/README.md", "docker/README.md", PRESETS, *GUIDES]
WITHOUT_COMMANDS = {
    "docs/coming-from-other-trainers.md",
    "docs/metrics.md",
    "docs/how-it-is-built.md",
    "docs/invariants.md",
}
LONGEST_README = 200  # Maximum number of lines: about five minutes of reading.
COMMAND = "python -m rltrain.main"
TINY = [
    "placement=inprocess", "rollout=hf", "trainer.total_steps=2", "trainer.prompts_per_step=4",
    "trainer.prompts_per_minibatch=2", "rollout.samples_per_prompt=4", "data.val_size=4",
]  # fmt: skip


def runs(document):
    """Return the arguments of each command in a document that starts a run.

    The command need not begin at the start of its line.
    """
    return [line.partition(COMMAND)[2] for line in bash_lines(document) if COMMAND in line]


def named_files(document):
    """Return (path, content) of each file that a document shows as a line with only a path, and then a code block."""
    return re.findall(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```$", (ROOT / document).read_text(), re.S | re.M)


def written_file(document, name, folder):
    """Write the file `name` into `folder` with the content that a document shows, and return the file's path."""
    (content,) = [content for path, content in named_files(document) if path == name]
    (folder / name).write_text(content)
    return folder / name


def script(name, *overrides, **environment):
    """Run an example script with tiny settings, and return its standard output."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **environment}
    command = ["bash", str(ROOT / "examples" / name), *TINY, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics_of(run):
    files = [run / "metrics.jsonl", run / "evaluations.jsonl"]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_has_commands(document):
    assert bool(bash_lines(document)) != (document in WITHOUT_COMMANDS)


def test_the_readme_is_short_and_leads_to_every_guide():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= LONGEST_README
    linked = {*re.findall(r"\((docs/[\w-]+\.md)\)", text)}
    linked |= {
        f"docs/{page}" for guide in linked for page in re.findall(r"\]\(([\w-]+\.md)", (ROOT / guide).read_text())
    }
    assert sorted(linked) == GUIDES


@pytest.mark.parametrize(("document", "arguments"), [(name, text) for name in DOCUMENTS for text in runs(name)])
def test_a_command_of_a_document_is_accepted(document, arguments, tmp_path):
    args = parse_args(shlex.split(arguments, comments=True))
    files = [
        str(ROOT / file if (ROOT / file).exists() else written_file(document, file, tmp_path)) for file in args.files
    ]
    if args.action == "sweep":
        assert any("," in text for text in args.overrides)  # tests/e2e/test_sweep.py runs sweeps.
        return
    check_algorithm(compose(args.overrides, files)[0])


def test_a_command_that_writes_a_report_is_accepted():
    command = "python -m rltrain.report"
    lines = [line.partition(command)[2] for name in DOCUMENTS for line in bash_lines(name) if command in line]
    parsed = [report.parse(shlex.split(line, comments=True)) for line in lines]
    assert [len(folders) for folders, _ in parsed] == [1, 2]


def test_the_commands_that_examine_a_run_are_accepted():
    command = "python -m rltrain.doctor"
    lines = [line.partition(command)[2] for name in DOCUMENTS for line in bash_lines(name) if command in line]
    assert [len(doctor.parse(shlex.split(line, comments=True))) for line in lines] == [1, 2]


def test_a_command_of_the_readme_goes_through_main(capsys):
    assert main(["algorithm=ppo", "trainer.total_steps=60", "--cfg"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["algorithm"]["advantage_estimator"] == "gae"


def test_a_make_target_of_a_document_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = {word for name in DOCUMENTS for line in bash_lines(name) for word in _targets(line)}
    assert {"demo", "test", "check"} <= called <= targets


def _targets(line):
    words = shlex.split(line, comments=True)
    return words[1:] if words[:1] == ["make"] else []


def test_ci_runs_what_contributing_says():
    command = "make check test optional-test"
    assert any(line.startswith(command) for line in bash_lines("CONTRIBUTING.md"))
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == command


def test_a_script_of_the_examples_exists_and_is_executable():
    named = {word for line in bash_lines("examples/README.md") for word in line.split() if word.endswith(".sh")}
    assert named == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.sh")}
    assert all(os.access(ROOT / name, os.X_OK) for name in named)


def test_the_readmes_table_has_every_preset():
    section = (ROOT / "README.md").read_text().partition("## Algorithms")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    assert sorted(["grpo", *(name for row in rows for name in re.findall(r"`(\w+)`", row))]) == choices("algorithm")


def test_the_index_of_presets_says_what_each_is_made_of():
    rows = re.findall(r"^\| `(\w+)` \|.*?\| `(\w+)`[^|]*\| `(\w+)` \|", (ROOT / PRESETS).read_text(), re.M)
    algorithms = {name: compose(preset(name))[0].algorithm for name in choices("algorithm")}
    assert sorted(rows) == [(name, a.advantage_estimator, a.loss_mode) for name, a in algorithms.items()]


def test_the_index_of_presets_names_the_papers_that_their_files_name():
    for name, paper in re.findall(r"^\| `(\w+)` \| \[.*?\]\((.*?)\)", (ROOT / PRESETS).read_text(), re.M):
        first = (ROOT / "config" / "algorithm" / f"{name}.yaml").read_text().splitlines()[0]
        assert paper.replace("https://arxiv.org/abs/", "arXiv:") in first


def test_the_methods_that_combine_other_parts_are_accepted():
    methods = re.findall(r"^\| (\w[^|]*) \| \[[^|]*\| `(algorithm=[^`|]*)` \|$", (ROOT / PRESETS).read_text(), re.M)
    assert [name for name, _ in methods] == [
        "LitePPO", "VC-PPO", "LUSPO", "INTELLECT-3 (IcePop with a mean over all tokens of the batch)",
        "self-normalised importance sampling", "TR-DPO's reference updates, in GRPO", "MIS, masked importance sampling",
        "SDFT, whose teacher is a moving average of the policy",
        "Kimi K2.5's policy loss, with bounds and coefficients of our own, because the report gives none",
    ]  # fmt: skip
    for _, settings in methods:
        check_algorithm(compose(settings.split())[0])


def test_the_readme_shows_the_example_files_as_they_are():
    ((path, content),) = named_files("README.md")
    assert (ROOT / path).read_text() == content
    shown = re.search(r"`(\S+)` begins\n\n```json\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert (ROOT / shown[1]).read_text().startswith(shown[2])


def test_links_of_a_document_lead_somewhere():
    for document in DOCUMENTS:
        links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / document).read_text())
        assert all((ROOT / document).parent.joinpath(link).exists() for link in links), document


def test_each_node_of_the_compose_file_restarts_and_has_room_beside_the_object_store():
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert list(services) == ["head", "worker"]
    for service in services.values():
        assert service["restart"] == "unless-stopped"
        assert service["volumes"] == ["outputs:/outputs"]
        shared, memory = (int(service[name].removesuffix("gb")) << 30 for name in ("shm_size", "mem_limit"))
        store = int(re.search(r"--object-store-memory=(\d+)", service["command"])[1])
        assert shared - store >= SHM_BYTES  # the minimum of the pre-flight check of a cluster
        assert memory > 2 * shared


@pytest.mark.slow
def test_the_algorithm_of_contributing_works(tmp_path):
    for folder in ("rltrain", "workers", "config", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    files = named_files("CONTRIBUTING.md")
    assert len(files) == 3
    for path, content in files:
        assert not (tmp_path / path).exists(), f"{path} exists in the project: show another algorithm"
        (tmp_path / path).write_text(content)
    tests = [files[2][0], "tests/unit/algorithms/test_masks.py", "tests/unit/algorithms/test_knobs.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    assert "spo" in subprocess.run(
        [sys.executable, "-m", "rltrain.main", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    ).stdout  # fmt: skip


@pytest.mark.slow
def test_the_recipe_for_own_data_trains_and_the_catalogue_explains_its_metrics(tmp_path):
    printed = script("own_data.sh", f"trainer.output_dir={tmp_path / 'run'}")
    assert "scored by right, length" in printed
    *_, last = [record for record in metrics_of(tmp_path / "run") if "reward/mean" in record]
    assert last["reward/mean"] == pytest.approx(last["reward/right/mean"] - 0.01 * last["reward/length/mean"], abs=1e-5)
    assert unexplained(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name", "turns"),
    [
        pytest.param("my_env.py", "FewGuesses", 5, marks=pytest.mark.broad),
        ("my_table.py", "Table", 6),
        ("my_agent.py", "run", 5),
    ],
)
def test_the_environments_and_the_agent_of_the_guide_train(tmp_path, file, name, turns):
    written_file("docs/agents.md", file, tmp_path)
    (command,) = [text for text in runs("docs/agents.md") if file in text and "MODEL" not in text]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    arguments = [*shlex.split(command), *TINY, "trainer.output_dir=run"]
    done = subprocess.run(
        [sys.executable, "-m", "rltrain.main", *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"with {file}:{name}; <= {turns} turns per conversation" in done.stdout
    assert all(-0.6 <= record["reward/mean"] <= 1 for record in metrics_of(tmp_path / "run") if "reward/mean" in record)
    assert unexplained(tmp_path / "run") == []


def unexplained(run):
    """Return the names of a run's metrics that are missing from the catalogue."""
    names = {name for record in metrics_of(run) for name in record} - {"step"}
    return [name for name in sorted(names) if not any(metric.matches(name) for metric in METRICS)]


@pytest.mark.broad
@pytest.mark.slow
def test_the_recipe_that_compares_algorithms_ends_with_a_table(tmp_path):
    printed = script("compare_algorithms.sh", ALGORITHMS="ppo gspo", OUT=str(tmp_path))
    header, *rows = printed.splitlines()[-3:]
    assert header.split() == [
        "run",
        "reward/mean",
        "rollout/length_mean",
        "eval/sampled_accuracy",
        "eval/greedy_accuracy",
    ]
    assert [row.split()[0] for row in rows] == ["gspo", "ppo"]
    assert all(len(re.findall(r"[\d.e-]+ -> [\d.e-]+", row)) == 4 for row in rows)
    assert unexplained(tmp_path / "ppo") == []


def test_the_librarys_example_runs_and_trains(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/algorithms.md").read_text(), re.DOTALL)
    (example,) = (block for block in blocks if "from rltrain.algorithms import" in block)
    names = {}
    exec(compile(example, "docs/algorithms.md", "exec"), names)
    gradient = names["log_probs"].grad
    assert (gradient[0] < 0).all()  # A step of gradient descent makes the right answer more likely.
    assert (gradient[1] > 0).all()
    assert "ppo_kl" in capsys.readouterr().out
