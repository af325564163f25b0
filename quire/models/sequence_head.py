"""Classification heads: `...ForSequenceClassification` is a family's decoder and one matrix more.

The head (`score`) reads the hidden state of the last token and gives a number for each label;
a reward model has one label. What the numbers are turned into (`Verdict`) follows the config: one
number alone is squashed into 0...1, several compete, a regression stays as it is. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import NotSupported
from quire.models.spec import MAX_LABELS, Config, ModelSpec

SUFFIX = "ForSequenceClassification"
NAMES = {"score.weight": "score.weight"}
DEFAULT_LABELS = 2  # of a config that names none, as in transformers
# Where the language model of a family is called otherwise.
LANGUAGE_MODELS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def is_classifier(architecture: str) -> bool:
    return architecture.endswith(SUFFIX)


def language_model_of(architecture: str) -> str:
    """The architecture whose decoder a classifier has; others stand for themselves."""
    if not is_classifier(architecture):
        return architecture
    base = architecture.removesuffix(SUFFIX)
    return LANGUAGE_MODELS.get(base, f"{base}ForCausalLM")


def with_head(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Such checkpoints have no vocabulary head: the embedding stands in where one is asked for."""
    return replace(spec, num_labels=len(labels_of(config)), tied=True)


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the labels, in the order of the head's rows."""
    named = config.get("id2label")
    if named is None:
        count = Config(config).count("num_labels", DEFAULT_LABELS)
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(named, Mapping) or not 1 <= len(named) <= MAX_LABELS:
        raise Config(config).error("id2label", f"an object of 1 to {MAX_LABELS} names")
    by_id = {key: str(label) for key, label in named.items() if isinstance(label, (str, int))}
    try:
        return tuple(by_id[str(i)] for i in range(len(named)))
    except KeyError:
        raise Config(config).error("id2label", "a name for each of 0, 1, ...") from None


BY_TASK = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid"}  # last part of a class's name


def _trained_activation(config: Mapping[str, Any]) -> str:
    """Rerankers by sentence-transformers name the module their numbers go through."""
    nested = config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function") or ""
    return str(named).rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a head's numbers mean.

    >>> Verdict(("bad", "good"), "softmax").probabilities([0.0, 0.0])
    [0.5, 0.5]
    """

    labels: tuple[str, ...]
    activation: str  # "softmax", "sigmoid" or "none"

    @staticmethod
    def of(config: Mapping[str, Any]) -> Verdict | None:
        """None where the config describes no classifier."""
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            return None
        if not is_classifier(str(architectures[0])):
            return None
        labels = labels_of(config)
        usual = "sigmoid" if len(labels) == 1 else "softmax"
        by_name = ACTIVATIONS.get(_trained_activation(config), usual)
        return Verdict(labels, BY_TASK.get(str(config.get("problem_type")), by_name))

    def for_pairs(self) -> Verdict:
        """Itself, if it can say how well two texts go together. Raises NotSupported."""
        if len(self.labels) != 1:
            raise NotSupported(
                f"scores of pairs need a head of one label, this one has {len(self.labels)}"
                f" ({', '.join(self.labels[:4])}); classify the texts instead"
            )
        return self

    def probabilities(self, scores: Sequence[float]) -> list[float]:
        if self.activation == "softmax":
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = math.fsum(weights)
            return [weight / total for weight in weights]
        if self.activation == "sigmoid":
            return [_sigmoid(score) for score in scores]
        return list(scores)


def _sigmoid(x: float) -> float:
    # The form whose exp cannot overflow.
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
