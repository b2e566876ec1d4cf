"""The one place where chat templates are compiled: a sandbox that no template leaves, and in which none runs away.

Templates come with models, and models come from strangers. Jinja's immutable sandbox keeps a template away from Python;
the rest here bounds its cost. Before compilation the syntax tree is rewritten so that every repetition takes a `step`
and every value that can grow is charged to the rendering's `Meter`. Filters and methods are let through by name, those
that can multiply their input check the result's size before they make it. What remains between two steps is work on
values of bounded size.

Conventions are those of transformers' `apply_chat_template`: trimmed blocks, `break` and `continue`, the `generation`
tag (kept for its body), `raise_exception`, and a `tojson` that does not escape HTML.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from twostroke.errors import ModelError
from twostroke.text.filters import SAFE_FILTERS, guarded_filters, require_plain_format
from twostroke.text.meter import LimitExceeded, Meter

MAX_TEMPLATE_CHARACTERS = 256 << 10
METER = "the meter"  # a key of the context; with its space no template can name it

# fmt: off
_STRING_METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isdecimal", "isdigit",
    "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "swapcase", "title", "upper",
})
# fmt: on
_METHODS: dict[type, frozenset[str]] = {
    str: _STRING_METHODS,
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}
_Loop = TypeVar("_Loop", nodes.For, nodes.Macro, nodes.CallBlock)


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. Render it with a `Meter` under the key METER.

    Raises: ModelError, if the source is too long, is no template, or uses a filter that is not let through.
    """
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ModelError(f"a chat template of {len(source)} characters; the limit is {MAX_TEMPLATE_CHARACTERS}")
    environment = _MeteredSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_charged
    )
    environment.filters = {name: environment.filters[name] for name in SAFE_FILTERS} | guarded_filters(_meter)
    environment.globals = {
        "range": environment.globals["range"],  # the sandbox's own, at most MAX_RANGE long
        "dict": dict,
        "namespace": Namespace,
        "raise_exception": _raise_exception,
    }
    try:
        return environment.from_string(_Metering().visit(environment.parse(source)))
    except (TemplateSyntaxError, RecursionError) as error:
        raise ModelError(f"the chat template cannot be compiled: {error}") from error


def _meter(context: Context) -> Meter:
    meter: Meter = context.parent[METER]
    return meter


@pass_context
def _charged(context: Context, value: object) -> object:
    """Charge what is about to become text."""
    _meter(context).charge(value)
    return value


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


class _MeteredSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count a step, check a method's name and size, call, and charge the result."""
        meter = _meter(context)
        meter.step()
        if isinstance(obj, BuiltinMethodType):
            _check_method(meter, obj.__self__, obj.__name__, args)
        result = super().call(context, obj, *args, **kwargs)
        meter.charge(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the size of what `+`, `*`, `**` and `%` make."""
        meter = _meter(context)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    meter.reserve(len(value) * max(times, 0))
        elif operator == "**" and max(abs(left), abs(right)) > 1_000:
            raise LimitExceeded("the chat template makes too large a number")
        elif operator == "%" and isinstance(left, str):
            require_plain_format(left)
        result = super().call_binop(context, operator, left, right)
        meter.charge(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse formats whose width can make text out of nothing."""
        if (wrapped := super().wrap_str_format(value)) is not None:
            require_plain_format(value.__self__)
        return wrapped

    @staticmethod
    def step() -> bool:
        """Called at each turn of a loop; `call` has counted it already."""
        return True

    @staticmethod
    def made(value: object) -> object:
        """Called with each list, tuple and dict a template writes; `call` charges it."""
        return value

    @staticmethod
    def joined(context: Context, *parts: object) -> str:
        """The `~` operator."""
        meter = _meter(context)
        for part in parts:
            meter.charge(part)
        return "".join(map(str, parts))


def _check_method(meter: Meter, owner: object, name: str, args: tuple[Any, ...]) -> None:
    if name not in _METHODS.get(type(owner), ()):
        raise SecurityError(f"the chat template calls {type(owner).__name__}.{name}, which is not let through")
    if isinstance(owner, str) and name == "replace" and len(args) > 1:
        meter.reserve((owner.count(args[0]) + 1) * len(args[1]))
    elif isinstance(owner, str) and name == "join" and args:
        if not isinstance(args[0], list | tuple | dict):
            raise SecurityError("the chat template joins something else than a list")
        meter.reserve(len(owner) * len(args[0]))


class _Metering(NodeTransformer):
    """Rewrites a template's tree: steps into bodies, charges around what grows."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        node = self._stepping(node)
        if node.test is not None:
            node.test = nodes.And(_environment_call("step", [], node.lineno), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._stepping(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._stepping(node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._made(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._made(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._made(node) if node.ctx == "load" else node  # else the left side of an assignment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)  # changes the node in place, as do those below
        return _environment_call("joined", [nodes.ContextReference(), *node.nodes], node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # literal text skips `finalize`, a constant does not

    def _stepping(self, node: _Loop) -> _Loop:
        self.generic_visit(node)
        call = _environment_call("step", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    def _made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("made", [node], node.lineno)


def _environment_call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=lineno)


class _GenerationTag(Extension):
    """`{% generation %}`: marks answers for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
