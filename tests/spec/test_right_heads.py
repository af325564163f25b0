"""Heads that are right, made by construction: guesses are accepted, and nothing changes.

The targets are tiny models of which one layer does all the work, or none: EAGLE-3's and MTP's layer
is then a copy of that layer, and Medusa's heads are fitted to a table of what follows each token.
Turns red when a head's state, noise, position or page is another than the target's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.models.tiny import tiny_model
from tests.spec import heads
from tests.spec.cases import TEXTS, answer, open_tiny, sampling
from tests.spec.heads import VOCAB, config_of, eagle3_config, write

Tensors = dict[str, Tensor]
PROMPTS = [text * 2 for text in TEXTS if len(text) > 1]


def changed(folder: Path, change: Callable[[Tensors], None]) -> Tensors:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def silent(tensors: Tensors, layer: int) -> None:
    """What this layer adds is nothing."""
    for name in tensors:
        if name.startswith(f"model.layers.{layer}.") and ("o_proj" in name or "down" in name):
            tensors[name].zero_()


def right_eagle3(folder: Path) -> dict[str, object]:
    """The first layer speaks so loud that the embedding beside it does not count."""

    def change(tensors: Tensors) -> None:
        silent(tensors, 1)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.0.{name}.weight"] *= 30

    tiny_model("llama", folder / "llama", seed=3, hidden_size=64)
    target = changed(folder / "llama", change)
    made: Tensors = {"fc.weight": heads.numbers(1, (64, 128))[0]}
    for name, tensor in target.items():
        if name.startswith("model.layers.0."):
            own = name.removeprefix("model.layers.0.")
            is_read = own.split(".")[1] in ("q_proj", "k_proj", "v_proj")
            wide = torch.cat((tensor, torch.zeros_like(tensor)), 1) if is_read else tensor
            made[f"midlayer.{own}"] = wide  # of the embedding alone
    made["midlayer.hidden_norm.weight"] = torch.zeros(64)
    made |= {"norm.weight": target["model.norm.weight"], "lm_head.weight": target["lm_head.weight"]}
    config = {**eagle3_config(64, (0, 1), VOCAB), "norm_before_residual": True}
    write(folder / "head", config, made)
    return {"method": "eagle3", "model": str(folder / "head")}


def right_mtp(folder: Path) -> dict[str, object]:
    """The layer behind the last is the first one again."""
    at = "model.layers.3."

    def change(tensors: Tensors) -> None:
        silent(tensors, 1)
        silent(tensors, 2)
        embed = tensors["model.embed_tokens.weight"]
        embed /= embed.square().mean(1, keepdim=True).sqrt()  # as `enorm` leaves it
        first = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.")}
        tensors |= {at + n.removeprefix("model.layers.0."): t.clone() for n, t in first.items()}
        ones, hidden = torch.ones(32), torch.zeros(32, 32)
        tensors[at + "eh_proj.weight"] = torch.cat((torch.eye(32), hidden), 1)
        tensors |= {f"{at}enorm.weight": ones, f"{at}hnorm.weight": ones.clone()}
        tensors[f"{at}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()

    tiny_model("deepseek_v3", folder / "deepseek_v3", seed=3)
    assert config_of(folder / "deepseek_v3")["num_hidden_layers"] == 3
    changed(folder / "deepseek_v3", change)
    return {"method": "mtp"}


def right_medusa(folder: Path) -> dict[str, object]:
    """A token is followed by what its embedding says alone."""

    def change(tensors: Tensors) -> None:
        silent(tensors, 0)
        silent(tensors, 1)

    tiny_model("llama", folder / "llama", seed=3, hidden_size=64)
    target = changed(folder / "llama", change)
    embed, weight = target["model.embed_tokens.weight"], target["model.norm.weight"]
    hidden = torch.nn.functional.rms_norm(embed, (64,), weight, 1e-5)
    follows = (hidden @ target["lm_head.weight"].T).argmax(1)
    made: Tensors = {}
    label = follows
    for head in range(3):
        label = follows[label]
        product = torch.zeros(VOCAB, 64, requires_grad=True)
        fit = torch.optim.Adam([product], lr=0.1)
        for _ in range(60):
            fit.zero_grad()
            torch.nn.functional.cross_entropy(hidden @ product.T, label).backward()
            fit.step()
        made[f"blocks.{head}.layers.0.weight"] = torch.zeros(64, 64)
        made[f"lm_heads.{head}.weight"] = product.detach()
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}
    write(folder / "head", config, made)
    return {"method": "medusa", "model": str(folder / "head")}


RIGHT = {"eagle3": (right_eagle3, "llama", 0.8), "mtp": (right_mtp, "deepseek_v3", 0.8)}
RIGHT["medusa"] = (right_medusa, "llama", 0.9)


TREE = "[(0,), (1,), (0, 0), (0, 0, 0), (1, 0), (0, 1)]"


@pytest.mark.parametrize("method", [*RIGHT, "eagle3 tree"])
def test_right_heads_are_accepted(method: str, tmp_path: Path) -> None:
    name, _, is_tree = method.partition(" ")
    make, family, share = RIGHT[name]
    config = {**make(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    if is_tree:  # first guesses are as right as a chain's: one in two of this tree
        config |= {"speculative_token_tree": TREE, "num_speculative_tokens": 6}
        share /= 2
    asked = [(text, sampling("greedy", i, ignore_eos=True)) for i, text in enumerate(PROMPTS)]
    # Medusa's heads do not know what was drawn in between; the others draw with the same noise.
    drawn = [] if method == "medusa" else ["warm", "top-p", "penalties"]
    asked += [(PROMPTS[0], sampling(kind, 5, ignore_eos=True)) for kind in drawn]
    plain = answer(open_tiny(tmp_path, family), asked)
    llm = open_tiny(tmp_path, family, speculative_config=config)
    assert answer(llm, asked) == plain
    stats = llm.stats()
    assert stats.num_accepted_tokens > share * stats.num_drafted_tokens
    assert stats.num_steps < 16  # for 24 tokens
