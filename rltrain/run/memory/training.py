"""The memory of a training rank: parameters, gradients, optimizer states, gathered layers and activations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rltrain.batch.row_costs import KEYS
from rltrain.run.memory.parts import (
    GPU_CONTEXT,
    GRADIENT,
    LOG_PROBS,
    MASTER,
    MIB,
    MOMENTS,
    PHASES,
    SAVE,
    START,
    SYNC,
    UPDATE,
    WIDTHS,
    FixedSizes,
    ModelShape,
    Part,
    ProcessMemory,
    total,
)
from rltrain.settings.distillation_config import REFERENCE
from rltrain.settings.schema import REWARD_MODEL, Config

# Bytes of host memory that Python, torch and other libraries take in a training rank, before a model is loaded.
RANK_BASE = 370 * MIB
# Number of chunks of logits that exist at the same time, all in float32.
CHUNKS = 3
# On a CPU, `keep_freed_memory` makes glibc keep freed blocks of memory. Each step frees gradients and activations, and
# new blocks are allocated between freed blocks, so the process's memory becomes fragmented and contains unused holes.
# In training with models of 24M, 52M and 135M parameters, the unused memory between allocated blocks was as large as
# the gradients plus a quarter of the activations. Without `keep_freed_memory`, training of a model with 24M parameters
# left no unused memory between allocated blocks.
HOLES_OF_GRADIENTS, HOLES_OF_ACTIVATIONS = 1.0, 0.25
# If several ranks shard a model on CPUs, FSDP gathers each layer into one new block, and then copies the layer's
# parameters into further new blocks. In twelve runs of two ranks, with models of 24M to 180M parameters, each of the
# two kinds of blocks left unused memory of about 0.6 times the size of all layers. Blocks of at least `LARGE_BLOCK`
# bytes leave no unused memory, because glibc returns them to the system (see `keep_freed_memory`).
# In the backward pass, the gradients of the parameters outside the layers exist in full, in the input of the
# reduce-scatter and in copies of gloo. These gradients took about 1.6 times the bytes of these parameters.
HOLES_OF_LAYERS, LARGE_BLOCK, REDUCED_OUTSIDE = 0.6, 32 * MIB, 1.6
# Number of copies of attention scores, in float32, that exist at the same time in the backward pass.
COPIES_OF_SCORES = 5
# While the exported model is written, three copies of the model's largest tensor can exist: the bytes read from the
# checkpoint, the chunk loaded from these bytes, and the whole tensor assembled from the chunks.
EXPORT_COPIES = 3
HOLES = "freed memory that glibc keeps"
MORE_RANKS = "raise placement.{}, the number of ranks over which parameters are sharded"


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Values that determine the memory of one role of a training rank.

    Attributes:
        name: the role, such as "actor".
        shape: sizes of the role's model.
        trained: number of trained parameters; 0 for a model that is never trained.
        width: number of bytes of one stored parameter.
        has_head: whether the model computes logits over the vocabulary.
        other_heads: number of elements of the output heads of other models, of which the actor keeps whole copies to
            compute exact KLs.
        hidden: number of elements of hidden states for each response token that the role sends to the actor, or that
            the actor reads, to compute exact KLs.
    """

    name: str
    shape: ModelShape
    trained: int
    width: int
    has_head: bool = True
    other_heads: int = 0
    hidden: int = 0


def training_ranks(
    config: Config, roles: Sequence[RoleMemory], limits: FixedSizes, *, on_gpu: bool, base: int = RANK_BASE
) -> list[ProcessMemory]:
    """Return, for each kind of training rank, the memory of one rank and the number of ranks.

    With `placement.share_ranks`, one process has all roles. Without `share_ranks`, each role has processes of its own.
    """
    count = config.placement.actor_ranks
    if config.placement.share_ranks:
        return [_process("training rank", count, config, roles, limits, on_gpu=on_gpu, base=base)]
    return [_process(f"{role.name} rank", count, config, [role], limits, on_gpu=on_gpu, base=base) for role in roles]


def roles_of(
    config: Config, shape: ModelShape, others: Mapping[str, ModelShape], *, adapters: int | None, needs_critic: bool
) -> list[RoleMemory]:
    """Return, for each role of a run's training ranks, the values that determine the role's memory.

    Args:
        config: the whole config.
        shape: sizes of the model that is trained.
        others: maps the roles of reward models and teachers to the sizes of their models.
        adapters: number of parameters of the adapters, or None if the whole model is trained.
        needs_critic: whether the run has a critic.
    """
    compute = WIDTHS[config.model.dtype]
    # A reference model that is a moving average of the actor's weights is kept in float32.
    averaged = config.algorithm.reference.refresh_coef < 1
    found = []
    for name in config.roles(needs_critic=needs_critic):
        sent = _sent_width(config, name, others.get(name, shape))
        if name == "actor":
            trained = shape.parameters if adapters is None else adapters
            heads, hidden = _other_heads(config, shape, others), sum(hidden_columns(config, shape, others))
            found.append(
                RoleMemory(name=name, shape=shape, trained=trained, width=MASTER, other_heads=heads, hidden=hidden)
            )
        elif name == "critic":
            found.append(RoleMemory(name=name, shape=shape, trained=shape.parameters, width=MASTER, has_head=False))
        elif name == "reference":
            width = MASTER if averaged else compute
            found.append(RoleMemory(name=name, shape=shape, trained=0, width=width, hidden=sent))
        else:
            has_head = not name.startswith(REWARD_MODEL)
            found.append(
                RoleMemory(name=name, shape=others[name], trained=0, width=compute, has_head=has_head, hidden=sent)
            )
    return found


def hidden_columns(config: Config, shape: ModelShape, others: Mapping[str, ModelShape]) -> list[int]:
    """Return the width of each column of hidden states (N, width) that the exact KLs of a run need.

    Args:
        config: the whole config.
        shape: sizes of the model that is trained, and of the reference model.
        others: maps the roles of teachers to the sizes of their models.
    """
    algorithm = config.algorithm
    columns = [shape.hidden] if algorithm.needs_full_kl else []
    if algorithm.distillation.full:
        # Hidden states of all teachers are in one column, which is as wide as those of the widest teacher.
        columns.append(max(others.get(teacher.role, shape).hidden for teacher in algorithm.distillation.teachers))
    return columns


def _sent_width(config: Config, role: str, shape: ModelShape) -> int:
    """Return the number of elements of hidden states that a role sends to the actor for each response token."""
    algorithm = config.algorithm
    teaches = algorithm.distillation.full and any(role == one.role for one in algorithm.distillation.teachers)
    return shape.hidden if teaches or (role == REFERENCE and algorithm.needs_full_kl) else 0


def _other_heads(config: Config, shape: ModelShape, others: Mapping[str, ModelShape]) -> int:
    """Return the number of elements of the output heads that the actor keeps to compute exact KLs.

    A copy of a teacher's head has only the rows of the policy's vocabulary.
    """
    algorithm = config.algorithm
    teachers = algorithm.distillation.models if algorithm.distillation.full else []
    heads = sum(shape.vocabulary * others[teacher.role].hidden for teacher in teachers)
    return heads + (shape.head if algorithm.needs_reference_head else 0)


def _process(
    name: str,
    count: int,
    config: Config,
    roles: Sequence[RoleMemory],
    limits: FixedSizes,
    *,
    on_gpu: bool,
    base: int,
) -> ProcessMemory:
    memory = RankMemory(config, roles, limits, on_gpu=on_gpu)
    fixed = Part("libraries", base)
    if not on_gpu:
        phases = {phase: [fixed, *memory.device(phase), *memory.host(phase)] for phase in PHASES}
        return ProcessMemory(name=name, count=count, host=phases, device={})
    context = Part("CUDA and NCCL", GPU_CONTEXT)
    return ProcessMemory(
        name=name,
        count=count,
        host={phase: [fixed, *memory.host(phase)] for phase in PHASES},
        device={phase: [context, *memory.device(phase)] for phase in PHASES},
    )


class RankMemory:
    """The memory of the roles of one training rank.

    Args:
        config: the whole config.
        roles: the roles that the rank has.
        limits: constant sizes of weight-sync buckets and logits chunks.
        on_gpu: whether the rank computes on a GPU.
    """

    def __init__(self, config: Config, roles: Sequence[RoleMemory], limits: FixedSizes, *, on_gpu: bool) -> None:
        self.config, self.roles, self.limits, self.on_gpu = config, roles, limits, on_gpu
        placement = config.placement
        self.shards = placement.shard_ranks or placement.actor_ranks
        self.tensor, self.experts = placement.tensor_ranks, placement.expert_ranks
        # Number of ranks with different tokens. Ranks that divide the matrices of layers have the same tokens, and
        # ranks that split rows have different tokens.
        self.batches = placement.actor_ranks // placement.tensor_ranks
        self.compute = WIDTHS[config.model.dtype]
        # A single rank in float32 without CPU offload computes with the stored parameters, so FSDP gathers no copies.
        self.gathers = placement.actor_ranks > 1 or config.model.dtype != "float32" or config.model.cpu_offload
        key = "actor_ranks" if placement.shard_ranks is None else "shard_ranks"
        self.more_ranks = MORE_RANKS.format(f"{key}={self.shards}")

    def device(self, phase: str) -> list[Part]:
        """Return the parts of the rank's memory that are on its device: in GPU memory, or in host memory on a CPU."""
        states = [] if self.config.model.cpu_offload else self.states(phase)
        if phase == START:
            states = [*states, self.stacking()]
            return states if self.on_gpu else [*states, self.loading()]
        if phase == LOG_PROBS:
            return [*states, *self.largest(self.forward(role) for role in self.roles)]
        if phase == UPDATE:
            updates = [self.update(role) for role in self.roles if role.trained]
            return [*states, *self.largest(updates)]
        if phase == SYNC:
            return [*states, *self.sending()]
        return states

    def host(self, phase: str) -> list[Part]:
        """Return the parts of the rank's memory that are in host memory even if the rank computes on a GPU."""
        states = self.states(phase) if self.config.model.cpu_offload else self.offloaded_moments(phase)
        if phase == START and self.on_gpu:
            return [*states, self.loading()]
        if phase == LOG_PROBS:
            return [*states, *self.largest([self.sent(role)] for role in self.roles if role.name != "actor")]
        if phase == UPDATE:
            return [*states, *self.kept()]
        return [*states, *self.saving()] if phase == SAVE else states

    def states(self, phase: str) -> list[Part]:
        """Return the memory of the rank's shards of all models, and of the moments on the same device.

        In the phase `START`, there are no moments yet. With `offload_optimizer`, moments are on that device only in the
        phase `UPDATE`.
        """
        weights = sum(self.stored(role) * (role.shape.parameters * role.width + _extra(role)) for role in self.roles)
        present = [role for role in self.roles if phase == UPDATE or not self.offloads(role)]
        moments = sum(self.stored(role) * role.trained for role in present) * MOMENTS
        parts = [Part("parameters", weights, self.more_ranks)]
        if heads := sum(role.other_heads for role in self.roles):
            parts.append(Part("output heads of other models", heads * self.compute))
        return parts if phase == START else [*parts, Part("optimizer states", moments, self.more_ranks)]

    def offloaded_moments(self, phase: str) -> list[Part]:
        """Return the CPU memory that holds moments between the updates. This memory is not freed during the update."""
        trained = sum(self.stored(role) * role.trained for role in self.roles if self.offloads(role))
        if phase == START or not trained:
            return []
        return [Part("optimizer states in CPU memory", trained * MOMENTS, self.more_ranks)]

    def offloads(self, role: RoleMemory) -> bool:
        """Return whether a role's moments are in CPU memory between the updates."""
        settings = {"actor": self.config.actor, "critic": self.config.critic}
        return role.name in settings and settings[role.name].offload_optimizer

    @staticmethod
    def largest(choices: Iterable[list[Part]]) -> list[Part]:
        """Return the list in `choices` whose parts have the most bytes in total; [] if `choices` is empty."""
        return max(choices, key=total, default=[])

    def loading(self) -> Part:
        """Return the memory that a rank needs in addition to its own shards while the rank loads its models.

        Before a rank loads its shard of a model, the rank loads one decoder layer and the parameters outside the
        layers, to check that packed rows do not influence each other. The parameters that a rank loads for the check of
        packed rows are in float32 in host memory, and are freed before the rank loads its shard. If the rank computes
        on a CPU, the shard reuses the host memory that is freed after the check of packed rows. For a rank on a CPU,
        the memory plan therefore counts only the bytes by which the parameters for the check are larger than the shard,
        or 0 bytes if the parameters are smaller. In a model with experts, separate experts (see `stacking`) fill the
        freed host memory, so the memory plan counts all bytes of the parameters for the check.
        """
        samples = []
        for role in self.roles:
            shard = 0 if self.on_gpu or role.shape.experts else role.shape.parameters * role.width * self.stored(role)
            samples.append((role.shape.outside + role.shape.layer) * MASTER - shard)
        return Part("layers for the check of packed rows", max(0, *samples))

    def stacking(self) -> Part:
        """Return the memory of the experts that a rank has read from files and not yet stacked into one tensor."""
        sizes = (role.shape.layers * role.shape.experts * role.width * self.stored(role) for role in self.roles)
        return Part("experts before they are stacked", max(sizes))

    def gathered(self, role: RoleMemory) -> Part:
        """Return the memory of gathered parameters: FSDP gathers two layers and all parameters outside the layers."""
        size = (role.shape.outside + 2 * self.layer(role)) * self.compute if self.gathers else 0
        return Part("gathered parameters", size)

    def gathering(self, role: RoleMemory) -> list[Part]:
        """Return the memory that a rank needs while FSDP gathers embeddings, last norm and head before a forward pass.

        FSDP gathers these parameters into a buffer, and then copies them out of the buffer. On CPUs, the gloo backend
        makes copies of the buffer and of the rank's shard.
        """
        copies = 2.0 if self.on_gpu else 3 + 1 / self.shards
        size = copies * role.shape.outside * self.compute if self.gathers and self.shards > 1 else 0
        return [Part("gathered parameters", size)]

    def stored(self, role: RoleMemory) -> float:
        """Return the share of a model's parameters that a rank stores.

        All ranks of a copy of the model share the matrices that tensor parallelism divides. The other parameters have a
        copy on each of the ranks that divide a matrix.
        """
        shape = role.shape
        divided = shape.layers * shape.divisible / shape.parameters
        tensor = self.tensor_ranks(role)
        return (divided + (1 - divided) * tensor) / self.shards

    def layer(self, role: RoleMemory) -> float:
        """Return the number of elements of a decoder layer on one rank, after FSDP has gathered the layer."""
        shape = role.shape
        whole = shape.layer - shape.divisible - shape.experts
        return whole + shape.divisible / self.tensor_ranks(role) + shape.experts / self.experts

    def tensor_ranks(self, role: RoleMemory) -> int:
        """Return the number of ranks that divide matrices. The ranks do not divide those of reward models."""
        return 1 if role.name.startswith(REWARD_MODEL) else self.tensor

    def forward(self, role: RoleMemory) -> list[Part]:
        """Return the memory that a forward pass without gradients needs."""
        shape, tokens = role.shape, self.tokens(role)
        matrices = 3 if shape.gated else 2
        widths = 3 * shape.hidden + matrices * shape.feed_forward
        parts = [
            self.gathered(role),
            Part(HOLES, self.holes_of_layers(role)),
            Part("activations", tokens * widths * self.compute, self.fewer(role)),
            self.scores(role),
            self.hidden_states(role),
        ]
        return self.largest([self.gathering(role), [*parts, self.chunk(role)] if role.has_head else parts])

    def update(self, role: RoleMemory) -> list[Part]:
        """Return the memory that forward and backward pass need in addition to parameters and optimizer states.

        At the end of the forward pass, all activations exist, and the backward pass begins with the output head. At the
        end of the backward pass, all gradients exist. The plan counts the memory at the end of the forward pass or at
        the end of the backward pass, whichever is larger.
        """
        shape, full = role.shape, role.trained >= role.shape.parameters
        head = Part("gradient of the head", shape.head * self.compute if full and role.has_head else 0)
        own = Part("gradients", role.trained * GRADIENT * self.stored(role), self.more_ranks)
        layer = self.layer(role) * (self.compute + GRADIENT) if self.gathers and full else 0
        reduced = [Part("gradients of a layer", layer)] if layer else []
        activations = Part("activations", self.activations(role), self.fewer(role))
        chunk = [self.chunk(role)] if role.has_head else []
        holes = 0 if self.on_gpu else HOLES_OF_GRADIENTS * own.size + HOLES_OF_ACTIVATIONS * activations.size
        holes += self.holes_of_layers(role)
        both = [self.gathered(role), head, Part(HOLES, holes), self.scores(role)]
        if full and self.copies_shards(role):
            both.append(Part("gradients outside the layers", REDUCED_OUTSIDE * shape.outside * GRADIENT))
        both.append(self.hidden_states(role))
        begin = [*both, activations, *chunk, *([own] if self.passes(role) > 1 else [])]
        end = [*both, own, *([head] if shape.tied else []), *reduced]
        return self.largest([self.gathering(role), begin, end])

    def copies_shards(self, role: RoleMemory) -> bool:
        """Return whether the rank exchanges shards with other ranks through gloo, which needs copies."""
        return self.gathers and not self.on_gpu and self.shards > self.tensor_ranks(role)

    def holes_of_layers(self, role: RoleMemory) -> float:
        """Return the bytes of host memory that stay unused because gathered layers have fragmented the memory."""
        if not self.copies_shards(role):
            return 0.0
        shape, layer = role.shape, self.layer(role) * self.compute
        # The largest parameter of a layer is one matrix of the feed-forward part. With experts, it holds two of the
        # three matrices of each expert.
        largest = max(shape.hidden * shape.feed_forward, 2 / 3 * shape.experts / self.experts) * self.compute
        kinds = sum(size < LARGE_BLOCK for size in (layer, largest))
        return kinds * HOLES_OF_LAYERS * shape.layers * layer

    def activations(self, role: RoleMemory) -> float:
        """Return the bytes of the activations that a forward pass keeps for the backward pass."""
        kernel = self.on_gpu and not role.shape.capped
        of_rank = self.divided(role)
        layer, tokens = saved_bytes(of_rank, self.compute, kernel=kernel, keys=0), self.tokens(role)
        # With context parallelism, the queries of the last chunk can attend to the keys of all chunks.
        keys = self.config.placement.context_ranks * self.keys(role)
        of_layer = tokens * layer + 2 * keys * of_rank.keys * self.compute
        of_head = role.shape.hidden * (3 * MASTER + self.compute)
        if not self.config.model.activation_checkpointing:
            return role.shape.layers * of_layer + tokens * of_head
        return of_layer + tokens * (role.shape.layers * role.shape.hidden * self.compute + of_head)

    def divided(self, role: RoleMemory) -> ModelShape:
        """Return the sizes of a role's model, with the widths of heads and feed-forward part on one rank."""
        shape, tensor = role.shape, self.tensor_ranks(role)
        if tensor == 1 or not shape.divisible:
            return shape
        of_heads = tensor if shape.divides_heads else 1
        return replace(
            shape,
            queries=shape.queries // of_heads,
            keys=shape.keys // of_heads,
            feed_forward=shape.feed_forward // (1 if shape.experts else tensor),
        )

    def scores(self, role: RoleMemory) -> Part:
        """Return the peak memory of materialised attention scores, and of the biases that are added to scores.

        Only models with soft caps or sinks have materialised scores. Biases exist in these models, and on CPUs if rows
        share tokens. All layers share a bias, except that layers with a sliding window have their own.
        """
        rollout, shape = self.config.rollout, role.shape
        longest = rollout.max_prompt_length + rollout.max_response_length
        of_key_head = longest**2 * shape.queries // shape.keys
        scores = COPIES_OF_SCORES * max(of_key_head, self.limits.scores) if shape.capped else 0
        kinds = 2 if shape.capped else int(self._group()[2] > 1 and not self.on_gpu)
        return Part("attention scores", (scores + kinds * self.tokens(role) * longest) * MASTER, self.fewer(role))

    def chunk(self, role: RoleMemory) -> Part:
        """Return the peak memory of logits, which the output head computes in chunks of at most `limits.chunk`."""
        logits = self._response_tokens(role) * role.shape.vocabulary
        return Part("logits of a chunk", CHUNKS * min(self.limits.chunk, logits) * MASTER)

    def hidden_states(self, role: RoleMemory) -> Part:
        """Return the hidden states for exact KLs at the response tokens of one forward pass."""
        size = self._response_tokens(role) * role.hidden * self.compute
        return Part("hidden states for the exact KL", size, self.fewer(role))

    def sent(self, role: RoleMemory) -> Part:
        """Return the hidden states for exact KLs that a role computes in one training step.

        The hidden states of all forward passes are collected, and then copied into one column.
        """
        return self._of_step(2 * role.hidden)

    def kept(self) -> list[Part]:
        """Return the hidden states for exact KLs that the rank keeps or reads during the update of the actor.

        A rank of a teacher keeps the hidden states that it has computed. A rank of the actor gets copies of the hidden
        states that it reads, and joins the copies into one column. Each row has one teacher, so the plan counts only
        the teacher with the widest hidden states. If all roles run in the driver's process, the plan counts the hidden
        states there.
        """
        if self.config.placement.launcher == "inprocess":
            return []
        actor, reference = (
            sum(role.hidden for role in self.roles if role.name == name) for name in ("actor", REFERENCE)
        )
        others = [role.hidden for role in self.roles if role.name not in ("actor", REFERENCE)]
        width = 2 * actor + reference + max(others, default=0)
        return [self._of_step(width)] if width else []

    def _of_step(self, width: int) -> Part:
        """Return the memory of `width` elements for each response token that the rank processes in a step."""
        config = self.config
        rows = -(-config.trainer.prompts_per_step * config.rollout.samples_per_prompt // self.batches)
        size = rows * config.rollout.max_response_length * width * self.compute
        return Part("hidden states of a step", size, self.more_ranks)

    def _response_tokens(self, role: RoleMemory) -> float:
        """Return the largest number of response tokens that the rank processes in one forward pass."""
        prompt, answers, _ = self._group()
        return self.tokens(role) * answers / (prompt + answers)

    def tokens(self, role: RoleMemory) -> int:
        """Return the largest number of tokens that the rank processes in one forward pass."""
        return min(self._section(role), self.row_tokens())

    def keys(self, role: RoleMemory) -> int:
        """Return the largest number of keys that attention reads in one forward pass."""
        return min(KEYS * self._section(role), self.row_keys()) if self._group()[2] > 1 else self.tokens(role)

    def passes(self, role: RoleMemory) -> int:
        """Return the number of forward and backward passes for one mini-batch, if all rows have the maximum length."""
        size = max(self.row_tokens(), -(-self.row_keys() // KEYS))
        return -(-size // self._section(role))

    def row_tokens(self) -> int:
        """Return the number of tokens that one rank processes per mini-batch, if all rows have the maximum length."""
        prompts, rows = self._rows_of_rank()
        return prompts * self.config.rollout.max_prompt_length + rows * self.config.rollout.max_response_length

    def row_keys(self) -> int:
        """Return the number of keys that attention reads on one rank per mini-batch, in rows of the maximum length.

        The keys of a prompt are read by the prompt itself, and by each answer that shares it.
        """
        prompts, rows = self._rows_of_rank()
        prompt, answer = self.config.rollout.max_prompt_length, self.config.rollout.max_response_length
        return rows * (prompt + answer) + (prompts * prompt if self._group()[2] > 1 else 0)

    def _rows_of_rank(self) -> tuple[int, int]:
        """Return how many prompts and how many rows one rank processes per mini-batch at most.

        If the ranks cannot get equal numbers of groups, a group's rows are divided over several ranks, and each of
        these ranks computes the group's prompt.
        """
        ranks, groups = self.batches, self.config.trainer.prompts_per_minibatch
        rows = -(-groups * self.config.rollout.samples_per_prompt // ranks)
        if self._group()[2] == 1:
            return rows, rows
        return min(rows, groups if groups % ranks else groups // ranks), rows

    def _group(self) -> tuple[int, int, int]:
        """Return the tokens of a prompt, the tokens of all answers that share it, and the number of these answers."""
        rollout = self.config.rollout
        rows = rollout.samples_per_prompt if self.config.actor.share_prefixes else 1
        return rollout.max_prompt_length, rows * rollout.max_response_length, rows

    def _section(self, role: RoleMemory) -> int:
        return (self.config.critic if role.name == "critic" else self.config.actor).max_tokens_per_microbatch

    def fewer(self, role: RoleMemory) -> str:
        """Return the text that tells the user how to make the activations smaller."""
        section = "critic" if role.name == "critic" else "actor"
        if self.config.model.activation_checkpointing:
            return f"lower {section}.max_tokens_per_microbatch={self._section(role)}"
        return (
            f"lower {section}.max_tokens_per_microbatch={self._section(role)}, or set "
            "model.activation_checkpointing=true"
        )

    def sending(self) -> list[Part]:
        """Return the memory of the buckets into which the actor's ranks write their weights in a weight sync."""
        actor = next((role for role in self.roles if role.name == "actor"), None)
        if actor is None:
            return []
        largest = actor.shape.largest * self.compute
        transport, bucket = self.config.rollout.weight_transport, max(self.limits.bucket_bytes, largest)
        if transport == "device_handles":
            # The ranks gather the float32 weights of each bucket. A rank writes a bucket while engines read the one
            # before. On a CPU, the rank copies each bucket to a shared file.
            copies = self.limits.buckets * (1 if self.on_gpu else 2)
            return [Part("sync buckets", bucket * (MASTER / self.compute + copies))]
        # With tensor parallelism, a matrix of which each rank has some columns is gathered before it is sent.
        shards = self.shards if self.tensor == 1 else 1
        if transport == "nccl":
            return [Part("sync buckets", self.limits.buckets * bucket / shards)]
        if self.on_gpu:
            return [Part("sync buckets", largest / shards)]
        return [Part("sync buckets", min(self.limits.buckets * bucket, actor.shape.parameters * self.compute))]

    def saving(self) -> list[Part]:
        """Return the memory needed to save a checkpoint: copies of the training state, and exported tensors."""
        trained = sum(role.trained * self.stored(role) for role in self.roles)
        largest = max(role.shape.largest for role in self.roles)
        return [
            Part("copies for the checkpoint", trained * (MASTER + MOMENTS), self.more_ranks),
            Part("export", EXPORT_COPIES * largest * MASTER),
        ]


def _extra(role: RoleMemory) -> int:
    """Return the bytes of the parameters of a role's LoRA adapters; 0 without adapters."""
    return role.trained * MASTER if 0 < role.trained < role.shape.parameters else 0


def saved_bytes(shape: ModelShape, width: int, *, kernel: bool, keys: int = 1) -> int:
    """Return the bytes of the activations that one decoder layer keeps for each token until the backward pass.

    A norm keeps its input, the normalised input and its output. Until the backward pass, the attention keeps the
    queries, the keys, the values and the attention output. Without an attention kernel for packed rows, the output
    projection keeps its own copy of the attention output. The feed-forward part keeps the input of the activation
    function, the input of the last matrix and, with a gate, both inputs of the product with the gate.

    Args:
        shape: sizes of the model.
        width: number of bytes of one element in the dtype of the matrix products.
        kernel: whether an attention kernel for packed rows computes the attention.
        keys: number of keys and values that the attention keeps for each token.
    """
    norm = MASTER + 2 * width if width < MASTER else 3 * MASTER
    norms = 2 * shape.hidden * norm
    if shape.norms_heads:
        norms += (shape.queries + shape.keys) * (norm - width)
    attention = (2 if kernel else 3) * shape.queries + 2 * keys * shape.keys
    return norms + (attention + (4 if shape.gated else 2) * shape.feed_forward) * width
