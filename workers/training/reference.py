"""The reference model for KL terms and self-distillation: a frozen, sharded copy of the initial policy."""

from torch import Tensor

from rltrain.batch.data_proto import DataProto
from rltrain.settings.schema import Config
from workers.models.packed_forward import Pack, policy_output, row_pass
from workers.training.teacher import TeacherWorker


class ReferenceWorker(TeacherWorker):
    """One rank of the reference model, whose weights never change. The reference model may also be a teacher.

    Args:
        config: the run's whole config.
        path: model directory in Hugging Face format.
    """

    def __init__(self, config: Config, path: str) -> None:
        super().__init__(config, path, f"model.path={path}")

    def compute_log_probs(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Compute the reference model's columns that the KL terms need, with rows in the order of `microbatches`.

        Returns:
            A batch with the column `ref_log_probs` if the KL is estimated from samples, and with the column
            `ref_hidden` (the last hidden states) if the KL is exact.
        """
        algorithm, temperature = self.config.algorithm, self.config.rollout.temperature

        def columns(_: DataProto, packed: Pack) -> dict[str, Tensor]:
            output = policy_output(self.model, packed, temperature=temperature, hidden=algorithm.needs_full_kl)
            found = {"ref_log_probs": output.log_probs} if algorithm.needs_ref_log_probs else {}
            return found if output.hidden is None else found | {"ref_hidden": output.hidden}

        return row_pass(self.model, columns, batch, microbatches)
