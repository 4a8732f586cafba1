"""Tests of the option `--plan`, and of the refusal of runs that need too much memory, through `main`."""

import json

import pytest

import rltrain.run.memory.facts
from rltrain.main import main
from rltrain.run.memory.parts import Node
from tests.chat_model import save_chat_model

CLUSTER = ["placement=colocated", "placement.nodes=2", "rollout=hf"]


def test_plan_prints_the_table_for_a_cluster_that_is_not_there(tmp_path, capsys):
    words = [*CLUSTER, "placement.node_memory_gb=8", "placement.actor_ranks=2", f"trainer.output_dir={tmp_path}/out"]
    assert main([*words, "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("GB per process") for line in lines)
    assert any(line.startswith("2 x training rank") for line in lines)
    assert any(line.startswith("memory of 2 nodes: needs") and line.endswith("of 16.0 GB: fits") for line in lines)
    assert not (tmp_path / "out").exists()


def test_plan_of_a_model_of_ones_own_lists_what_the_profile_gives_and_the_user_has_not_set(tmp_path, capsys):
    save_chat_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'prompt': '1+1=', 'answer': '2'})}\n" * 64)
    words = [
        f"model.path={tmp_path}/model", f"data.train={tmp_path}/rows.jsonl", "reward.functions=[exact_match]",
        "rollout=hf", "placement=inprocess", "rollout.max_prompt_length=100", "rollout.max_response_length=100",
        "trainer.total_steps=3", f"trainer.output_dir={tmp_path}/out",
    ]  # fmt: skip
    assert main([*words, "--plan"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("defaults ")]
    assert line == (
        "defaults   from the profile: trainer.prompts_per_step=64, trainer.prompts_per_minibatch=32, "
        "trainer.eval_every=20, trainer.sample_every=5, actor.lr=1e-06, actor.lr_schedule=constant, "
        "actor.lr_warmup_steps=10"
    )


def test_plan_prints_the_table_before_it_refuses_what_does_not_fit(tmp_path, capsys):
    words = [*CLUSTER, "placement.node_memory_gb=0.25", f"trainer.output_dir={tmp_path}/out"]
    assert main([*words, "--plan"]) == 2
    printed = capsys.readouterr()
    assert "DOES NOT FIT" in printed.out
    assert printed.err.splitlines()[-1].startswith("error: memory: memory of 2 nodes: the run needs about")


def test_more_ranks_than_the_planned_gpus_are_refused(tmp_path, capsys):
    gpus = ["placement.gpus_per_node=4", "placement.gpu_memory_gb=80", "placement.actor_ranks=16"]
    assert main([*CLUSTER, *gpus, f"trainer.output_dir={tmp_path}/out", "--plan"]) == 2
    assert "placement.actor_ranks=16: more than the 8 GPUs of the cluster" in capsys.readouterr().err


def test_a_run_without_room_ends_before_it_writes_anything(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rltrain.run.memory.facts, "machine", lambda: Node("this machine", 100 << 20))
    words = ["placement=inprocess", "rollout=hf", f"trainer.output_dir={tmp_path}/out"]
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "memory of this machine: the run needs about" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("content", "memory"), [("max\n", None), ("1048576\n", 1 << 20)])
def test_the_memory_of_a_container_is_what_its_kernel_allows(tmp_path, monkeypatch, content, memory):
    import psutil

    from workers.cluster import node_facts

    (tmp_path / "memory.max").write_text(content)
    monkeypatch.setattr(node_facts, "_CONTAINER_LIMITS", (tmp_path / "memory.max", tmp_path / "missing"))
    assert node_facts.memory_here() == (memory or psutil.virtual_memory().total)
