"""The class of a critic's model: a policy's base model with a linear layer that gives one value per token."""

import functools
from typing import Any

from rltrain.data.hub import local_directory
from rltrain.data.model_json import read_json


def value_model(path: str) -> Any:
    """Return the class that builds a critic for the model in a directory, with the interface of an Auto class.

    If transformers has a token classifier for the model's type, the critic is this token classifier. Otherwise,
    `value_model` makes a class of the same form from the base model.
    """
    # transformers takes seconds to import.
    from transformers import AutoModelForTokenClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )

    kind = str(read_json(local_directory(path) / "config.json").get("model_type"))
    if kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES or kind not in CONFIG_MAPPING:
        return AutoModelForTokenClassification
    policy = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)
    return AutoModelForTokenClassification if policy is None else _token_classifier(policy)


@functools.cache
def _token_classifier(policy: Any) -> Any:
    """Return a token classifier of the family of a language model, made as transformers makes its token classifiers."""
    from torch import nn
    from transformers.modeling_layers import GenericForTokenClassification

    family: Any = next(base for base in policy.__mro__ if base.__name__.endswith("PreTrainedModel"))
    generic: Any = GenericForTokenClassification

    class TokenClassifier(generic, family):  # type: ignore[misc]
        base_model_prefix = policy.base_model_prefix
        # transformers ignores its table of renamed and merged weights for classes of other modules.
        __module__ = policy.__module__

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            head: nn.Linear = self.score  # type: ignore[has-type]
            # Some OPT models project their last hidden states to another width.
            width: int = getattr(config, "word_embed_proj_dim", head.in_features)
            self.score = nn.Linear(width, config.num_labels, dtype=head.weight.dtype)

        @classmethod
        def from_config(cls, config: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:
            """Build the model as `AutoModelForTokenClassification.from_config` does."""
            return cls._from_config(config, **options)

    TokenClassifier.__name__ = TokenClassifier.__qualname__ = policy.__name__.replace("CausalLM", "TokenClassification")
    return TokenClassifier
