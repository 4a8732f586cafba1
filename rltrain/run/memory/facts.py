"""Uses torch to find what the memory plan needs to know: the shapes of the models, and the machine's memory."""

from collections.abc import Sequence
from typing import Any

from rltrain.run.memory.parts import FixedSizes, ModelShape, Node
from rltrain.run.memory.plan import ModelFacts
from rltrain.settings.algorithm_rules import needs_critic
from rltrain.settings.schema import REWARD_MODEL, Config, PlacementConfig
from workers.cluster.node_facts import NodeFacts, devices_here, gpu_memory_here, memory_here

GIB = 1 << 30


def model_facts(config: Config, *, on_gpu: bool) -> ModelFacts:
    """Return the facts about a run's models that the memory plan needs, without reading any weights."""
    from transformers import AutoModelForSequenceClassification

    from rltrain.algorithms.chunks import CHUNK_SIZES, OTHER_CHUNK_SIZE
    from workers.models.capped_attention import SCORES
    from workers.models.lora import adapter_parameters
    from workers.sync.buckets import BUCKET_BYTES
    from workers.sync.sender import SLOTS

    lora = config.model.lora
    others = {
        f"{REWARD_MODEL} {model.name}": shape_of(model.path, AutoModelForSequenceClassification)
        for model in config.reward.models
    }
    others |= {teacher.role: shape_of(teacher.path) for teacher in config.algorithm.distillation.models}
    return ModelFacts(
        shape=shape_of(config.model.path),
        limits=FixedSizes(
            bucket_bytes=BUCKET_BYTES,
            buckets=SLOTS,
            chunk=OTHER_CHUNK_SIZE if on_gpu else CHUNK_SIZES["cpu"],
            scores=SCORES,
        ),
        others=others,
        adapters=None if lora is None else adapter_parameters(config.model.path, lora),
        needs_critic=needs_critic(config.algorithm),
    )


def shape_of(path: str, kind: Any = None) -> ModelShape:
    """Return the parameter counts, layer count and widths of the model that a directory's config.json describes.

    Args:
        path: the model's directory, or "builtin" for the built-in model.
        kind: the transformers Auto class that builds the model; by default, `policy_class(path)`.
    """
    from rltrain.data.model_weights import skeleton
    from rltrain.data.parallel_plans import divides_heads
    from workers.models.expert_parallel import expert_modules
    from workers.models.fsdp import decoder_layers
    from workers.models.tensor_parallel import divided_matrices

    model = skeleton(path, kind)
    config = model.config.get_text_config()
    sizes = [parameter.numel() for parameter in model.parameters()]
    decoder = decoder_layers(model)
    layers = [_elements(layer) for layer in decoder]
    largest = max(decoder, key=_elements, default=None)
    experts = {id(module): _elements(module) for module in expert_modules(model)}
    divided = {id(module): _elements(module) for module, _ in divided_matrices(model)}
    names = [name for name, _ in model.named_parameters()]
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelShape(
        parameters=sum(sizes),
        layer=max(layers, default=0),
        outside=sum(sizes) - sum(layers),
        largest=max(sizes),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        queries=heads * width,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * width,
        feed_forward=_feed_forward(config),
        vocabulary=config.vocab_size,
        gated=any("gate" in name for name in names),
        norms_heads=any(name.endswith("q_norm.weight") for name in names),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        capped=getattr(config, "attn_logit_softcapping", None) is not None or any("sinks" in name for name in names),
        divisible=_among(divided, largest),
        experts=_among(experts, largest),
        divides_heads=divides_heads(model.tp_plan),
    )


def _elements(module: Any) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _among(sizes: dict[int, int], layer: Any) -> int:
    """Add up the parameter counts of some modules of a layer. `sizes` maps ids of modules to their parameter counts.

    The result is 0 if `layer` is None.
    """
    return 0 if layer is None else sum(sizes.get(id(module), 0) for module in layer.modules())


def _feed_forward(config: Any) -> int:
    """Return the feed-forward width for one token; with experts (MoE), summed over the experts that a token uses."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    chosen = getattr(config, "num_experts_per_tok", None)
    if not chosen:
        return int(width)
    one = getattr(config, "moe_intermediate_size", None) or width
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return int(chosen * one + shared)


def machine() -> Node:
    """Return this machine as a `Node`: the size of its memory, its number of GPUs, and the size of a GPU's memory."""
    gpus = int(devices_here()["GPU"])
    return Node("this machine", memory_here(), gpus, gpu_memory_here())


def nodes_of(facts: Sequence[NodeFacts]) -> list[Node]:
    """Return the machines of a running cluster, from the facts that each machine has reported."""
    return [Node(node.name, node.memory, int(node.gpus), node.gpu_memory) for node in facts]


def planned_nodes(placement: PlacementConfig) -> list[Node]:
    """Return the machines that the config describes with `placement.nodes`, even if no such machines exist."""
    memory, gpus, of_gpu = placement.node_memory_gb, placement.gpus_per_node or 0, placement.gpu_memory_gb
    node = Node(
        "each node",
        None if memory is None else int(memory * GIB),
        gpus,
        None if of_gpu is None else int(of_gpu * GIB),
    )
    return [node] * (placement.nodes or 0)
