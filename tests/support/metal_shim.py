"""Metal kernels run as C++: the same source text, lanes of a threadgroup as fibres. For correctness, not speed.

`maker_in` gives a stand-in for `mx.fast.metal_kernel`. Threadgroups run one after the other; a fibre yields at a
barrier or a simdgroup function, and a barrier that not all lanes reach ends the process with a message. Needs a C++
compiler
and `ucontext` (Linux).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
"""The compiler, or None."""

_C_NAMES = {mx.float32: "float", mx.uint32: "uint", mx.int32: "int"}

_NAMES = r"""
#include <cmath>
#include <cstdio>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
typedef uint32_t uint; typedef uint16_t ushort;
struct uint3 { uint x, y, z; };
#define device
#define constant
#define threadgroup static
namespace metal {
enum class mem_flags { mem_threadgroup };
struct Meeting { uint waiting = 0, generation = 0; };
static std::vector<ucontext_t> fibres; static std::vector<char> over; static std::vector<float> slots;
static std::vector<Meeting> meetings; static ucontext_t scheduler; static uint lane_now, lanes, moved;
static void meet(Meeting& m, uint members) {
    moved = 1; uint mine = m.generation;
    if (++m.waiting == members) { m.waiting = 0; ++m.generation; return; }
    while (m.generation == mine) { swapcontext(&fibres[lane_now], &scheduler); }
    moved = 1;
}
static void threadgroup_barrier(mem_flags) { meet(meetings[0], lanes); }
template <typename F> static float fold(float x, F f) {
    uint me = lane_now, first = me / 32 * 32; Meeting& m = meetings[1 + me / 32];
    slots[me] = x; meet(m, 32);
    float all = slots[first]; for (uint i = 1; i < 32; ++i) { all = f(all, slots[first + i]); }
    meet(m, 32); return all;
}
static float simd_sum(float x) { return fold(x, [](float a, float b) { return a + b; }); }
static float simd_max(float x) { return fold(x, [](float a, float b) { return a > b ? a : b; }); }
template <typename T, typename S> static T as_type(S x) {
    static_assert(sizeof(T) == sizeof(S)); T y; memcpy(&y, &x, sizeof y); return y;
}
using std::exp2; using std::log2;
}
"""

_RUN = r"""
static uint3 group_now, groups_now; static void** pointers;
static void body() {
    uint me = metal::lane_now;
    kernel_text(pointers, me % 32, me / 32, group_now, groups_now);
    metal::over[me] = 1; metal::moved = 1;
}
extern "C" void run(void** all, uint gx, uint gy, uint gz, uint n) {
    using namespace metal;
    pointers = all; groups_now = {gx, gy, gz}; lanes = n;
    const size_t stack = 1 << 17; std::vector<char> stacks(stack * n);
    fibres.resize(n); slots.resize(n);
    for (uint z = 0; z < gz; ++z) for (uint y = 0; y < gy; ++y) for (uint x = 0; x < gx; ++x) {
        group_now = {x, y, z}; over.assign(n, 0); meetings.assign(1 + n / 32, Meeting());
        for (uint i = 0; i < n; ++i) {
            getcontext(&fibres[i]); fibres[i].uc_stack.ss_sp = &stacks[stack * i];
            fibres[i].uc_stack.ss_size = stack; fibres[i].uc_link = &scheduler; makecontext(&fibres[i], body, 0);
        }
        for (uint left = 1; left;) {
            left = 0; moved = 0;
            for (uint i = 0; i < n; ++i) if (!over[i]) {
                ++left; lane_now = i; swapcontext(&scheduler, &fibres[i]);
            }
            if (left && !moved) { fprintf(stderr, "a barrier is not reached by all lanes\n"); abort(); }
        }
    }
}
"""


def maker_in(folder: Path) -> Callable[..., Callable[..., list[mx.array]]]:
    """A stand-in for `mx.fast.metal_kernel` that compiles into `folder`."""

    def maker(
        *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Callable[..., list[mx.array]]:
        built: dict[Any, Any] = {}

        def call(
            *,
            inputs: Sequence[mx.array],
            template: Sequence[tuple[str, int]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
        ) -> list[mx.array]:
            mx.eval(list(inputs))
            assert all(array.size >= 8 for array in inputs), "mlx passes arrays below 8 entries in constant memory"
            assert len(inputs) + len(output_shapes) <= 31, "Metal binds at most 31 buffers"
            assert grid[0] % threadgroup[0] == 0
            assert threadgroup[1:] == (1, 1)
            key = tuple(template)
            if key not in built:
                dtypes = [array.dtype for array in inputs]
                text = _text(input_names, dtypes, output_names, output_dtypes, source, header, template)
                built[key] = _build(folder / f"{name}_{len(built)}", text)
            arrays = [np.ascontiguousarray(np.array(array, copy=False)) for array in inputs]
            outs = [np.full(shape, np.nan, np.float32) for shape in output_shapes]  # what is not written shows
            pointers = (ctypes.c_void_p * (len(arrays) + len(outs)))(*(a.ctypes.data for a in [*arrays, *outs]))
            built[key].run(pointers, grid[0] // threadgroup[0], grid[1], grid[2], threadgroup[0])
            return [mx.array(out) for out in outs]

        return call

    return maker


def _text(
    input_names: Sequence[str],
    input_dtypes: Sequence[mx.Dtype],
    output_names: Sequence[str],
    output_dtypes: Sequence[mx.Dtype],
    source: str,
    header: str,
    template: Sequence[tuple[str, int]],
) -> str:
    """The C++ file of one kernel with its constants."""
    lines = [_NAMES, header, *(f"constexpr int {name} = {value};" for name, value in template)]
    lines.append("static void kernel_text(void** all, uint thread_index_in_simdgroup,")
    lines.append("    uint simdgroup_index_in_threadgroup, uint3 threadgroup_position_in_grid,")
    lines.append("    uint3 threadgroups_per_grid) {")
    for at, (name, dtype) in enumerate(zip(input_names, input_dtypes, strict=True)):
        lines.append(f"    const {_C_NAMES[dtype]}* {name} = (const {_C_NAMES[dtype]}*)all[{at}];")
    for at, (name, dtype) in enumerate(zip(output_names, output_dtypes, strict=True)):
        lines.append(f"    {_C_NAMES[dtype]}* {name} = ({_C_NAMES[dtype]}*)all[{len(input_names) + at}];")
    return "\n".join([*lines, source, "}", _RUN])


def _build(stem: Path, text: str) -> ctypes.CDLL:
    """Compile and load."""
    assert COMPILER is not None
    stem.with_suffix(".cpp").write_text(text)
    library = stem.with_suffix(".so")
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    done = subprocess.run(
        [*command, str(stem.with_suffix(".cpp")), "-o", str(library)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(library))
