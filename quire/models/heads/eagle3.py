"""EAGLE-3: one decoder layer that reads three of the target's layers and its own guesses.

Streams before three layers of the target are joined by `fc` into a feature as wide as the head. The
layer attends over [embedding | feature], both normed, so its q, k and v are twice as wide as
usual; the residual is the feature. `lm_head` names few tokens, `d2t` says which. Tensors, as
published: `fc.weight`, `midlayer.*` of a Llama layer (or `layers.0.*`) with `hidden_norm` beside
`input_layernorm`, `norm.weight`, `lm_head.weight`, `d2t`, `t2d`, and `embed_tokens.weight` where it
is not the target's. `Eagle3Spec` reads both configs there are: flat ones, and `speculators`' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec
from quire.errors import CheckpointError, NotSupported
from quire.forward import LayerContext, StateReads
from quire.models.decoder import Decoder, add_linear, add_norm, ropes_of
from quire.models.heads.feature_head import Guessed, Stored
from quire.models.heads.vocabulary import DraftVocabulary
from quire.models.names import LLAMA, Target, target_of
from quire.models.registry import spec_of
from quire.models.spec import Config, ModelSpec
from quire.nn.attention import Attention
from quire.nn.embed import Embedding
from quire.nn.linear import Linear
from quire.nn.mlp import MLP
from quire.nn.norm import RMSNorm
from quire.nn.ops import Ops
from quire.nn.parameter import Parameter

LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # model_type -> its family
_IN_LAYER = {
    **{
        theirs.removeprefix("model.layers.{i}."): ours.replace("{i}", "0")
        for theirs, ours in LLAMA.items()
        if "{i}" in theirs
    },
    "hidden_norm.weight": "layers.0.feature_norm.weight",
}
NAMES = {
    **{
        f"{at}{theirs}": ours
        for at in ("midlayer.", "layers.0.")
        for theirs, ours in _IN_LAYER.items()
    },
    "fc.weight": "fc.weight",
    "input_norm.weight": "states_norm.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "embed_tokens.weight": "embed.weight",
}
OFFSETS = "d2t"


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    layer: ModelSpec  # of the one layer there is
    reads: tuple[int, ...]  # layers of the target whose input is read
    state_size: int  # width of one of them
    num_outputs: int
    has_embedding: bool = False  # else the target's
    has_head: bool = True  # else the target's
    norms_states: str = "none"  # before `fc`: "none", "whole" of them all, or "each"
    norms_residual: bool = False  # the residual is the normed feature
    norms_output: bool = False  # the next feature is the normed output

    @staticmethod
    def of(config: Mapping[str, Any], names: Iterable[str], target: ModelSpec) -> Eagle3Spec:
        """Raises CheckpointError and NotSupported."""
        nested = config.get("transformer_layer_config")
        own = Config({**nested, **config} if isinstance(nested, Mapping) else config)
        inner = own.nested("eagle_config")
        values = dict(nested if isinstance(nested, Mapping) else config)
        kind = str(values.get("model_type", "llama"))
        if kind not in LAYERS or own.count("num_hidden_layers", 1) != 1:
            raise NotSupported(
                f"got an EAGLE-3 head of {own.values.get('num_hidden_layers')} layers like"
                f" {kind!r}, want one layer like {' or '.join(LAYERS)}"
            )
        if not inner.flag("use_aux_hidden_state", True):
            raise NotSupported(
                "got an EAGLE-3 head with use_aux_hidden_state=false, which reads the target's last"
                " layer alone; use one that reads several"
            )
        values |= {"architectures": [LAYERS[kind]], "num_hidden_layers": 1}
        values.setdefault("vocab_size", target.vocab_size)
        layer = replace(spec_of(values), windows=())
        whole = inner.flag("norm_before_fc", own.flag("norm_before_fc"))
        return Eagle3Spec(
            layer,
            _layers_read(own, inner, target),
            own.count("target_hidden_size", target.hidden_size),
            own.count("draft_vocab_size", target.vocab_size),
            "embed_tokens" in (kept := {name.rpartition(".")[0] for name in names}),  # or packed
            "lm_head" in kept,
            "whole" if whole else "each" if own.flag("fc_norm") else "none",
            own.flag("norm_before_residual", isinstance(nested, Mapping)),
            own.flag("norm_output"),
        )._checked(target)

    def _checked(self, target: ModelSpec) -> Eagle3Spec:
        def fail(what: str) -> None:
            raise CheckpointError(f"the EAGLE-3 head is for another model: {what}")

        if self.state_size != target.hidden_size:
            fail(f"it reads states of {self.state_size}, the target's have {target.hidden_size}")
        if max(self.reads) > target.num_layers or min(self.reads) < 0:
            fail(f"it reads layers {self.reads} of {target.num_layers}")
        if not self.has_embedding and self.layer.hidden_size != target.hidden_size:
            fail(f"its width is {self.layer.hidden_size}, and it has no embedding of its own")
        if not self.has_head and self.layer.hidden_size != target.hidden_size:
            fail(f"its width is {self.layer.hidden_size}, and it has no output of its own")
        if self.num_outputs > target.vocab_size:
            fail(f"it names {self.num_outputs} tokens of {target.vocab_size}")
        return self


def _layers_read(own: Config, inner: Config, target: ModelSpec) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    found = (inner if inner.has(key) else own).ids(key)
    return found or (2, target.num_layers // 2, target.num_layers - 3)


def eagle3_names(spec: Eagle3Spec) -> dict[str, Target]:
    """Stored names -> ours."""
    norms = {f"fc_norm.{i}.weight": f"state_norms.{i}.weight" for i in range(len(spec.reads))}
    return {theirs: target_of(ours) for theirs, ours in (NAMES | norms).items()}


class Eagle3Head:
    def __init__(
        self,
        spec: Eagle3Spec,
        heads: AttnSpec,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`heads` is `heads_of(spec.layer, page_size)`."""
        self.spec, self.num_positions, self.device = spec, num_positions, device
        self.reads = StateReads(spec.reads)
        layer, width = spec.layer, spec.layer.hidden_size

        def linear(num_in: int, name: str, num_out: int) -> Linear:
            return Linear(num_in, {name: num_out}, bias=False, dtype=dtype, device=device)

        def norm(size: int = width) -> RMSNorm:
            return RMSNorm(size, layer.norm_eps, dtype, device)

        self.fc = linear(len(spec.reads) * spec.state_size, "fc", width)
        sizes = {"none": 0, "whole": 1, "each": len(spec.reads)}
        num_norms = sizes[spec.norms_states]
        self.state_norms = [norm(self.fc.weight.shape[1] // num_norms) for _ in range(num_norms)]
        self.embed_norm, self.feature_norm = norm(), norm()
        self.attn = Attention(layer, heads, 0, dtype, device)
        parts, bias = self.attn.qkv.parts, layer.qkv_bias
        self.attn.qkv = Linear(2 * width, parts, bias=bias, dtype=dtype, device=device)
        self.mlp_norm, self.mlp = norm(), MLP(layer, dtype, device)
        self.norm = norm()
        self.head = linear(width, "head", spec.num_outputs) if spec.has_head else None
        self.embed = (
            Embedding(layer.vocab_size, width, dtype, device) if spec.has_embedding else None
        )
        self.vocabulary: DraftVocabulary | None = None  # None: the target's
        self._target: Decoder | None = None

    def _norms(self) -> dict[str, RMSNorm]:
        found = {
            "layers.0.attn_norm": self.embed_norm,
            "layers.0.feature_norm": self.feature_norm,
            "layers.0.mlp_norm": self.mlp_norm,
            "norm": self.norm,
        }
        if self.spec.norms_states == "whole":
            found["states_norm"] = self.state_norms[0]
        else:
            found |= {f"state_norms.{i}": norm for i, norm in enumerate(self.state_norms)}
        return found

    def parameters(self) -> dict[str, Parameter]:
        found: dict[str, Parameter] = {}
        for name, norm in self._norms().items():
            add_norm(found, name, norm)
        for name, norm in self.attn.norms().items():
            add_norm(found, f"layers.0.{name}", norm)
        for name, linear in (self.attn.linears() | self.mlp.linears()).items():
            add_linear(found, f"layers.0.{name}", linear)
        add_linear(found, "fc", self.fc)
        if self.head is not None:
            add_linear(found, "head", self.head)
        if self.embed is not None:
            found["embed.weight"] = self.embed.weight
        return found

    def finish(self, ops: Ops, target: Decoder) -> None:
        self._target = target
        self.attn.finish(ops, ropes_of(self.spec.layer, self.num_positions, self.device))
        self.mlp.finish(ops)
        for norm in self._norms().values():
            norm.finish(ops)
        for linear in (self.fc, self.head):
            if linear is not None:
                linear.finish(ops)
        if self.embed is not None:
            self.embed.finish(ops)

    def features(self, states: Tensor) -> Tensor:
        if self.state_norms:
            pieces = states.chunk(len(self.state_norms), 1)
            normed = [
                n(x.contiguous(), None)[0] for n, x in zip(self.state_norms, pieces, strict=True)
            ]
            states = torch.cat(normed, 1)
        return self.fc(states)

    def store(self, ids: Tensor, features: Tensor, at: LayerContext) -> Stored:
        assert self._target is not None, "Eagle3Head used before finish()"
        embedded, _ = self.embed_norm((self.embed or self._target.embed)(ids), None)
        normed, _ = self.feature_norm(features, None)
        queries = self.attn.store(torch.cat((embedded, normed), 1), at)  # of [tokens, 2 * hidden]
        return Stored(queries, normed if self.spec.norms_residual else features)

    def attend(self, stored: Stored, at: LayerContext) -> Guessed:
        x, stream = self.mlp_norm(self.attn.attend(stored.queries, at), stored.stream)
        normed, stream = self.norm(self.mlp(x), stream)
        return Guessed(self._logits(normed), normed if self.spec.norms_output else stream)

    def _logits(self, normed: Tensor) -> Tensor:
        if self.head is None:
            assert self._target is not None
            return self._target.logits(normed)
        return self.head(normed)
