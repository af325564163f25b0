"""Prunes a model as llm-compressor does. Run by `prune_reference.py` with the Python that has it.

    PYTHON prune_by_llmcompressor.py MODEL IDS OUT METHOD PATTERN

IDS is a NumPy file of calibration tokens, [sequences, length]; METHOD is magnitude, wanda or
sparsegpt; PATTERN is `0:0` for half of all weights, or `2:4`. Its magnitude modifier belongs to a
training loop, so of that method the mask alone is taken from the package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.pruning.utils.pytorch import (
    PruningMaskCreatorArgs,
    PruningMaskFactory,
)
from transformers import AutoModelForCausalLM

SHARE = 0.5
MODIFIERS = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}


def by_magnitude(model: Any) -> None:
    mask_of = PruningMaskFactory.create_mask_creator("unstructured")
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            args = PruningMaskCreatorArgs(module.weight, SHARE, weight.abs())
            weight *= mask_of(args)


def by_modifier(model: Any, ids: Path, method: str, pattern: str) -> None:
    tokens = np.load(ids)
    rows = {"input_ids": tokens.tolist(), "attention_mask": np.ones_like(tokens).tolist()}
    layer = type(model.model.layers[0]).__name__
    oneshot(
        model=model,
        dataset=Dataset.from_dict(rows),
        recipe=MODIFIERS[method](sparsity=SHARE, mask_structure=pattern, targets=[layer]),
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
        shuffle_calibration_samples=False,
    )


def main() -> None:
    folder, ids, out, method, pattern = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if method == "magnitude":
        by_magnitude(model)
    else:
        by_modifier(model, Path(ids), method, pattern)
    model.save_pretrained(out, save_compressed=False)


if __name__ == "__main__":
    main()
