"""Shrinking: smaller checkpoints of the parts that matter, which transformers reads too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.compress.pipeline import Progress, compress
from quire.compress.shrink.choice import Choice
from quire.compress.shrink.importance import Importance
from quire.compress.shrink.sizes import Sizes
from quire.compress.source import Source
from quire.errors import BadRequest, NotSupported
from quire.models.tiny import tiny_model
from tests.compress.models import hidden, job, run, small

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
CUTS: tuple[dict[str, Any], ...] = (
    {"heads": 4},
    {"kv_heads": 2},
    {"hidden": 48},
    {"layers": 2, "mlp": 32, "kv_heads": 2, "heads": 2, "hidden": 40},
)
FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "Gemma2ForCausalLM", "Gemma3ForCausalLM")


def model_of(folder: Path, family: str) -> Path:
    more: dict[str, Any] = dict(HEADS)
    if "Gemma3" in family:  # one layer in three sees everything
        kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        more["layer_types"] = kinds
    return small(folder, family, **more)


def logprobs(folder: Path, ids: list[int]) -> Tensor:
    """What the engine says of each token of a prompt but its first."""
    llm = LLM(model=str(folder), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (made,) = llm.generate({"prompt_token_ids": ids}, asked)
    assert made.prompt_logprobs is not None
    said = zip(ids[1:], made.prompt_logprobs[1:], strict=True)
    return torch.tensor([record[token].logprob for token, record in said])


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_model(family: str, tmp_path: Path) -> None:
    """Red when a tensor is cut elsewhere than its neighbours, a layer keeps its old number or
    window, or config.json says another shape."""
    model = model_of(tmp_path, family)
    ids = torch.randint(2, 250, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for number, sizes in enumerate(CUTS if family == "llama" else CUTS[-1:]):
        out = tmp_path / str(number)
        report: Any = run(model, out, "shrink", keep=(), **sizes)
        assert report["sizes"].items() >= sizes.items()
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        with torch.inference_mode():
            said = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
        want = said[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        assert (logprobs(out, ids) - want).abs().max() < 1e-4, sizes


def test_what_adds_nothing_goes_first(tmp_path: Path) -> None:
    """Red when a head, channel or layer that computes something goes before one that does not: the
    model then says something else than before."""
    from safetensors.torch import load_file, save_file

    model = small(tmp_path, **HEADS)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if "layers.2." in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # the layer adds nothing
        if name.endswith("down_proj.weight"):
            tensor[:, 5:37] = 0.0
        if name.endswith("o_proj.weight"):
            tensor[:, 16:32] = 0.0  # two heads of 8 dims: those of the second kv head
        if name.endswith("up_proj.weight"):
            tensor[80:96] = 0.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    text = job(model, tmp_path, "shrink").calibration
    report: Any = run(model, tmp_path / "out", "shrink", layers=3, mlp=48, kv_heads=3, keep=())
    assert report["kept_layers"] == [0, 1, 3] and report["influence"][2] < 1e-6
    assert report["mean_error"] < 1e-9
    want, got = hidden(model, text=text), hidden(tmp_path / "out", text=text)
    assert torch.allclose(got, want, atol=1e-4 * want.abs().max().item())


def test_fitting_brings_outputs_back(tmp_path: Path) -> None:
    """Red when `out` and `down` are not fitted to the inputs that are left."""
    model = small(tmp_path, **HEADS)
    text = job(model, tmp_path, "shrink").calibration
    want, errors = hidden(model, text=text), []
    for reconstruct in (False, True):
        out = tmp_path / f"out-{reconstruct}"
        run(model, out, "shrink", mlp=64, kv_heads=3, reconstruct=reconstruct, keep=())
        errors.append((hidden(out, text=text) - want).square().sum().item())
    assert errors[1] < 0.8 * errors[0]


def test_the_best_of_each_group_stay(tmp_path: Path) -> None:
    """Red when heads are ranked across kv heads, whose number of queries must stay the same."""
    spec = Source.open(str(small(tmp_path, **HEADS))).spec
    scores = torch.tensor([9.0, 1.0, 2.0, 8.0, 1.0, 1.0, 7.0, 6.0])
    found = Importance([4.0, 1.0, 3.0, 2.0], dict.fromkeys(range(4), scores), {})
    found.channels = dict.fromkeys(range(4), torch.arange(96.0))
    one = Choice.of(Sizes(2, 4, 4, 96, 64), spec, found).layers
    assert [layer.old for layer in one] == [0, 2]
    assert one[0].kept["q"].view(4, 8)[:, 0].tolist() == [0, 24, 32, 48]
    two = Choice.of(Sizes(4, 4, 2, 10, 64), spec, found).layers[0]
    assert two.kept["kv"].view(2, 8)[:, 0].tolist() == [0, 24]
    assert two.kept["mlp"].tolist() == list(range(86, 96))


def test_it_goes_on_where_it_died(tmp_path: Path) -> None:
    """Red when a resume chooses otherwise, or what it writes then has other bits."""
    model, sizes = small(tmp_path, **HEADS), {"layers": 3, "mlp": 64, "hidden": 48}

    def die(made: Progress) -> None:
        if made.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(job(model, tmp_path / "out", "shrink", keep=(), **sizes), die)
    seen: list[Progress] = []
    compress(job(model, tmp_path / "out", "shrink", keep=(), **sizes), seen.append)
    assert [made.is_resumed for made in seen] == [True, True, False]
    run(model, tmp_path / "whole", "shrink", keep=(), **sizes)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama", {}, "nothing is to shrink"),
        ("llama", {"layers": 9}, "want 1 to 4"),
        ("llama", {"heads": 6}, "take one of 4, 8"),
        ("llama", {"mlp": 64, "bits": 4}, "has no use for --bits"),
        ("olmo2", {"hidden": 32}, "take --mlp, --heads or --layers"),
        ("olmo2", {"heads": 4}, "so none can go"),
        ("mixtral", {"mlp": 32}, "has experts"),
    ],
)
def test_what_cannot_be(family: str, sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Red when a shape nobody reads is begun."""
    model = small(tmp_path, family, **HEADS)
    with pytest.raises((BadRequest, NotSupported), match=message):
        run(model, tmp_path / "out", "shrink", keep=(), **sizes)
    assert not (tmp_path / "out").exists()


def test_layers_of_every_kind_may_go(tmp_path: Path) -> None:
    """Red when experts keep the number of a layer that went, or a config cannot say what is left
    and says something else."""
    for family in ("qwen3_moe", "DeepseekV2ForCausalLM"):
        model = tiny_model(family, tmp_path / family, num_hidden_layers=3)
        try:
            run(model, tmp_path / f"{family}-out", "shrink", layers=2, keep=())
        except NotSupported as error:
            assert "cannot say what is left" in str(error)
        else:
            hidden(tmp_path / f"{family}-out")


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    """Red when options do not reach the pass."""
    model = small(tmp_path, **HEADS)
    text = str(job(model, tmp_path, "shrink").calibration.file)
    words = ["shrink", str(model), "--mlp", "32", "--layers", "1", "--json", "--samples", "4"]
    words += ["--length", "32", "--calibration", text, "--out", str(tmp_path / "out")]
    words += ["--no-report"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sizes"] == {"layers": 1, "heads": 8, "kv_heads": 4, "mlp": 32, "hidden": 64}


def test_a_shrunk_model_is_a_student(tmp_path: Path) -> None:
    """Red when what is written is not what distillation begins with: it learns nothing then."""
    from quire.distill.recipe import Shape
    from tests.distill.case import run as distil

    model = small(tmp_path, **HEADS)
    run(model, tmp_path / "small", "shrink", layers=2, mlp=48, kv_heads=2, hidden=48, keep=())
    student = Shape("student", start=str(tmp_path / "small"))
    report = distil(model, tmp_path / "out", student, steps=10)
    assert report["after"]["loss"] < report["before"]["loss"]
    made = Source.open(str(tmp_path / "out")).spec
    assert (made.num_layers, made.num_kv_heads, made.ffn_size) == (2, 2, 48)
