"""Tests that the fingerprint of a file changes when the content changes but the file name does not.

The fingerprints cover prompts, reward files, and the model weights that no checkpoint replaces.
"""

import pytest

from rltrain.run.source_fingerprints import ENDS_BYTES, sources
from rltrain.settings.compose import compose


class Prompts:
    def fingerprint(self):
        return 7


def found(*overrides):
    return sources(compose(list(overrides))[0], Prompts())


def test_a_run_of_the_built_in_task_reads_its_prompts_alone():
    assert found() == {"data.train=builtin:median": 7}
    assert found("algorithm=ppo", "model.lora={rank:4}") == {"data.train=builtin:median": 7}


def test_a_reward_file_with_another_content_is_another(tmp_path):
    file = tmp_path / "rewards.py"
    words = [f"reward.functions=[{{path: '{file}:score'}}]"]
    seen = set()
    for content in ("def score(): return 1", "def score(): return 2", "def score(): return 1"):
        file.write_text(content)
        seen.add(found(*words)[f"reward.functions: {file}:score"])
    assert len(seen) == 2


def test_so_is_another_function_that_adds_rewards_up(tmp_path):
    file = tmp_path / "sums.py"
    file.write_text("def total(components, **_): return components.sum(-1)")
    key, words = f"reward.aggregation: {file}:total", [f"reward.aggregation='{file}:total'"]
    before = found(*words)[key]
    file.write_text("def total(components, **_): return -components.sum(-1)")
    assert found(*words)[key] != before
    assert not [name for name in found("reward.aggregation=sum") if name.startswith("reward.aggregation")]


@pytest.mark.parametrize("uses", ["model.lora={rank:4}", "algorithm.kl_loss.kl_loss_coef=0.1"])
@pytest.mark.parametrize("at", [0, ENDS_BYTES - 1, -1, "size", "name"])
def test_other_weights_of_a_model_that_stays_are_another(tmp_path, uses, at):
    file, words = tmp_path / "model.safetensors", [uses, f"model.path={tmp_path}"]
    content = bytearray(4 * ENDS_BYTES)
    file.write_bytes(content)
    before = found(*words)[f"model.path={tmp_path}"]
    assert found(*words)[f"model.path={tmp_path}"] == before
    if at == "name":
        file.rename(tmp_path / "pytorch_model.bin")
    else:
        content += b"x" if at == "size" else b""
        content[0 if at == "size" else at] ^= at != "size"
        file.write_bytes(content)
    assert found(*words)[f"model.path={tmp_path}"] != before


def test_weights_that_checkpoints_replace_may_change(tmp_path):
    own = f"model.path={tmp_path}"
    assert own not in found("algorithm=grpo", own)
    # A reference model that is updated is loaded from the checkpoint, even before its first update.
    assert own not in found("algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.reference.refresh_every=9", own)


def test_reward_models_count(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a")
    words = [f"reward.models=[{{path: '{tmp_path}', name: judge}}]"]
    assert f"reward.models: {tmp_path}" in found(*words)


def test_teachers_on_the_ranks_count_and_endpoints_do_not(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a")
    teachers = f"algorithm.distillation.teachers=[{{path: '{tmp_path}', name: math}},http://127.0.0.1:1/v1]"
    words = ["algorithm=mopd", teachers, "algorithm.distillation.teacher_column=domain"]
    key = f"algorithm.distillation.teachers: path of 'math'={tmp_path}"
    before = found(*words)
    assert sorted(before) == sorted([key, "data.train=builtin:median"])
    file.write_bytes(b"b")
    assert found(*words)[key] != before[key]


def test_weights_of_the_model_stay_if_the_reference_is_a_teacher(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a")
    words = ["algorithm=distill", "algorithm.distillation.teachers=[reference]", f"model.path={tmp_path}"]
    assert f"model.path={tmp_path}" in found(*words)
