"""Writing kernels: a thin layer over llvmlite's IR builder in which loops, vectors and arithmetic read like Python.

Theory of operation. A kernel is a function that writes another function: Python runs once and leaves instructions
behind. Whatever Python knows while it runs (widths, bits, heads) is a constant of the kernel, and Python loops are
unrolled; `Emitter.loop` makes a loop that runs in the kernel. A `Value` is the result of an instruction; operators on
it emit the next one. `Slot` is a variable (LLVM turns it into a register).

Arithmetic is IEEE, in the order written: no fast-math flags, so a kernel's bits do not depend on what the optimiser
feels like. Where a fused multiply-add is wanted it is written (`fma`). May import llvmlite only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
F32: Final = ir.FloatType()
PTR: Final = ir.PointerType()


def vector(element: ir.Type, lanes: int) -> ir.Type:
    """`lanes` elements side by side."""
    return ir.VectorType(element, lanes)


class Value:
    """The result of an instruction: an integer, a float, an address, or a vector of the first two.

    Operators take another value of the same type or a Python number, which becomes a constant of that type. Integers
    are unsigned for `>>`, signed for comparisons.
    """

    __slots__ = ("emitter", "raw")

    def __init__(self, emitter: Emitter, raw: Any) -> None:  # noqa: ANN401  llvmlite's values
        self.emitter = emitter
        self.raw = raw

    @property
    def type(self) -> Any:  # noqa: ANN401
        """The LLVM type."""
        return self.raw.type

    @property
    def _is_float(self) -> bool:
        kind = self.type.element if isinstance(self.type, ir.VectorType) else self.type
        return isinstance(kind, ir.FloatType)

    def _other(self, other: Value | float) -> Any:  # noqa: ANN401
        return other.raw if isinstance(other, Value) else self.emitter.constant(self.type, other).raw

    def _apply(self, name: str, other: Value | float) -> Value:
        return Value(self.emitter, getattr(self.emitter.builder, name)(self.raw, self._other(other)))

    def __add__(self, other: Value | float) -> Value:
        return self._apply("fadd" if self._is_float else "add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._apply("fsub" if self._is_float else "sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._apply("fmul" if self._is_float else "mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._apply("fdiv", other)

    def __floordiv__(self, other: Value | int) -> Value:
        return self._apply("udiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._apply("urem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._apply("and_", other)

    def __or__(self, other: Value | int) -> Value:
        return self._apply("or_", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._apply("shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        return self._apply("lshr", other)

    def __neg__(self) -> Value:
        return Value(self.emitter, self.emitter.builder.fneg(self.raw))

    def _compare(self, operator: str, other: Value | float) -> Value:
        builder = self.emitter.builder
        compare = builder.fcmp_ordered if self._is_float else builder.icmp_signed
        return Value(self.emitter, compare(operator, self.raw, self._other(other)))

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | float) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | float) -> Value:
        """Elementwise equality (`==` stays Python's)."""
        return self._compare("==", other)


class Slot:
    """A variable of a kernel."""

    __slots__ = ("_at", "_emitter", "_type")

    def __init__(self, emitter: Emitter, kind: Any, at: Any) -> None:  # noqa: ANN401
        self._emitter, self._type, self._at = emitter, kind, at

    def get(self) -> Value:
        """Its present value."""
        return Value(self._emitter, self._emitter.builder.load(self._at, typ=self._type))

    def set(self, value: Value) -> None:
        """Give it another value."""
        self._emitter.builder.store(value.raw, self._at)


class Emitter:
    """Writes one exported function that returns nothing.

    Args:
        module: the LLVM module it becomes part of.
        name: its symbol.
        arguments: names and types, in order.
    """

    def __init__(self, module: ir.Module, name: str, arguments: Mapping[str, ir.Type]) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), list(arguments.values())), name)
        self._module = module
        self._entry = ir.IRBuilder(function.append_basic_block("variables"))
        self.builder = ir.IRBuilder(function.append_basic_block("body"))
        self._body = self.builder.block
        self.arguments = {key: Value(self, raw) for key, raw in zip(arguments, function.args, strict=True)}
        for key, argument in zip(arguments, function.args, strict=True):
            argument.name = key
        self._constant_types: dict[int, Any] = {}

    def finish(self) -> None:
        """End the function."""
        self.builder.ret_void()
        self._entry.branch(self._body)

    # ---- values -----------------------------------------------------------------------------------------------------

    def constant(self, kind: ir.Type, number: float | Sequence[float]) -> Value:
        """A constant; one number fills all lanes of a vector type."""
        if isinstance(kind, ir.VectorType):
            numbers = list(number) if isinstance(number, Sequence) else [number] * kind.count
            cast = float if isinstance(kind.element, ir.FloatType) else int
            return Value(self, ir.Constant(kind, [cast(each) for each in numbers]))
        assert not isinstance(number, Sequence)
        return Value(self, ir.Constant(kind, float(number) if isinstance(kind, ir.FloatType) else int(number)))

    def index(self, number: int) -> Value:
        """A 64-bit integer constant."""
        return self.constant(I64, number)

    def slot(self, initial: Value) -> Slot:
        """A variable that starts as `initial`."""
        made = Slot(self, initial.type, self._entry.alloca(initial.type))
        made.set(initial)
        return made

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        """`yes` where the condition holds, else `no`, lane by lane."""
        return Value(self, self.builder.select(condition.raw, yes.raw, no.raw))

    def maximum(self, a: Value, b: Value) -> Value:
        """The greater one, lane by lane (b where they do not compare)."""
        return self.select(a > b, a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        """The smaller one, lane by lane (b where they do not compare)."""
        return self.select(a < b, a, b)

    def intrinsic(self, name: str, *operands: Value) -> Value:
        """An LLVM intrinsic over operands of one type, which it also returns, such as `llvm.rint`."""
        kind = operands[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        full = f"{name}.{suffix}"
        function = self._module.globals.get(full)
        if function is None:
            function = ir.Function(self._module, ir.FunctionType(kind, [kind] * len(operands)), full)
        return Value(self, self.builder.call(function, [each.raw for each in operands]))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c with one rounding."""
        return self.intrinsic("llvm.fma", a, b, c)

    # ---- vectors ----------------------------------------------------------------------------------------------------

    def splat(self, scalar: Value, lanes: int) -> Value:
        """A vector of equal lanes."""
        kind = vector(scalar.type, lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar.raw, ir.Constant(I32, 0))
        return self.shuffle(Value(self, one), [0] * lanes)

    def shuffle(self, source: Value, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Lanes by number, of `source` or (numbers from its width on) of `other`."""
        second = source if other is None else other
        mask = ir.Constant(vector(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(source.raw, second.raw, mask))

    def fold(self, source: Value, combine: str = "add") -> Value:
        """All lanes summed (or their `max` or `min`), as a scalar; the width is a power of two."""
        width = source.type.count
        while width > 1:
            width //= 2
            low, high = self.shuffle(source, range(width)), self.shuffle(source, range(width, 2 * width))
            if combine == "add":
                source = low + high
            else:
                source = self.maximum(low, high) if combine == "max" else self.minimum(low, high)
        return Value(self, self.builder.extract_element(source.raw, ir.Constant(I32, 0)))

    # ---- conversions ------------------------------------------------------------------------------------------------

    def bitcast(self, value: Value, kind: ir.Type) -> Value:
        """The same bits as another type."""
        return Value(self, self.builder.bitcast(value.raw, kind))

    def widen(self, value: Value, kind: ir.Type) -> Value:
        """An unsigned integer (vector) as a wider one."""
        return Value(self, self.builder.zext(value.raw, kind))

    def narrow(self, value: Value, kind: ir.Type) -> Value:
        """The low bits of an integer (vector)."""
        return Value(self, self.builder.trunc(value.raw, kind))

    def to_float(self, value: Value) -> Value:
        """Signed 32-bit integers as floats."""
        kind = vector(F32, value.type.count) if isinstance(value.type, ir.VectorType) else F32
        return Value(self, self.builder.sitofp(value.raw, kind))

    def to_int(self, value: Value) -> Value:
        """Floats as 32-bit integers, towards zero."""
        kind = vector(I32, value.type.count) if isinstance(value.type, ir.VectorType) else I32
        return Value(self, self.builder.fptosi(value.raw, kind))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def at(self, base: Value, index: Value | int, element: ir.Type) -> Value:
        """Address of element `index` of an array."""
        raw = index.raw if isinstance(index, Value) else ir.Constant(I64, index)
        return Value(self, self.builder.gep(base.raw, [raw], source_etype=element))

    def load(self, base: Value, index: Value | int, element: ir.Type, lanes: int = 0) -> Value:
        """Element `index` of an array, or `lanes` elements from there on."""
        kind = vector(element, lanes) if lanes else element
        at = self.at(base, index, element)
        align = 8 if element is PTR else element.width // 8 if isinstance(element, ir.IntType) else 4
        return Value(self, self.builder.load(at.raw, align=align, typ=kind))

    def store(self, value: Value, base: Value, index: Value | int) -> None:
        """Write a value (or a vector's lanes) at element `index` of an array of its element type."""
        element = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        align = element.width // 8 if isinstance(element, ir.IntType) else 4
        self.builder.store(value.raw, self.at(base, index, element).raw, align=align)

    def call(self, function: Value, *operands: Value) -> None:
        """Call the C function at an address; it returns nothing."""
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in operands])
        self.builder.call(_Callee(function.raw, kind), [each.raw for each in operands])

    # ---- control ----------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """Run the block for start, start + step, … below stop; yields the counter (64-bit)."""
        first = start if isinstance(start, Value) else self.index(start)
        last = stop if isinstance(stop, Value) else self.index(stop)
        counter = self.slot(first)
        function = self.builder.function
        head, body, done = (function.append_basic_block(name) for name in ("head", "loop", "done"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch((counter.get() < last).raw, body, done)
        self.builder.position_at_end(body)
        now = counter.get()
        yield now
        counter.set(now + step)
        self.builder.branch(head)
        self.builder.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Run the block where a scalar condition holds."""
        with self.builder.if_then(condition.raw):
            yield

    @contextmanager
    def either(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """Two blocks, `with yes:` and `with no:`, of which one runs."""
        with self.builder.if_else(condition.raw) as blocks:
            yield blocks

    def barrier(self) -> None:
        """Forget which memory is in registers: keeps the optimiser from holding more vectors than there are."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self.builder.asm(kind, "", "~{memory}", [], True)


class _Callee:
    """An address that llvmlite accepts as something to call."""

    def __init__(self, raw: Any, kind: ir.FunctionType) -> None:  # noqa: ANN401
        self.raw = raw
        self.function_type = kind
        self.type = raw.type
        self.calling_convention = ""
        self.attributes: Any = ()

    def get_reference(self) -> str:
        """As it is written in IR."""
        return str(self.raw.get_reference())
