import pytest
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

import rltrain.run.checks
from rltrain.base.errors import ConfigError
from rltrain.data.model_directory import check_critic
from rltrain.run.checks import RAY_JOB, builtin_task, check, check_cluster, check_stop_strings, needs_critic
from rltrain.settings.algorithm_rules import check_algorithm
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer


@pytest.fixture(autouse=True)
def _two_cores_without_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(rltrain.run.checks, "cpu_cores", lambda: 2)
    monkeypatch.setattr(rltrain.run.checks, "_gpu_nodes", lambda: False)
    monkeypatch.setattr(rltrain.run.checks, "_gpu_count", lambda: 0)
    monkeypatch.setattr("workers.rollout.engines.vllm.installed", lambda: True)
    monkeypatch.delenv(RAY_JOB, raising=False)
    monkeypatch.chdir(tmp_path)


def config_of(*overrides):
    return compose(["profile=demo", *overrides])[0]


def refusal(*overrides):
    with pytest.raises(ConfigError) as error:
        check(config_of(*overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


def model_of(folder, kind):
    """Save a model of the given type, as small as possible and with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    older = {"gpt2": {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 64}}
    opt = {"opt": {"ffn_dim": 16, "word_embed_proj_dim": 8}}
    sizes = {
        "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{**sizes, **(older | opt).get(kind, {})})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("")
    return f"model.path={folder}"


@pytest.mark.parametrize("kind", ["llama", "olmo", "olmo2", "granite", "cohere", "gemma3_text", "opt", "olmoe"])
def test_a_critic_can_be_made_of_every_model_that_can_be_trained(tmp_path, kind):
    model = [model_of(tmp_path, kind), "data.train=prompts.jsonl", "reward.functions=[{path: exact_match}]"]
    (tmp_path / "prompts.jsonl").write_text("{}")
    check(config_of(*model, "algorithm=grpo"))
    check(config_of(*model, "algorithm=ppo"))


def test_a_critic_needs_every_tensor_of_the_base_model(tmp_path):
    model = [model_of(tmp_path, "olmo2"), "data.train=prompts.jsonl", "reward.functions=[{path: exact_match}]"]
    (tmp_path / "prompts.jsonl").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "model.norm.weight"}, file)
    said = refusal(*model, "algorithm=ppo")
    assert said.startswith(f"model.path={tmp_path}: its weights lack model.norm.weight, so they do not match the Olmo2")


WITHOUT_REWARD = (
    "data.train=prompts.jsonl without a reward: reward.functions and reward.models are empty, but {} needs scores of "
    "the answers; set {}reward.functions=[exact_match], reward.functions=[numeric_match], or a function of your own, "
    "as in reward.functions=[my_reward.py:score]"
)


def test_data_of_ones_own_without_a_reward_is_refused_with_what_to_type(tmp_path):
    model = [model_of(tmp_path, "llama"), "data.train=prompts.jsonl"]
    (tmp_path / "prompts.jsonl").write_text("{}")
    assert refusal(*model) == WITHOUT_REWARD.format("training", "")
    assert refusal(*model, "rollout.agent=a.py:run") == WITHOUT_REWARD.format(
        "training", "reward.functions=[environment_reward], "
    )
    for chosen in ("reward.functions=[exact_match]", "reward.functions=[numeric_match]", "reward=median"):
        check(config_of(*model, chosen))
    check(config_of(model[0]))
    assert refusal("reward.functions=[]") == WITHOUT_REWARD.format("training", "").replace(
        "prompts.jsonl", "builtin:median"
    )


def test_a_policy_that_learns_from_teachers_alone_needs_no_reward(tmp_path):
    path = model_of(tmp_path / "model", "llama")
    teacher = f"algorithm.distillation.teachers=[{tmp_path}/model]"
    words = [path, "data.train=prompts.jsonl", "algorithm=distill", teacher]
    (tmp_path / "prompts.jsonl").write_text("{}")
    check_algorithm(config_of(*words))
    for other, user in (
        ("algorithm.distillation.outcome_coef=1", "training"),
        ("data.difficulty={}", "data.difficulty"),
        ("algorithm.advantage_estimator=gdpo", "algorithm.advantage_estimator=gdpo"),
    ):
        assert refusal(*words, other) == WITHOUT_REWARD.format(user, "")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3", "gpt2"])
def test_models_that_have_a_critic_are_accepted(tmp_path, kind):
    check_critic(model_of(tmp_path, kind).partition("=")[2])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dr_grpo", "gspo", "dapo", "rloo"])
def test_every_algorithm_passes(algorithm):
    check(config_of(f"algorithm={algorithm}"))


QUANTIZED = ["model.dtype=bfloat16", "rollout.vllm.quantization=fp8_per_block"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.loss_mode=vanila"], "algorithm.loss_mode=vanila: unknown policy loss; the nearest is 'vanilla'"),
        (["algorithm.advantage_estimator=gea"], "unknown advantage estimator; the nearest is 'gae'"),
        (["algorithm.kl_loss.kl_estimator=k9"], "algorithm.kl_loss.kl_estimator=k9: unknown KL estimator; use one of"),
        (["algorithm.kl_in_reward.kl_estimator=k3+"], "a reward has no gradient; use k3"),
        (["algorithm.loss.clip=0.2"], "algorithm.loss.clip=0.2: 'vanilla' has no such knob; it takes clip_ratio_low"),
        (["algorithm.loss.clip_ratio_low=wide"], "algorithm.loss.clip_ratio_low='wide': 'vanilla' expects a float"),
        (["algorithm.advantage.lam=1.0"], "algorithm.advantage.lam=1.0: 'grpo' has no such knob; it takes norm_by_std"),
        (["algorithm.loss.clip_ratio_c=0.5"], "algorithm.loss.clip_ratio_c=0.5 must be > 1"),
        (["algorithm.loss.clip_ratio_low=-0.1"], "algorithm.loss.clip_ratio_low=-0.1 must be >= 0"),
        (["algorithm=gspo", "algorithm.loss.clip_ratio_high=-1"], "algorithm.loss.clip_ratio_high=-1 must be >= 0"),
        (["algorithm=ppo", "algorithm.advantage.gamma=2"], "algorithm.advantage.gamma=2 must be in [0, 1]"),
        (["rollout.samples_per_prompt=1"], "rollout.samples_per_prompt=1: grpo compares the answers to one prompt"),
        (
            ["rollout.engine=tgi"],
            "rollout.engine=tgi: unknown engine: there is no package workers.rollout.engines.tgi; use",
        ),
        (["rollout=hf", "rollout.engine=vllm"], "the engine's settings are missing; use rollout=vllm"),
        (
            [*QUANTIZED, "algorithm.correction.level=null"],
            "with algorithm.correction.level=null: answers are sampled from the distribution of the quantized weights",
        ),
        (
            [*QUANTIZED, "algorithm.loss_mode=reinforce", "algorithm.old_log_probs=rollout"],
            "use algorithm.correction.level=auto algorithm.old_log_probs=actor",
        ),
        (["data.train=no.jsonl"], "data.train=no.jsonl: no such file; check the path (relative paths start at "),
        (["data.val=no.jsonl"], "data.val=no.jsonl: no such file"),
        (["data.train=builtin:mediam"], "unknown built-in task; the nearest is 'builtin:median', and all tasks are"),
        (["data.train=builtin:sort"], "with the reward of task median: every answer would be wrong; use data=sort"),
        (["model.path=no"], "model.path=no: no such directory; give the folder of a model, or its ORG/NAME on the hub"),
        (["rollout.max_response_length=1009"], "= 1025 tokens: the model has 1024 positions"),
        (["model.lora={rank:4,targets:[q]}"], "model.lora.targets: no layer is called 'q'; the nearest is 'q_proj'"),
        (
            ["model.lora={rank:4,targets:lm_head}"],
            "'lm_head' is the last layer, where log-probs are computed without an adapter",
        ),
        (["reward.functions=[no.such:score]"], "there is no module 'no'"),
        (["placement.actor_ranks=3"], "placement.actor_ranks=3: more than the 2 CPU cores of this machine; use fewer"),
        (["placement.rollout_replicas=3"], "placement.rollout_replicas=3: more than the 2 CPU cores"),
        (["rollout.vllm.tensor_parallel_size=4"], "x rollout.vllm.tensor_parallel_size=4: more than the 2 CPU cores"),
        (["rollout.environment=a.py:A", "rollout.stop=x"], "rollout.stop=['x'] with an environment, tools or an agent"),
        (["rollout.tools=a.py:f", "rollout=stored", "rollout.run=r"], "tools or an agent with rollout.engine=stored"),
        (["data=lookup", "data.special_tokens=allow"], "data.special_tokens=allow with rollout.environment"),
        (["reward.functions=[environment_reward]"], "'environment_reward' is the reward that an environment gives"),
        (
            ["reward.functions=[rltrain.rewards.environment_reward.environment_reward]"],
            "reward that an environment gives",
        ),
        (["trainer.output_dir=' '"], "trainer.output_dir is empty; name a folder"),
    ],
)
def test_what_cannot_run_here_is_refused_in_one_line(overrides, message):
    assert message in refusal(*overrides)


def test_one_sample_a_prompt_is_enough_where_nothing_is_compared():
    check(config_of("algorithm=ppo", "rollout.samples_per_prompt=1"))


def test_a_missing_vllm_is_named_with_both_ways_out(monkeypatch):
    monkeypatch.setattr("workers.rollout.engines.vllm.installed", lambda: False)
    assert (
        refusal()
        == "rollout=vllm: vLLM is not installed; use rollout=hf, or install rltrain[cpu] (on GPUs rltrain[gpu])"
    )
    check(config_of("rollout=hf"))


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "metrics.jsonl",
        "evaluations.jsonl",
        "ledger.jsonl",
        "rollouts",
        "model",
        "checkpoints",
        "tensorboard",
    ],
)
def test_an_output_folder_with_another_run_is_refused(tmp_path, name):
    (tmp_path / name).touch() if "." in name else (tmp_path / name).mkdir()
    assert refusal(f"trainer.output_dir={tmp_path}").endswith(
        f"holds another run ({name}); name a new folder, or continue that run with trainer.resume=auto"
    )
    check(
        config_of(f"trainer.output_dir={tmp_path}", "trainer.resume=auto")
    )  # `rltrain.run.resume` checks later whether the folder belongs to the run.


def test_an_output_folder_that_is_there_and_holds_no_run_is_fine(tmp_path):
    (tmp_path / "notes.txt").touch()
    check(config_of(f"trainer.output_dir={tmp_path}"))


def test_an_output_folder_that_is_a_file_or_lies_in_one_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        assert refusal(f"trainer.output_dir={path}").endswith("file is a file, not a folder; name another folder")


def test_an_output_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rltrain.run.checks.os, "access", lambda path, mode: False)
    assert refusal(f"trainer.output_dir={tmp_path}/new").endswith(
        f"{tmp_path} cannot be written to; name another folder"
    )


def test_in_a_ray_job_the_output_folder_must_be_absolute(tmp_path, monkeypatch):
    monkeypatch.setenv(RAY_JOB, "{}")
    assert "trainer.output_dir=out: in a Ray job a relative path lies in Ray's own cache" in refusal(
        "trainer.output_dir=out"
    )
    check(config_of(f"trainer.output_dir={tmp_path}/out"))


def test_a_file_of_ones_own_needs_a_model_of_ones_own(tmp_path):
    (tmp_path / "my.jsonl").touch()
    assert (
        "the tiny model knows only the built-in tasks builtin:median, builtin:sort, "
        "builtin:lookup, builtin:higher_lower; give model.path=DIR" in refusal("data.train=my.jsonl")
    )


def test_the_builtin_model_is_that_of_the_task():
    assert builtin_task(config_of("data=sort")).name == "sort"


def test_only_estimators_that_read_values_need_a_critic():
    assert needs_critic(config_of("algorithm=ppo").algorithm)
    assert not needs_critic(config_of().algorithm)


def test_on_a_machine_with_gpus_they_are_what_ranks_need(monkeypatch):
    monkeypatch.setattr(rltrain.run.checks, "_gpu_nodes", lambda: True)
    monkeypatch.setattr(rltrain.run.checks, "_gpu_count", lambda: 4)
    check(config_of("placement.actor_ranks=4"))
    assert "placement.actor_ranks=5: more than the 4 GPUs of this machine" in refusal("placement.actor_ranks=5")


def test_roles_that_share_devices_need_the_largest_of_them_and_others_the_sum():
    shared = config_of("placement=colocated", "placement.actor_ranks=4", "placement.rollout_replicas=3")
    check_cluster(shared, {"CPU": 4.0})
    with pytest.raises(ConfigError, match=r"^placement.actor_ranks=4: more than the 3 CPUs of the cluster; "):
        check_cluster(shared, {"CPU": 3.0})
    apart = config_of("placement=disaggregated", "algorithm=ppo", "placement.rollout_replicas=3")
    check_cluster(apart, {"CPU": 5.0})
    with pytest.raises(
        ConfigError, match=r"=1 for each of 2 training roles \+ .*=3 = 5: more than the 4 CPUs of the clus"
    ):
        check_cluster(apart, {"CPU": 4.0})


def test_a_cluster_with_gpus_is_measured_in_gpus():
    with pytest.raises(ConfigError, match="more than the 2 GPUs of the cluster"):
        check_cluster(config_of("placement=colocated", "placement.actor_ranks=3"), {"CPU": 64.0, "GPU": 2.0})


def test_an_engine_in_shards_has_no_gpu_in_parts():
    shards = ("placement=colocated", "rollout.vllm.tensor_parallel_size=2", "rollout.vllm.process=async")
    with pytest.raises(ConfigError, match=r"=2: with placement.share_ranks=true an engine gets only a part"):
        check_cluster(config_of(*shards), {"CPU": 64.0, "GPU": 8.0})
    check_cluster(config_of(*shards, "placement.share_ranks=false"), {"CPU": 64.0, "GPU": 8.0})
    check_cluster(config_of(*shards), {"CPU": 64.0})


def test_weights_in_gpu_memory_need_gpus_in_the_right_places():
    gpus, cpus = {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0}
    nccl = config_of("placement=disaggregated", "rollout.weight_transport=nccl")
    check_cluster(nccl, gpus)
    with pytest.raises(ConfigError, match="weight_transport=nccl: the cluster has no GPUs"):
        check_cluster(nccl, cpus)
    handles = ("rollout.weight_transport=device_handles", "placement.rollout_replicas=2")
    check_cluster(config_of(*handles, "placement=colocated", "placement.actor_ranks=2"), gpus)
    check_cluster(config_of(*handles, "placement=disaggregated"), cpus)
    for overrides in (["placement=disaggregated", "placement.actor_ranks=2"], ["placement=colocated"]):
        with pytest.raises(ConfigError, match="each engine must share its GPU with a training rank"):
            check_cluster(config_of(*handles, *overrides), gpus)


def test_a_cluster_is_not_measured_by_this_machine():
    check(config_of("placement=colocated", "placement.actor_ranks=64"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.output_dir=s3://bucket/run", "is not a local folder; only trainer.checkpoint_dir may be remote"),
        ("trainer.checkpoint_dir=s3x://bucket", "cannot be reached (ValueError: Protocol not known: s3x"),
        ("trainer.resume=s3x://bucket", "trainer.resume=s3x://bucket: cannot be reached"),
        ("trainer.checkpoint_dir=afile/x", "afile is a file, not a folder"),
        ("trainer.checkpoint_dir=file://afile", "is a file, not a folder"),
        ("trainer.output_dir=runs/a::b", "trainer.checkpoint_dir=runs/a::b/checkpoints: contains '::'"),
        ("trainer.resume=://x", "trainer.resume=://x: contains '::', or has no protocol before '://'"),
        ("trainer.checkpoint_dir=loop/x", "cannot be accessed (Too many levels of symbolic links)"),
        (f"trainer.output_dir={'x' * 300}", "cannot be accessed (File name too long)"),
        (f"trainer.output_dir={'x/' * 2000}", "cannot be accessed (File name too long)"),
        (f"trainer.checkpoint_dir={'x' * 256}", "cannot be accessed (File name too long)"),
        (f"trainer.resume={'x' * 300}", "cannot be accessed (File name too long)"),
        (f"data.train={'x' * 300}.jsonl", "cannot be accessed (File name too long)"),
        (f"data.val={'x' * 300}.parquet", "cannot be accessed (File name too long)"),
        (f"reward.functions=[{'x' * 300}.py:score]", "cannot be accessed (File name too long)"),
        ("reward.functions=[loop/x.py:score]", "cannot be accessed (Too many levels of symbolic links)"),
        (f"reward.models=[{'x' * 300}]", "cannot be accessed (File name too long)"),
        (f"reward.aggregation={'x' * 300}.py:f", "cannot be accessed (File name too long)"),
        ("trainer.hang_timeout_s=9", "trainer.hang_timeout_s must be >= 10, got 9.0"),
    ],
)
def test_folders_that_cannot_be_used_are_named_before_anything_starts(tmp_path, override, message):
    (tmp_path / "afile").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError) as error:
        check(config_of(override))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["model", "model/x", "model.partial", "link", "rollouts"])
def test_checkpoints_are_not_kept_where_results_are_replaced(tmp_path, name):
    (tmp_path / "model.old").mkdir()
    (tmp_path / "link").symlink_to("model.old")
    with pytest.raises(ConfigError, match=r"is inside a folder of the run's results \((model|rollouts)"):
        check(config_of(f"trainer.output_dir={tmp_path}", f"trainer.checkpoint_dir={tmp_path}/{name}"))
    check(config_of(f"trainer.output_dir={tmp_path}", f"trainer.checkpoint_dir={tmp_path}/kept"))


def test_a_stop_string_with_a_special_token_is_refused_because_no_text_has_it():
    tokenizer = char_tokenizer()
    with pytest.raises(
        ConfigError, match=r"^rollout.stop has 'a<eos>': .* tokens such as <eos>, so .*; remove the stop"
    ):
        check_stop_strings(["###", "a<eos>"], tokenizer)
    tokenizer.add_tokens(["<think>", AddedToken("<|turn|>", special=True)])
    check_stop_strings(["###", "<think>"], tokenizer)
    with pytest.raises(ConfigError, match=r"such as <\|turn\|>"):
        check_stop_strings(["<|turn|>"], tokenizer)
