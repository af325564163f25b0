"""Groups of a compressed-tensors config: which projections are quantised, and how.

A group has targets (names, regular expressions after `re:`, or classes such as `Linear`) and says
of their weights: bits, whole numbers or floats, and how many share a scale. Names and expressions
come before classes. That a projection is quantised is told by its tensors, so `ignore` is not read.
Rotations that would have to be done while the model runs are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import CheckpointError, NotSupported, shown
from quire.load.quant_fields import pattern
from quire.models.spec import Config
from quire.quant.weight import Inputs

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
OUTER = (*FORMATS, "mixed-precision", "dense")
REGEX = "re:"
IN_WEIGHTS = ("weight_input", "weight_output")  # where a rotation is done before quantising


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a group are stored."""

    bits: int
    kind: str  # int or float
    strategy: str  # what a scale is for
    group_size: int | None  # inputs that share a scale; None: all of them
    block: tuple[int, int] | None  # outputs and inputs that share one
    has_zeros: bool
    inputs: Inputs

    @staticmethod
    def of(said: Config) -> Scheme:
        weights = said.nested("weights")
        if (bits := weights.count("num_bits", 8)) > 8:
            raise weights.error("num_bits", "at most 8")
        kind = weights.expect("type", ("int", "float"), "int")
        size = weights.values.get("group_size")
        group_size = None if size in (None, -1) else weights.count("group_size")
        by_shape = "tensor" if group_size is None else "group"
        known = ("tensor", "channel", "group", "block", "tensor_group")
        strategy = weights.expect("strategy", known, by_shape)
        if strategy == "group" and group_size is None:
            strategy = "channel"
        has_zeros = not weights.flag("symmetric", True)
        block = _block(weights)
        return Scheme(bits, kind, strategy, group_size, block, has_zeros, _inputs(said))


def _block(weights: Config) -> tuple[int, int] | None:
    if (said := weights.values.get("block_structure")) is None:
        return None
    sizes = weights.ids("block_structure")
    if not isinstance(said, list) or len(sizes) != 2 or 0 in sizes:
        raise weights.error("block_structure", "two whole numbers, 1 or more")
    return sizes[0], sizes[1]


def _inputs(said: Config) -> Inputs:
    """Rounded to whole numbers where that is done for each token anew; with scales that were found
    beforehand these stay as they are. Rounded to floats of eight bits in all schemes whose bits do
    not depend on the batch; one scale for a batch becomes one for each token."""
    given = said.nested("input_activations")
    if given.values.get("num_bits") != 8 or not given.flag("symmetric", True):
        return "float"
    strategy, is_found = given.values.get("strategy"), given.values.get("dynamic") is True
    if given.values.get("type", "int") == "int":
        return "int8-row" if is_found and strategy == "token" else "float"
    if strategy in ("group", "tensor_group"):
        return "fp8-128" if is_found and given.values.get("group_size") == 128 else "float"
    return "fp8-row" if is_found else "fp8-one"


@dataclass(frozen=True, slots=True)
class Groups:
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]  # targets

    @staticmethod
    def of(said: Mapping[str, Any]) -> Groups:
        """Raises NotSupported or CheckpointError."""
        _check_format(said.get("format"), OUTER)
        sparsity = Config(said).nested("sparsity_config").values
        if sparsity.get("format") not in (None, "dense", "sparse-24-bitmask"):
            raise NotSupported(
                f"config.json: got a sparsity_config of format {shown(sparsity['format'])}, want"
                " none, dense or sparse-24-bitmask: other sparse weights are not read"
            )
        _check_transforms(Config(said).nested("transform_config"))
        found = []
        for group in Config(said).nested("config_groups").values.values():
            if not isinstance(group, Mapping):
                raise CheckpointError(
                    f"config.json: got {shown(group)} among config_groups, want objects"
                )
            _check_format(group.get("format"), FORMATS)
            targets = group.get("targets")
            if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
                raise Config(group).error("targets", "a list of names")
            for target in targets:
                pattern(target.removeprefix(REGEX) if target.startswith(REGEX) else "")
            found.append((tuple(targets), Scheme.of(Config(group))))
        return Groups(tuple(found))

    def scheme_of(self, module: str) -> Scheme:
        """Raises CheckpointError."""
        if len(self.groups) == 1:
            return self.groups[0][1]
        for is_named in (True, False):
            for targets, scheme in self.groups:
                if any(_matches(target, module, is_named) for target in targets):
                    return scheme
        raise CheckpointError(
            f"config.json has no group for {module} among its {len(self.groups)} config_groups, and"
            " yet its weights are quantised"
        )


def _check_format(said: object, known: tuple[str, ...]) -> None:
    if said is not None and said not in known:
        raise NotSupported(
            f"config.json: got format={shown(said)} of compressed-tensors, of which only"
            f" {', '.join(known)} are read"
        )


def _check_transforms(said: Config) -> None:
    """Rotations that are in the weights already ask for nothing; others would have to be done to
    inputs, outputs or keys as the model runs. Raises NotSupported."""
    for scheme in said.nested("config_groups").values.values():
        applied = scheme.get("apply") if isinstance(scheme, Mapping) else None
        for each in applied if isinstance(applied, list) else [None]:
            place = each.get("location") if isinstance(each, Mapping) else None
            if place not in IN_WEIGHTS:
                raise NotSupported(
                    f"config.json: got a transform_config with location={shown(place)}, of which"
                    f" only {' and '.join(IN_WEIGHTS)} are read: no rotation is done while a model"
                    " runs; use a checkpoint that was quantised without it"
                )


def _matches(target: str, module: str, is_named: bool) -> bool:
    if not is_named:
        return target == "Linear"
    if target.startswith(REGEX):
        return pattern(target.removeprefix(REGEX)).match(module) is not None
    return target == module
