"""ChatEnvironment: Jinja's immutable sandbox with every loop, call and value on a meter.

Jinja's sandbox stops attribute walks but not nested loops, string doubling or `'a' * 10**9`. Here
the parsed template is rewritten before it is compiled: loop bodies, printed text and every value
that can grow are charged to the current `Meter`, and only allow-listed filters and methods exist.
This is the one place that constructs a Jinja environment; `template.py` is what others call.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from quire.text import bounded
from quire.text.meter import LimitReached, current_meter

CALL_COST = 64
LOOP_COST = 16
MAX_RANGE = 100_000
MAX_PATTERN = 256  # of strftime_now


class TemplateRefusal(TemplateError):
    """The template itself said no, through raise_exception()."""


class GenerationTag(Extension):
    """`{% generation %}`: marks assistant text for training; here its body is just printed."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(bounded.BINARY_OPERATORS)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            finalize=bounded.text_at_run,
            cache_size=0,
        )
        self.filters = dict(bounded.filters()) | {
            "quire.hold": bounded.held_at_run,
            "quire.weigh": bounded.weighed_at_run,
            "quire.charge": bounded.charged_at_run,
            "quire.concat": bounded.concat_at_run,
        }
        self.tests = dict(bounded.tests())
        self.binop_table.update(bounded.BINARY_OPERATORS)
        del self.globals["lipsum"]
        self.globals["range"] = _bounded_range
        self.globals["dict"] = bounded.make_dict
        self.globals["namespace"] = bounded.PlainNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_metered(self, source: str) -> Template:
        tree = _MeterNodes().visit(self.parse(source))
        tree.set_environment(self)
        code = self.compile(tree)
        return Template.from_code(self, code, self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in bounded.STR_METHODS
        if isinstance(obj, dict):
            return attr in bounded.DICT_METHODS
        if isinstance(obj, (list, tuple)):
            return attr in bounded.LIST_METHODS
        if isinstance(obj, (int, float, bytes)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # A key that happens to be named like a forbidden dict method is still a key.
        if isinstance(obj, dict) and attribute not in bounded.DICT_METHODS:
            if attribute in obj:
                return obj[attribute]
            if hasattr(obj, attribute):
                return self.unsafe_undefined(obj, attribute)
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        if attribute.startswith("_"):
            # Jinja would print nothing here; a template that tries this is not one to run on.
            raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if value.__name__ == "format_map":
            raise SecurityError("a template may not call format_map")

        def checked(*args: Any, **kwargs: Any) -> str:
            bounded.check_brace_format(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The compiler passes loop variables along as keywords that begin with an underscore.
        named = {key: value for key, value in kwargs.items() if not key.startswith("_")}
        meter = current_meter()
        meter.spend(CALL_COST)
        for arg in (*args, *named.values()):
            meter.hold(arg)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, list, tuple)):
            meter.weigh(owner)
        if isinstance(owner, str) and __obj.__name__ in bounded.STR_BOUNDED:
            if named:
                raise TypeError(f"str.{__obj.__name__}() takes no keyword arguments")
            return bounded.held(bounded.STR_BOUNDED[__obj.__name__](owner, *args))
        return bounded.held(super().call(__context, __obj, *args, **kwargs))


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise LimitReached(f"it loops over a range of {len(numbers)}, the most is {MAX_RANGE}")
    return numbers


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_PATTERN:
        raise SecurityError(f"strftime_now takes at most {MAX_PATTERN} characters")
    return datetime.now().strftime(pattern)


class _MeterNodes(NodeTransformer):
    """Puts a charge on everything in a parsed template that can repeat or grow."""

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _hold(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _hold(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _hold(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("quire.concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _weigh(node.expr)
        for operand in node.ops:
            operand.expr = _weigh(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _hold(node)
        node.arg = _weigh(node.arg)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _hold(node.iter)
        node.body.insert(0, _charge(LOOP_COST, node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _charge(LOOP_COST, node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        self.generic_visit(node)
        chars = sum(len(n.data) for n in node.nodes if isinstance(n, nodes.TemplateData))
        return [_charge(chars, node.lineno), node] if chars else [node]


def _filter(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _weigh(node: nodes.Expr) -> nodes.Expr:
    return node if _is_constant(node) else _filter("quire.weigh", node)


def _hold(node: nodes.Expr) -> nodes.Expr:
    return node if _is_constant(node) else _filter("quire.hold", node)


def _charge(units: int, lineno: int) -> nodes.Node:
    return nodes.ExprStmt(_filter("quire.charge", nodes.Const(units, lineno=lineno)), lineno=lineno)


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(map(_is_constant, node.items))
    if isinstance(node, nodes.Dict):
        return all(_is_constant(pair.key) and _is_constant(pair.value) for pair in node.items)
    return isinstance(node, (nodes.Const, nodes.Neg))
