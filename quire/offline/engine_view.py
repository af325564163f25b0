"""What scripts ask `llm.llm_engine` for: a few facts, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quire.engine.build import Engine
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str
    max_model_len: int
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int

    def get_vocab_size(self) -> int:
        return self.vocab_size

    def get_hidden_size(self) -> int:
        return self.hidden_size


@dataclass(frozen=True, slots=True)
class EngineView:
    model_config: ModelConfig
    tokenizer: Tokenizer | None

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer


def view_of(engine: Engine, model: str, tokenizer: Tokenizer | None) -> EngineView:
    config = ModelConfig(
        model,
        engine.config.sched.max_model_len,
        engine.runner.model.dtype,
        engine.spec.vocab_size,
        engine.spec.hidden_size,
    )
    return EngineView(config, tokenizer)
