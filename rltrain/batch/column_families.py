"""The columns of a batch: the family and the meaning of each. This module imports no large packages such as torch."""

# Maps the name of each column to its column family and its meaning. In each row, all columns of a family have the
# same number of entries, so all jagged columns of a family share one offsets tensor. The columns of the column family
# named "row" are dense tensors with one entry per row.
COLUMNS: dict[str, tuple[str, str]] = {
    "prompts": ("prompt", "token ids of the prompt, int64"),
    "responses": (
        "response",
        "ids of the tokens that the engine returned, and of the observation tokens between the turns, int64",
    ),
    "response_mask": ("response", "bool; True = the token was sampled by the policy and is trained on"),
    "rollout_log_probs": ("response", "engine's log-prob of each token when it was sampled, nats; 0 in observations"),
    "old_log_probs": ("response", "actor's log-prob of the token before the update, nats; see `has_old_log_probs`"),
    "has_old_log_probs": (
        "row",
        "bool; False = the row's `old_log_probs` and `entropies` are 0 and must not be read, because the row is in the "
        "first mini-batch, whose update computes them itself; a batch without this column has the values of all rows",
    ),
    "ref_log_probs": ("response", "reference model's log-prob of the token, nats"),
    "entropies": ("response", "entropy of the actor's distribution before the update, nats; see `has_old_log_probs`"),
    "ref_hidden": ("response", "(N, H): the reference's last hidden state at the position that predicts the token"),
    "ref_hidden_place": ("row", "int64, place of the row's `ref_hidden` on the rank that keeps it"),
    "prompt_experts": ("prompt", "(N, E), int16: numbers of the recorded experts of each token; -1 = not recorded"),
    "response_experts": ("response", "(N, E), int16: numbers of the recorded experts of each token; -1 = not recorded"),
    "prompt_images": ("prompt", "int64, number of the image that the token shows a part of; 0 = no image"),
    "image_files": ("images", "uint8, the files of the row's images; see `rltrain.batch.images`"),
    "full_kl": ("response", "exact KL of the actor from the reference model, computed before the update, nats"),
    "teacher_log_probs": ("response", "token's log-prob under the row's teacher, nats; undefined if `teacher` is -1"),
    "teacher_hidden": (
        "response",
        "(N, H): the teacher's last hidden state at the position that predicts the token; undefined if `teacher` is -1",
    ),
    "teacher_hidden_place": ("row", "int64, place of the row's `teacher_hidden` on the rank that keeps it"),
    "teacher": ("row", "int64, index of the row's teacher in the config; -1 = no teacher has scored the row"),
    "selected": (
        "response",
        "(N, E), bool; [:, e]: True = the token selector of the loss selected the token in epoch e of the step",
    ),
    "random_draws": (
        "response",
        "random number in [0, 1) that depends only on (seed, step, row, sampled token); 0 in observations",
    ),
    "positive_mask": (
        "response",
        "bool; True = the token was sampled in a correct answer, so its negative log-likelihood is added to the loss",
    ),
    "policy_version": ("response", "version (step) of the weights that sampled the token, int64; -1 in observations"),
    "turn_index": ("response", "int64, number of the turn in which the token was sampled, from 0; -1 in observations"),
    "context_starts": (
        "response",
        "bool; True = the first token of a new context, whose tokens do not attend to the tokens before it",
    ),
    "turn_states": (
        "response",
        "int64, hash of the observation of the token's turn; 0 at tokens that were not sampled",
    ),
    "turn_rewards": ("response", "reward that the environment gave for a turn, on the turn's last token; 0 elsewhere"),
    "token_level_rewards": ("response", "reward of each token, after shaping, normalisation and KL-in-reward"),
    "values": ("response", "critic's value of the state in which the token was chosen"),
    "bootstrap_values": (
        "row",
        "critic's value of the state after the last token of a truncated answer; 0 for other answers",
    ),
    "advantages": ("response", "advantage of the token"),
    "returns": ("response", "regression target of the critic's value"),
    "uid": ("row", "number of the row's prompt group, int64"),
    "valid": (
        "row",
        "bool; False = the statistics exclude the row, because it has no score, or because its answer is truncated and "
        "the config excludes truncated answers",
    ),
    "failed": ("row", "bool; True = a reward function or reward model failed on the row, so the row is not valid"),
    "failed_function": ("row", "number of the reward component that failed on the row; -1 if no component failed"),
    "scores": (
        "row",
        "weighted sum of the row's rewards; a reward with `gate: true` and a score <= 0 sets all other rewards to 0",
    ),
    "successes": (
        "row",
        "1 = correct answer, 0 = wrong answer, NaN = no reward function decides whether it is correct",
    ),
    "model_scores": ("row", "a reward model's score of the row, before the model's weight is applied"),
    "baseline_rewards": ("row", "score of the greedy answer to the row's prompt"),
    "reward_components": (
        "row",
        "(B, K), score of each reward function and then of each reward model; NaN = failed or not applicable",
    ),
}
