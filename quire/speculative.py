"""SpecConfig: what `speculative_config` may say, checked; its keys and methods are vLLM's.

A method names who guesses (`METHODS`); two joined by "+" are asked in turn: the second where the
first has nothing to say. `spec/` has the proposers. Torch-free: the command line checks it before
anything is downloaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.draft_tree import MAX_DRAFTS, MAX_WIDTH, TokenTree, full_tree, parse_token_tree
from quire.errors import NotSupported

MAX_DEPTH = MAX_DRAFTS
NEURAL = "quire.spec.neural:Neural"


@dataclass(frozen=True, slots=True)
class Method:
    proposer: str  # "module:Class"
    depth: int  # drafts of a request in a step, at most, unless asked otherwise
    keys: tuple[str, ...] = ()  # of SpecConfig that it reads
    is_model: bool = False  # the runner makes the drafts
    has_trees: bool = False  # and can make several for a position


METHODS = {
    "ngram": Method("quire.spec.ngram:Ngram", 16, ("prompt_lookup_min", "prompt_lookup_max")),
    "suffix": Method(
        "quire.spec.suffix:Suffix",
        24,
        (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
    ),
    "hint": Method("quire.spec.hint:Hint", 48),
    "draft_model": Method(NEURAL, 8, ("model", "quantization"), is_model=True),
    "early_exit": Method(NEURAL, 6, ("exit_layer", "model", "quantization"), is_model=True),
    "eagle3": Method(NEURAL, 5, ("model", "quantization"), is_model=True, has_trees=True),
    "medusa": Method(NEURAL, 5, ("model", "quantization"), is_model=True, has_trees=True),
    "mtp": Method(NEURAL, 3, is_model=True, has_trees=True),
}
NEED_A_MODEL = ("draft_model", "medusa")  # for eagle3 one may come along (`load/shipped.py`)
# vLLM has them; what they need is not here.
NOT_HERE = {
    "eagle": "only EAGLE-3 heads can be loaded",
    "mlp_speculator": "no MLP speculator can be loaded",
}
SHARED_KEYS = ("method", "num_speculative_tokens", "adaptive")
TREE_KEYS = ("tree", "speculative_token_tree")


@dataclass(frozen=True, slots=True)
class SpecConfig:
    method: str
    num_speculative_tokens: int | None = None  # None: as many as the method is good for
    adaptive: bool = True  # False: always that many, whether it pays or not
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    model: str | None = None  # that drafts, or the heads that do
    quantization: str | None = None  # of its weights, as EngineArgs has it
    exit_layer: int | None = None  # the target's layers that draft; None: a third of them
    tree: int | None = None  # guesses at each position; None: one
    # Or the tree itself (`draft_tree.py`), as vLLM writes it.
    speculative_token_tree: str | TokenTree | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.method.split("+"))

    @property
    def depth(self) -> int:
        """Drafts of a request in a step, at most; in a tree they are not all deep."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if self.speculative_token_tree is not None:
            return len(parse_token_tree(self.speculative_token_tree))
        return min(MAX_DEPTH, self._method_depth * (self.tree or 1))

    @property
    def _method_depth(self) -> int:
        return max(METHODS[part].depth for part in self.parts)

    @property
    def levels(self) -> int:
        """How many tokens ahead the last draft may be."""
        if self.speculative_token_tree is not None:
            return max(map(len, parse_token_tree(self.speculative_token_tree)))
        return self.depth if self.tree is None else min(self.depth, self._method_depth)

    def token_tree(self, levels: int) -> TokenTree | None:
        """Guesses to choose from, up to that many tokens ahead; None: one for each position."""
        if self.speculative_token_tree is not None:
            return parse_token_tree(self.speculative_token_tree)
        if self.tree is None:
            return None
        return full_tree(self.tree, levels, self.depth)

    @property
    def model_part(self) -> str | None:
        """The method whose drafts a model makes, if there is one."""
        return next((part for part in self.parts if METHODS[part].is_model), None)

    @property
    def ngram_sizes(self) -> range:
        """Lengths of the runs that are looked up: 2 to 5, or what was said of one for the other."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        most = most or least or 5
        return range(least or (most if self.prompt_lookup_max else 2), most + 1)


def parse_speculative(given: object) -> SpecConfig:
    """Raises NotSupported for what is unknown, contradictory or out of range."""
    if not isinstance(given, Mapping):
        raise NotSupported(f"got speculative_config={given!r}, want a dict such as {_EXAMPLE}")
    values = {str(key): value for key, value in given.items() if value is not None}
    if "method" not in values and "model" in values:
        values["method"] = "draft_model"
    if values.get("method") == "draft_model" and values.get("model") in ("ngram", "[ngram]"):
        values["method"] = "ngram"
        del values["model"]
    _check_method(values.get("method"))
    known = {field.name for field in fields(SpecConfig)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise NotSupported(
                f"got speculative_config key {key!r}, which nobody reads{hint}"
                f" Known: {', '.join(sorted(known))}"
            )
    config = SpecConfig(**values)
    _check_tree(config)
    read = {*SHARED_KEYS, *(key for part in config.parts for key in METHODS[part].keys)}
    read |= set(TREE_KEYS)
    for key in values.keys() - read:
        raise NotSupported(
            f"got speculative_config.{key}={values[key]!r}, which method {config.method!r} does not"
            " read; leave it out"
        )
    _check_values(config)
    return config


_EXAMPLE = '{"method": "suffix"}'


def _check_method(method: object) -> None:
    names = method.split("+") if isinstance(method, str) else [method]
    for name in names:
        if name in NOT_HERE:
            raise NotSupported(
                f"got speculative_config.method={name!r}: {NOT_HERE[name]};"
                f" use one of {', '.join(METHODS)}"
            )
        if not isinstance(name, str) or name not in METHODS:
            near = difflib.get_close_matches(str(name), METHODS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise NotSupported(
                f"got speculative_config.method={method!r}, want one of {', '.join(METHODS)}, or"
                f" two joined by '+'{hint}"
            )
    if len(set(names)) < len(names) or sum(METHODS[n].is_model for n in map(str, names)) > 1:
        raise NotSupported(
            f"got speculative_config.method={method!r}: each method once, and one that drafts with"
            " a model at most"
        )


def _check_tree(config: SpecConfig) -> None:
    """Before all else: the depth depends on it."""
    if config.tree is None and config.speculative_token_tree is None:
        return
    part = config.model_part
    if part is None or not METHODS[part].has_trees:
        able = ", ".join(name for name, method in METHODS.items() if method.has_trees)
        raise NotSupported(
            f"got a tree of drafts with speculative_config.method={config.method!r}, which guesses"
            f" one token for each position; leave it out, or use one of {able}"
        )
    if config.tree is not None and config.speculative_token_tree is not None:
        raise NotSupported(
            f"got speculative_config.tree={config.tree!r} beside a speculative_token_tree, which"
            " says how wide it is; give one of them"
        )
    if config.tree is not None and (
        type(config.tree) is not int or not 2 <= config.tree <= MAX_WIDTH
    ):
        raise NotSupported(
            f"got speculative_config.tree={config.tree!r}, want a whole number from 2 to"
            f" {MAX_WIDTH}: guesses at each position"
        )
    if config.speculative_token_tree is not None:
        parse_token_tree(config.speculative_token_tree)


def _check_values(config: SpecConfig) -> None:
    def whole(name: str, least: int, most: int) -> None:
        value = getattr(config, name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise NotSupported(
                f"got speculative_config.{name}={value!r}, want a whole number from {least} to"
                f" {most}"
            )

    def share(name: str, most: float) -> None:
        value = getattr(config, name)
        if type(value) not in (int, float) or not 0 <= value <= most:
            raise NotSupported(
                f"got speculative_config.{name}={value!r}, want a number from 0 to {most:g}"
            )

    whole("num_speculative_tokens", 1, MAX_DEPTH)
    whole("prompt_lookup_min", 1, MAX_DEPTH)
    whole("prompt_lookup_max", 1, MAX_DEPTH)
    whole("suffix_decoding_max_tree_depth", 1, 256)
    whole("suffix_decoding_max_cached_requests", 0, 1 << 20)
    whole("exit_layer", 1, 1 << 10)
    share("suffix_decoding_max_spec_factor", 64.0)
    share("suffix_decoding_min_token_prob", 1.0)
    if type(config.adaptive) is not bool:
        raise NotSupported(
            f"got speculative_config.adaptive={config.adaptive!r}, want True or False"
        )
    if len(config.ngram_sizes) == 0:
        raise NotSupported(
            f"got prompt_lookup_min={config.prompt_lookup_min} above"
            f" prompt_lookup_max={config.prompt_lookup_max}"
        )
    for part in NEED_A_MODEL:
        if part in config.parts and not config.model:
            raise NotSupported(f"speculative_config with method {part!r} needs a model: add one")


def with_hints(given: Mapping[str, object] | None) -> dict[str, object]:
    """The same, asking hints first: texts that come with a request and may be like its answer."""
    if given is None:
        return {"method": "hint"}
    method = str(given.get("method") or "draft_model")
    return {**given, "method": method if "hint" in method.split("+") else f"hint+{method}"}


def describe(config: SpecConfig) -> Mapping[str, Any]:
    """What was said, for messages and logs."""
    return {
        field.name: value
        for field in fields(SpecConfig)
        if (value := getattr(config, field.name)) != field.default
    }
