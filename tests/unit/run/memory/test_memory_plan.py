"""Tests of the memory plan, with a model so small that each figure can be computed by hand."""

from dataclasses import replace

import pytest

from rltrain.base.errors import ConfigError
from rltrain.run.memory.engines import engine, kv_token_bytes, rows_at_once
from rltrain.run.memory.facts import planned_nodes, shape_of
from rltrain.run.memory.parts import PHASES, FixedSizes, ModelShape, Node, total
from rltrain.run.memory.plan import TOLERANCE, ModelFacts, memory_plan, require_room
from rltrain.run.memory.table import summary, table
from rltrain.run.memory.training import (
    GPU_CONTEXT,
    HOLES_OF_LAYERS,
    RANK_BASE,
    REDUCED_OUTSIDE,
    RankMemory,
    roles_of,
    saved_bytes,
)
from rltrain.settings.compose import compose

MIB, GIB = 1 << 20, 1 << 30
HERE = [Node("this machine", 16 * GIB)]
# Two layers with 100 parameters each, and 40 parameters in the embedding, which is also the output head.
SHAPE = ModelShape(
    parameters=240, layer=100, outside=40, largest=40, layers=2, hidden=4, queries=4, keys=2, feed_forward=8,
    vocabulary=10, tied=True,
)  # fmt: skip
LIMITS = FixedSizes(bucket_bytes=64 * MIB, buckets=2, chunk=1 << 21)
# A batch of four rows, each with a prompt of two tokens and an answer of two tokens. Rows share no tokens.
SMALL = (
    "actor.share_prefixes=false",
    "rollout.max_prompt_length=2", "rollout.max_response_length=2", "rollout.samples_per_prompt=2",
    "trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=2", "rollout=hf", "data.val=null",
)  # fmt: skip
PLANNED = (
    "placement=colocated", "placement.nodes=2", "placement.gpus_per_node=8", "placement.gpu_memory_gb=80",
    "placement.node_memory_gb=1000", "model.dtype=bfloat16",
)  # fmt: skip
# The sizes of Qwen3-8B.
LARGE = ModelShape(
    parameters=8_190_735_360, layer=192_946_432, outside=1_244_663_808, largest=622_329_856, layers=36, hidden=4096,
    queries=4096, keys=1024, feed_forward=12288, vocabulary=151_936, norms_heads=True,
)  # fmt: skip


def config_of(*overrides):
    return compose(["trainer.output_dir=out", *overrides])[0]


def rank(*overrides, on_gpu=False, shape=SHAPE, adapters=None, others=None, needs_critic=False):
    config = config_of(*SMALL, *overrides)
    roles = roles_of(config, shape, others or {}, adapters=adapters, needs_critic=needs_critic)
    return RankMemory(config, roles, LIMITS, on_gpu=on_gpu)


def sizes(parts):
    return {part.what: part.size for part in parts if part.size}


def plan_of(*overrides, shape=SHAPE, nodes=HERE, others=None):
    config = config_of(*overrides)
    return config, memory_plan(config, ModelFacts(shape=shape, limits=LIMITS, others=others or {}), nodes)


@pytest.mark.parametrize(
    ("shape", "width", "kernel", "size"),
    [
        # Numbers for each token: 2 x 4 x 3 in the norms, 3 x 4 (queries, output, input of the projection) and 2 x 2
        # (keys, values) in the attention, and 4 x 8 in the feed-forward part with a gate.
        (SHAPE, 4, False, (24 + 16 + 32) * 4),
        # The norms keep their input in float32.
        (SHAPE, 2, False, 2 * 4 * (4 + 2 + 2) + (16 + 32) * 2),
        (SHAPE, 2, True, 2 * 4 * (4 + 2 + 2) + (12 + 32) * 2),
        (replace(SHAPE, gated=False), 4, False, (24 + 16 + 16) * 4),
        (replace(SHAPE, norms_heads=True), 4, False, (24 + 16 + 32 + 2 * 6) * 4),
    ],
)
def test_a_layer_keeps_the_inputs_of_its_operations_for_each_token(shape, width, kernel, size):
    assert saved_bytes(shape, width, kernel=kernel) == size


def test_a_rank_keeps_sixteen_bytes_a_parameter_while_it_updates():
    made = rank("actor.max_tokens_per_microbatch=8")
    assert sizes(made.device("generate")) == {"parameters": 960, "optimizer states": 1920}
    assert sizes(made.device("update")) == {
        "parameters": 960,
        "optimizer states": 1920,
        "gradients": 960,
        "gradient of the head": 160,
        # Each of the 8 tokens takes 288 bytes in each layer, and 64 bytes for the last norm and the head's input.
        "activations": 8 * (2 * 288 + 64),
        "logits of a chunk": 3 * 8 / 2 * 10 * 4,
        "freed memory that glibc keeps": 960 + 8 * (2 * 288 + 64) / 4,
    }


def test_answers_that_share_a_prompt_read_up_to_two_keys_a_token():
    made = rank("actor.share_prefixes=true", "actor.max_tokens_per_microbatch=6")
    # Each of the two groups has 2 + 2 * 2 distinct tokens.
    assert made.row_tokens() == 12
    keys = 2 * 2 * 2 * 4 * 6  # keys and values of 2 numbers, in 2 layers, with 4 bytes each, for 6 more keys
    parts = sizes(made.device("update"))
    assert parts["activations"] == 6 * (2 * 288 + 64) + keys
    assert parts["logits of a chunk"] == 3 * 4 * 10 * 4
    # Each of four ranks has a row of its own, and computes the prompt for it.
    assert rank("actor.share_prefixes=true", "placement.actor_ranks=4").row_tokens() == 4
    # Three ranks have up to two rows, of up to two groups.
    assert rank("actor.share_prefixes=true", "placement.actor_ranks=3").row_tokens() == 8


def test_attention_scores_count_in_models_with_soft_caps_or_sinks():
    assert "attention scores" not in sizes(rank().device("update"))
    made = rank(shape=replace(SHAPE, capped=True))
    # Rows have 4 tokens, and a key head has 2 query heads. The limit of the test is 0 scores. The biases of layers with
    # and without a window have up to 4 numbers for each of the 16 tokens.
    assert sizes(made.device("update"))["attention scores"] == (5 * 16 * 2 + 2 * 16 * 4) * 4


def test_the_limit_of_keys_can_decide_the_number_of_passes():
    made = rank(
        "actor.share_prefixes=true", "rollout.max_prompt_length=30", "actor.max_tokens_per_microbatch=32",
        "rollout.samples_per_prompt=4",
    )  # fmt: skip
    # Two groups of 30 + 4 * 2 tokens are 76 tokens, but their 2 * (30 + 4 * 32) keys need 5 passes of 2 * 32 keys.
    assert (made.row_tokens(), made.row_keys()) == (76, 316)
    (actor,) = (role for role in made.roles if role.name == "actor")
    assert made.passes(actor) == 5
    assert (made.tokens(actor), made.keys(actor)) == (32, 64)


def test_the_first_micro_batch_of_a_mini_batch_finds_no_gradients():
    parts = sizes(rank("actor.max_tokens_per_microbatch=16").device("update"))
    assert "gradients" not in parts
    assert parts["activations"] == 16 * (2 * 288 + 64)


def test_with_few_activations_the_end_of_the_backward_pass_is_the_peak():
    large = replace(SHAPE, parameters=240_000, layer=100_000, outside=40_000)
    assert sizes(rank(shape=large).device("update"))["gradients"] == 240_000 * 4


def test_activation_checkpointing_keeps_one_state_a_layer_and_one_whole_layer():
    parts = sizes(rank("model.activation_checkpointing=true").device("update"))
    assert parts["activations"] == 16 * (2 * 4 * 4 + 288 + 64)


def test_sharded_ranks_divide_the_states_and_gather_two_layers():
    parts = sizes(rank("placement.actor_ranks=4").device("update"))
    assert parts["parameters"] == 240
    assert parts["optimizer states"] == 480
    assert parts["gathered parameters"] == (40 + 2 * 100) * 4
    assert sizes(rank("placement.actor_ranks=4", "placement.shard_ranks=2").device("generate"))["parameters"] == 480


def test_ranks_that_exchange_shards_on_cpus_count_the_copies_and_holes_of_the_exchange():
    held = 2 * HOLES_OF_LAYERS * 2 * 100 * 4
    shared = rank("placement.actor_ranks=4", "actor.max_tokens_per_microbatch=8")
    parts = sizes(shared.device("update"))
    assert parts["gradients outside the layers"] == REDUCED_OUTSIDE * 40 * 4
    assert parts["freed memory that glibc keeps"] == pytest.approx(240 + parts["activations"] / 4 + held)
    assert sizes(shared.forward(shared.roles[0]))["freed memory that glibc keeps"] == pytest.approx(held)
    # Blocks of 32 MiB and more leave no holes: here the whole layer, then also its largest matrix.
    for shape, kinds in ((replace(SHAPE, layer=9 << 20), 1), (replace(SHAPE, layer=9 << 20, feed_forward=2 << 20), 0)):
        large = rank("placement.actor_ranks=4", shape=shape)
        assert large.holes_of_layers(large.roles[0]) == pytest.approx(kinds * HOLES_OF_LAYERS * 2 * (9 << 20) * 4)
    # Ranks that divide all matrices of a layer among themselves exchange no shards.
    divided = rank("placement.actor_ranks=2", "placement.tensor_ranks=2", "actor.max_tokens_per_microbatch=8")
    on_gpu = rank("placement.actor_ranks=4", "actor.max_tokens_per_microbatch=8", on_gpu=True)
    for made in (divided, on_gpu):
        assert "gradients outside the layers" not in sizes(made.device("update"))
        assert "freed memory that glibc keeps" not in sizes(made.forward(made.roles[0]))
    # Adapters have no gradients outside the layers.
    assert "gradients outside the layers" not in sizes(
        rank("placement.actor_ranks=4", "model.lora.rank=1", adapters=8).device("update")
    )


def test_a_rank_reads_each_expert_before_it_stacks_the_experts_of_a_layer():
    shape = replace(SHAPE, experts=60)
    assert sizes(rank(shape=shape).device("start"))["experts before they are stacked"] == 2 * 60 * 4
    divided = rank("placement.actor_ranks=4", "placement.expert_ranks=2", shape=shape)
    assert sizes(divided.device("start")) == {
        "parameters": 240,
        "experts before they are stacked": 2 * 60 * 4 / 4,
        "layers for the check of packed rows": (40 + 100) * 4,
    }


def test_ranks_that_divide_matrices_store_and_gather_their_part():
    """Two ranks divide 80 of the 100 parameters of each layer. Each of them has the other 20 parameters."""
    shape = replace(SHAPE, divisible=80)
    divided = rank("placement.actor_ranks=4", "placement.tensor_ranks=2", shape=shape)
    actor = divided.roles[0]
    assert sizes(divided.states("start"))["parameters"] == pytest.approx((160 / 4 + 80 / 2) * 4)
    assert divided.gathered(actor).size == (40 + 2 * (20 + 80 / 2)) * 4
    # Queries, keys and entries of the feed-forward layer are halved; the inputs and outputs of the norms are not.
    tokens = divided.tokens(actor)
    assert divided.divided(actor) == replace(shape, queries=2, keys=1, feed_forward=4)
    of_layer = 24 + (3 * 2 + 2 * 1) + 4 * 4
    assert divided.activations(actor) == tokens * 4 * (2 * of_layer + 4 * 4)


def test_ranks_that_divide_experts_gather_their_experts():
    divided = rank("placement.actor_ranks=4", "placement.expert_ranks=2", shape=replace(SHAPE, experts=60))
    assert divided.gathered(divided.roles[0]).size == (40 + 2 * (40 + 60 / 2)) * 4
    assert sizes(divided.states("start"))["parameters"] == 240 * 4 / 4


def test_with_context_parallelism_the_last_chunk_can_read_the_keys_of_all_chunks():
    budget = ("placement.actor_ranks=2", "actor.max_tokens_per_microbatch=8")
    alone, divided = rank(*budget), rank(*budget, "placement.context_ranks=2")
    more = divided.activations(divided.roles[0]) - alone.activations(alone.roles[0])
    assert more == 2 * 2 * alone.keys(alone.roles[0]) * 2 * 4  # layers x (keys, values) x keys x width x bytes


def test_a_sample_of_the_model_counts_at_the_start_if_it_is_larger_than_the_shard():
    sample = (40 + 100) * 4
    assert sizes(rank("placement.actor_ranks=4").device("start")) == {
        "parameters": 240,
        "layers for the check of packed rows": sample - 240,
    }
    assert sizes(rank().device("start")) == {"parameters": 960}


def test_the_sample_of_the_model_is_in_the_memory_of_the_machine_if_the_shard_is_on_a_gpu():
    made = rank("placement.actor_ranks=4", on_gpu=True)
    assert sizes(made.device("start")) == {"parameters": 240}
    assert sizes(made.host("start")) == {"layers for the check of packed rows": (40 + 100) * 4}


def test_a_reference_model_is_stored_in_the_dtype_of_the_model_unless_it_is_an_average():
    half = ("algorithm.kl_loss.kl_loss_coef=1", "model.dtype=bfloat16", "algorithm.reference.refresh_every=1")
    assert sizes(rank(*half).states("generate"))["parameters"] == 240 * (4 + 2)
    average = (*half, "algorithm.reference.refresh_coef=0.5")
    assert sizes(rank(*average).states("generate"))["parameters"] == 240 * (4 + 4)


def test_a_critic_has_optimizer_states_and_no_logits():
    made = rank("algorithm=ppo", needs_critic=True)
    assert sizes(made.states("generate")) == {"parameters": 1920, "optimizer states": 3840}
    critic = next(role for role in made.roles if role.name == "critic")
    assert "logits of a chunk" not in sizes(made.update(critic))


def test_only_adapters_have_gradients_and_optimizer_states():
    made = rank("model.lora={rank:2}", adapters=30, on_gpu=True)
    parts = sizes(made.device("update"))
    assert parts["parameters"] == (240 + 30) * 4
    assert parts["optimizer states"] == 30 * 8
    assert "gradient of the head" not in parts


def test_reward_models_and_teachers_take_the_bytes_of_their_own_models():
    others = {"reward_model helpful": replace(SHAPE, parameters=500), "teacher wise": replace(SHAPE, parameters=700)}
    distill = ["algorithm=distill", "algorithm.distillation.teachers=[{name:wise,path:m}]"]
    made = rank("reward.models=[{name:helpful,path:m}]", *distill, others=others)
    assert sizes(made.states("start"))["parameters"] == 960 + 500 * 4 + 700 * 4


# Two teachers of other widths than the policy, and the reference model.
WIDE, NARROW = replace(SHAPE, hidden=6, vocabulary=12), replace(SHAPE, hidden=2)
TEACHERS = {"teacher wide": WIDE, "teacher narrow": NARROW}
HINT = "{path:reference,prompt_template:'{prompt}'}"
DISTILL = [
    "algorithm=distill", f"algorithm.distillation.teachers=[{{name:wide,path:m}},{{name:narrow,path:n}},{HINT}]",
    "algorithm.distillation.teacher_column=domain",
]  # fmt: skip


def test_an_actor_keeps_the_whole_output_head_of_each_teacher_for_the_exact_kl():
    # The policy's vocabulary has 10 tokens, and the widths are 6, 2 and 4 (of the reference model).
    whole = 10 * (6 + 2 + 4) * 4
    for ranks in (1, 4):
        made = rank(*DISTILL, f"placement.actor_ranks={ranks}", others=TEACHERS)
        assert {sizes(made.states(phase))["output heads of other models"] for phase in PHASES} == {whole}
    one_head_more = rank(*DISTILL, "algorithm.kl_loss.kl_loss_coef=1", "algorithm.kl_loss.kl_estimator=full",
                         others=TEACHERS)  # fmt: skip
    assert sizes(one_head_more.states("start"))["output heads of other models"] == whole  # the reference's head is one
    only_kl = rank("algorithm.kl_loss.kl_loss_coef=1", "algorithm.kl_loss.kl_estimator=full")
    assert sizes(only_kl.states("start"))["output heads of other models"] == 10 * 4 * 4
    sampled = rank(*DISTILL, "algorithm.distillation.kl=sampled", others=TEACHERS)
    assert "output heads of other models" not in sizes(sampled.states("start"))


def test_hidden_states_for_the_exact_kl_count_on_teachers_and_on_the_actor_and_not_on_the_driver():
    made = rank(*DISTILL, "actor.max_tokens_per_microbatch=8", others=TEACHERS)
    # Four rows with two response tokens each, in the float32 column and the parts from which the column is made.
    assert sizes(made.host("log-probs"))["hidden states of a step"] == 2 * 8 * 6 * 4
    # Half of the 8 tokens of a micro-batch are response tokens.
    assert sizes(made.device("update"))["hidden states for the exact KL"] == 4 * 6 * 4
    halves = rank(*DISTILL, "placement.actor_ranks=2", others=TEACHERS)
    assert sizes(halves.host("log-probs"))["hidden states of a step"] == 2 * 4 * 6 * 4
    exact = [*DISTILL, "algorithm.kl_loss.kl_loss_coef=1", "algorithm.kl_loss.kl_estimator=full"]
    # The actor gets copies and joins them: 6 elements of the widest teacher, and 4 of the reference model's own KL. The
    # teachers on the rank keep 6 elements, and the reference model, which is also a teacher, keeps 4.
    for overrides, width in ((DISTILL, 2 * 6 + 6 + 4), (exact, 2 * (6 + 4) + 6 + 4)):
        assert sizes(rank(*overrides, others=TEACHERS).host("update"))["hidden states of a step"] == 8 * width * 4
        _, plan = plan_of(*SMALL, *overrides, others=TEACHERS)
        assert not [part for phase in PHASES for part in plan.processes[-1].host[phase] if "hidden" in part.what]


def test_without_ray_the_driver_has_the_hidden_states_for_the_exact_kl():
    _, plan = plan_of(*SMALL, *DISTILL, "placement=inprocess", "rollout=hf", others=TEACHERS)
    driver = plan.processes[-1]
    for phase in PHASES:
        size = sizes(driver.host[phase]).get("hidden states of a step", 0)
        assert size == (8 * 6 * 4 if phase in ("log-probs", "update") else 0)
    assert "hidden states of a step" not in sizes(plan.processes[0].host["update"])


def test_without_an_exact_kl_no_hidden_states_count():
    for overrides in ([], ["algorithm.kl_loss.kl_loss_coef=1"], [*DISTILL, "algorithm.distillation.kl=sampled"]):
        made, (_, plan) = rank(*overrides, others=TEACHERS), plan_of(*SMALL, *overrides, others=TEACHERS)
        parts = [part for phase in PHASES for part in (*made.host(phase), *made.device(phase))]
        parts += [part for phase in PHASES for part in plan.processes[-1].host[phase]]
        assert not [part for part in parts if part.size and "hidden" in part.what]


def test_offloaded_states_are_in_the_memory_of_the_machine():
    made = rank("model.cpu_offload=true", on_gpu=True)
    assert sizes(made.host("generate")) == {"parameters": 960, "optimizer states": 1920}
    assert "parameters" not in sizes(made.device("generate"))


def test_offloaded_moments_are_in_the_memory_of_the_machine_and_on_the_gpu_only_in_the_update():
    made = rank("actor.offload_optimizer=true", on_gpu=True)
    offloaded = {"optimizer states in CPU memory": 1920}
    assert [sizes(made.host(phase)) for phase in ("generate", "sync")] == [offloaded, offloaded]
    assert [sizes(made.device(phase)).get("optimizer states") for phase in ("generate", "log-probs", "update")] == [
        None, None, 1920,
    ]  # fmt: skip


def test_a_checkpoint_is_written_from_copies_in_the_memory_of_the_machine():
    assert sizes(rank().host("save")) == {"copies for the checkpoint": 240 * 12, "export": 3 * 40 * 4}


def test_a_sync_on_one_machine_has_two_buckets_in_shared_memory():
    assert sizes(rank().device("sync"))["sync buckets"] == 960  # The whole model fits into the first bucket.
    large = replace(SHAPE, parameters=200 * MIB, largest=MIB)
    assert sizes(rank(shape=large).device("sync"))["sync buckets"] == 2 * 64 * MIB


def test_ranks_of_separate_roles_are_separate_processes():
    _, plan = plan_of("placement=disaggregated", "algorithm.kl_loss.kl_loss_coef=1")
    assert [process.name for process in plan.processes[:3]] == ["actor rank", "reference rank", "engine"]


def test_an_engine_of_transformers_keeps_the_cache_of_the_rows_that_it_generates_at_once():
    config = config_of(*SMALL)
    assert rows_at_once(config) == 4
    assert kv_token_bytes(config, SHAPE) == 2 * 2 * 2 * 4  # 2 layers x 2 (key and value) x 2 numbers x 4 bytes
    made = engine(config, SHAPE, LIMITS, gpu_memory=None, on_gpu=False)
    parts = sizes(made.host["generate"])
    assert parts["engine weights"] == 960
    assert parts["KV cache"] == 4 * 4 * 32 * 1.5
    assert "KV cache" not in sizes(made.host["update"])


def test_an_engine_of_vllm_on_a_gpu_sleeps_while_the_ranks_compute():
    config = config_of(*PLANNED)
    made = engine(config, LARGE, LIMITS, gpu_memory=80 * GIB, on_gpu=True)
    assert total(made.device["generate"]) == 40 * GIB
    assert sizes(made.device["update"]) == {"CUDA": 700 * MIB}
    assert sizes(made.device["sync"])["engine weights"] == LARGE.parameters * 2
    awake = engine(config_of(*PLANNED, "trainer.max_staleness=1"), LARGE, LIMITS, gpu_memory=80 * GIB, on_gpu=True)
    assert total(awake.device["update"]) == 40 * GIB


def test_with_nccl_the_process_of_an_engine_receives_buckets_on_the_gpu_from_the_first_sync_on():
    own = [*PLANNED[1:], "placement=disaggregated", "rollout.weight_transport=nccl"]
    config = config_of(*own, "placement.actor_ranks=4")
    made = engine(config, LARGE, LIMITS, gpu_memory=80 * GIB, on_gpu=True)
    extra = {phase: total(made.device[phase]) - 40 * GIB for phase in PHASES}
    bucket = LARGE.largest * 4
    assert extra == dict.fromkeys(PHASES, GPU_CONTEXT) | {"start": 0, "sync": GPU_CONTEXT + 3 * bucket}
    ranks = [rank(*own, f"placement.actor_ranks={count}", on_gpu=True, shape=LARGE) for count in (1, 4)]
    assert [total(one.sending()) for one in ranks] == [2 * LARGE.largest * 2, 2 * LARGE.largest * 2 / 4]


def test_a_bucket_that_an_engine_maps_is_whole_and_on_a_cpu_also_in_a_file():
    own = [*PLANNED, "placement.actor_ranks=4", "rollout.weight_transport=device_handles"]
    found = [total(rank(*own, on_gpu=on_gpu, shape=LARGE).sending()) for on_gpu in (True, False)]
    gathered, bucket = LARGE.largest * 4, LARGE.largest * 2
    assert found == [gathered + 2 * bucket, gathered + 2 * 2 * bucket]


def test_a_gpu_has_room_for_its_rank_and_its_engine_in_each_phase():
    config, plan = plan_of(*PLANNED, "placement.actor_ranks=16", "placement.rollout_replicas=16", shape=LARGE,
                           nodes=planned_nodes(config_of(*PLANNED).placement))  # fmt: skip
    (gpu, machines), (ranks, engines, *_) = plan.places, plan.processes
    for phase in PHASES:
        assert total(gpu.needs[phase]) == total(ranks.device[phase]) + total(engines.device[phase])
    assert sizes(ranks.device["generate"])["CUDA and NCCL"] == GPU_CONTEXT
    assert machines.capacity == 2000 * GIB
    assert machines.size > 16 * total(ranks.host["save"])
    require_room(config, plan)


def test_processes_on_cpus_share_the_memory_of_all_machines():
    _, plan = plan_of("rollout=hf", "placement.actor_ranks=2", nodes=[Node("a", GIB), Node("b", 2 * GIB)])
    (place,) = plan.places
    assert place.name == "memory of 2 nodes"
    assert place.capacity == 3 * GIB
    assert place.size > 2 * RANK_BASE


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("actor.max_tokens_per_microbatch=65536", "trainer.prompts_per_minibatch=64"),
            "memory: GPU of each rank and engine: the run needs about .* in the phase update, but there is 80.0 GB; "
            "activations take .*: lower actor.max_tokens_per_microbatch=65536, or set "
            "model.activation_checkpointing=true",
        ),
        (
            ("placement.actor_ranks=1", "model.activation_checkpointing=true", "actor.max_tokens_per_microbatch=2064"),
            "the run needs about .* GB in the phase .*; optimizer states take 61.0 GB: raise placement.actor_ranks=1",
        ),
        (
            ("placement.shard_ranks=1", "model.activation_checkpointing=true", "actor.max_tokens_per_microbatch=2064"),
            "the run needs about .* GB in the phase .*; optimizer states take 61.0 GB: raise placement.shard_ranks=1",
        ),
        (
            ("rollout.vllm.gpu_memory_utilization=0.98", "placement.actor_ranks=4"),
            "in the phase generate, .*KV cache take .*: lower rollout.vllm.gpu_memory_utilization=0.98",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key_to_lower(overrides, line):
    words = (*PLANNED, "placement.actor_ranks=8", "placement.rollout_replicas=8", "rollout.max_response_length=2048",
             "actor.max_tokens_per_microbatch=4096", *overrides)  # fmt: skip
    config, plan = plan_of(*words, shape=LARGE, nodes=planned_nodes(config_of(*PLANNED).placement))
    with pytest.raises(ConfigError, match=line) as caught:
        require_room(config, plan)
    assert "\n" not in str(caught.value)


def test_only_what_exceeds_the_tolerance_of_the_estimate_is_refused():
    config, plan = plan_of("rollout=hf")
    needed = plan.places[0].size
    for factor, fits in ((1 - TOLERANCE, True), (0.99 * (1 - TOLERANCE), False)):
        _, plan = plan_of("rollout=hf", nodes=[Node("this machine", round(needed * factor) + 1)])
        assert plan.places[0].fits is fits
    with pytest.raises(ConfigError, match=r"memory of this machine: the run needs about"):
        require_room(config, plan)


def test_a_cache_without_room_for_one_answer_is_refused():
    large = replace(LARGE, parameters=1000)
    config, plan = plan_of("rollout.vllm.kv_cache_mb=100", "rollout.max_response_length=4096",
                           "actor.max_tokens_per_microbatch=8192", shape=large,
                           nodes=[Node("this machine", 1 << 50)])  # fmt: skip
    # A token takes 2 x 36 layers x 1024 numbers x 4 bytes = 288 KiB, so 100 MiB hold 355.6 tokens.
    with pytest.raises(
        ConfigError, match=r"room for only 356 tokens.*up to 4,112 tokens; use rollout.vllm.kv_cache_mb=1157"
    ):
        require_room(config, plan)


def test_memory_of_unknown_size_is_not_compared():
    config, plan = plan_of(nodes=[Node("this machine", None)], shape=LARGE)
    require_room(config, plan)
    assert "unknown" in table(plan)[-2]


def test_the_table_fits_into_eighty_columns():
    words = (*PLANNED, "placement.actor_ranks=16", "placement.rollout_replicas=16")
    _, plan = plan_of(*words, shape=LARGE, nodes=planned_nodes(config_of(*PLANNED).placement))
    lines = table(plan)
    assert max(map(len, lines)) == 80
    assert lines[0].split() == ["GB", "per", "process", *PHASES]
    assert lines[1].startswith("16 x training rank ")
    assert summary(plan).startswith("16 x training rank each ")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["placement.nodes=0"], "placement.nodes must be >= 1"),
        (["placement.nodes=1", "placement.gpus_per_node=-1"], "gpus_per_node must be >= 0"),
        (["placement.nodes=1", "placement.node_memory_gb=0"], "node_memory_gb must be > 0"),
        (["placement.gpus_per_node=8"], "gpus_per_node=8 without placement.nodes"),
        (["placement.nodes=1", "placement.gpus_per_node=8"], "gpus_per_node=8 with gpu_memory_gb=null"),
        (["placement.nodes=1", "placement.gpu_memory_gb=80"], "gpus_per_node=0 with gpu_memory_gb=80"),
        (["placement=local", "placement.nodes=1"], "nodes=1 with a run on this machine"),
    ],
)
def test_a_cluster_that_is_described_wrongly_is_refused_in_one_line(overrides, line):
    with pytest.raises(ConfigError) as caught:
        config_of("placement=colocated", *overrides)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_shape_of_a_model_is_read_from_its_config():
    shape = shape_of("builtin")
    assert (shape.layers, shape.hidden, shape.queries, shape.keys) == (2, 128, 128, 64)
    assert (shape.feed_forward, shape.gated, shape.tied, shape.norms_heads) == (384, True, True, False)
    assert shape.parameters == 2 * shape.layer + shape.outside
    assert shape.head == shape.outside - 128  # The last norm has 128 parameters outside the layers.
    assert shape.largest == 128 * 384
    attention, feed_forward = 2 * 128 * 128 + 2 * 128 * 64, 3 * 128 * 384
    assert shape.divisible == attention + feed_forward + (128 + 64 + 64)  # the biases of queries, keys and values
    assert shape.experts == 0
