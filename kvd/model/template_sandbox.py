"""Where a model's chat template runs: no door to Python, and a bound on what it may do.

Theory of operation. A template is a program from a model's folder and may be made to run for ever, or to fill the
memory; the thread it runs in cannot be killed. So every turn of a loop, every call and every character printed is
counted, on the template's own syntax tree (loops' iterables and what is printed go through two filters) and in the
sandbox's door for calls and operators. Whoever exceeds a bound, or its time, is refused. The bounds are far above what
a conversation of the largest message takes. May import kvd.model.errors.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from kvd.model.errors import ModelCorrupt, TemplateRefused

MAX_STEPS: Final = 2_000_000
"""Turns of loops and calls: twenty for each message of the longest conversation that fits a request."""
MAX_TEXT: Final = 1 << 26
"""Characters printed, and characters or items of any value: four times the largest request."""
MAX_SECONDS: Final = 10.0

_WORK: Final = "_kvd_work"
"""How filters find the rendering that they belong to; templates cannot make such an object."""
_MAX_BITS: Final = 4096


class Work:
    """What one rendering has done so far. Owner: that rendering.

    Raises:
        TemplateRefused: (each method) a bound is exceeded.
    """

    def __init__(self, *, max_steps: int = MAX_STEPS, max_seconds: float = MAX_SECONDS) -> None:
        self._steps_left = max_steps
        self._text_left = MAX_TEXT
        self._deadline_s = time.monotonic() + max_seconds

    def step(self) -> None:
        """Count a turn of a loop or a call."""
        self._steps_left -= 1
        if self._steps_left < 0 or time.monotonic() > self._deadline_s:
            raise TemplateRefused("the chat template loops too long over these messages; it may be broken")

    def each(self, items: Iterable[object]) -> Iterator[object]:
        """The items, counted as they are taken."""
        for item in items:
            self.step()
            yield item

    def printed(self, characters: int) -> None:
        """Count text that is printed."""
        self._text_left -= characters
        check_size(-self._text_left, 0)


def check_size(size: int, limit: int = MAX_TEXT) -> None:
    """Refuse a text or list that is longer than any conversation needs.

    Raises:
        TemplateRefused: `size` is above `limit`.
    """
    if size > limit:
        raise TemplateRefused(f"the chat template makes more than {MAX_TEXT} characters of these messages")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles and runs templates whose work is counted; they are rendered by `render`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - jinja2's own
        super().__init__(**options)
        self.filters[_COUNTED] = _counted
        self.filters[_PRINTED] = _printed

    def template(self, source: str) -> jinja2.Template:
        """Compile a template.

        Raises:
            ModelCorrupt: it is no valid Jinja.
        """
        try:
            tree = self.parse(source)
            for loop in list(tree.find_all(jinja2.nodes.For)):
                loop.iter = _through(_COUNTED, loop.iter)
            for output in list(tree.find_all(jinja2.nodes.Output)):
                output.nodes = [_through(_PRINTED, _plain(node)) for node in output.nodes]
            for joined in list(tree.find_all(jinja2.nodes.Concat)):
                joined.nodes = [_through(_PRINTED, node) for node in joined.nodes]
            return self.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ModelCorrupt(f"the chat template does not parse: {error}") from None
        except (RecursionError, SyntaxError, ValueError, MemoryError):
            raise ModelCorrupt("the chat template does not parse: it is nested too deep") from None

    def render(self, template: jinja2.Template, variables: dict[str, object]) -> str:
        """What the template prints, within the bounds.

        Raises:
            TemplateRefused: a bound is exceeded.
            jinja2.TemplateError: the template fails.
        """
        return template.render({**variables, _WORK: Work()})

    def call(self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call for a template: counted, and its result bounded."""
        work = _work(context)
        work.step()
        if isinstance(called, jinja2.runtime.LoopContext):  # a recursive loop goes on with other items
            args = tuple(work.each(items) for items in args)
            kwargs = {name: work.each(items) for name, items in kwargs.items()}
        for value in args:
            if isinstance(value, int):
                check_size(value)  # `"x".ljust(10**12)`
        return _bounded(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """An operator whose result may be far larger than its operands."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_size(left.bit_length() * abs(right), _MAX_BITS)
        return _bounded(super().call_binop(context, operator, left, right))


_COUNTED: Final = "_kvd_counted"
_PRINTED: Final = "_kvd_printed"


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, items: Iterable[object]) -> Iterator[object]:
    """What a loop goes over."""
    return _work(context).each(items)


@jinja2.pass_context
def _printed(context: jinja2.runtime.Context, value: object) -> object:
    """What is printed, or joined to a text."""
    shown = value if isinstance(value, str) else str(value)
    _work(context).printed(len(shown))
    return shown


def _work(context: jinja2.runtime.Context) -> Work:
    work = context.resolve(_WORK)
    if not isinstance(work, Work):
        raise jinja2.TemplateError(f"{_WORK} is not for templates")
    return work


def _through(name: str, node: jinja2.nodes.Node) -> jinja2.nodes.Filter:
    """The value of `node` through a filter."""
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _plain(node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
    """Text between tags as a value."""
    return jinja2.nodes.Const(node.data, lineno=node.lineno) if isinstance(node, jinja2.nodes.TemplateData) else node


def _check_product(left: object, right: object) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
            check_size(len(one) * other)
    if isinstance(left, int) and isinstance(right, int):
        check_size(left.bit_length() + right.bit_length(), _MAX_BITS)


def _bounded(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str | bytes | list | tuple | dict):
        check_size(len(value))
    return value
