"""Kernels compiled ahead of time, for devices that need not be here, and what they take there.

    python -m dflash_graph.ahead_of_time --cache build/kernels

compiles every kernel of the presets that ship for every capability, prints registers, shared memory
and local memory of each, and fails if one spills. Needs triton, no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dflash_graph.errors import DFlashGraphError, TemplateError
from dflash_graph.kernels import KernelCase, shipped_cases

#: Compute capabilities that every kernel compiles for: A100, H100 and H200, RTX 50.
CAPABILITIES: Final = (80, 90, 120)
#: Shared memory that one block may have, bytes, by capability.
SHARED_LIMIT: Final[Mapping[int, int]] = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one capability.

    Args:
        kernel: its name in the rendered file.
        registers: of a thread.
        shared: bytes of shared memory a block asks for.
        local: bytes of local memory a thread has; kernels have no arrays, so all of it is spills.
    """

    case: KernelCase
    kernel: str
    capability: int
    registers: int
    shared: int
    local: int


def compile_case(
    case: KernelCase, capability: int, *, cache_dir: str | Path | None = None
) -> tuple[Compiled, ...]:
    """Compile the kernels of one case for a device of a capability.

    Args:
        case: the kernels; pointers are taken to be 16-byte aligned, as arena views are.
        capability: such as 90 for compute capability 9.0.
        cache_dir: of the rendered file, see `rendering.cache_folder`.

    Raises:
        TemplateError: a kernel does not compile there.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = case.module(cache_dir)
    found = []
    for name, signature in module.KERNELS.items():
        pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
        source = ASTSource(
            fn=getattr(module, name),
            signature=signature,
            constexprs={},
            attrs={(index,): [["tt.divisibility", 16]] for index in pointers},
        )
        options = {
            **module.OPTIONS,
            "num_warps": getattr(module, "WARPS", {}).get(name, case.num_warps),
            "num_stages": case.num_stages,
        }
        target = GPUTarget("cuda", capability, 32)
        try:
            kernel = triton.compile(source, target=target, options=options)
        except Exception as error:  # the compiler's errors have no common class
            raise TemplateError(f"{case} {name} for sm_{capability}: {error}") from error
        registers, local = _usage(kernel.asm["cubin"])
        shared = kernel.metadata.shared
        found.append(Compiled(case, name, capability, registers, shared, local))
    return tuple(found)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread.

    Triton fills these in when a device loads the kernel; cuobjdump, which it brings, needs none.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [tuple(map(int, numbers)) for numbers in _USAGE.findall(said)]
    if not found:
        raise TemplateError(f"cuobjdump: expected lines with REG and STACK, got {said!r}")
    return max(n[0] for n in found), max(n[1] + n[3] for n in found)


def problems(compiled: Sequence[Compiled], max_spill_bytes: int) -> list[str]:
    """What is wrong: spills over the bound, more shared memory than the device has."""
    found = []
    for entry in compiled:
        where = f"{entry.case} {entry.kernel} for sm_{entry.capability}"
        limit = SHARED_LIMIT[entry.capability]
        if entry.local > max_spill_bytes:
            found.append(f"{where}: {entry.local} bytes of spills, bound {max_spill_bytes}")
        if entry.shared > limit:
            found.append(f"{where}: {entry.shared} bytes of shared memory, the device has {limit}")
    return found


def compile_all(
    cases: Sequence[KernelCase], *, cache_dir: str | Path | None, jobs: int
) -> Iterator[tuple[Compiled, ...]]:
    """Compile every case for every capability, `jobs` at a time, in order of completion."""
    work = list(itertools.product(cases, CAPABILITIES))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = [pool.submit(compile_case, *item, cache_dir=cache_dir) for item in work]
        try:
            for done in as_completed(waiting):
                yield done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def table(compiled: Sequence[Compiled]) -> Iterator[str]:
    """Lines for people: a case, then registers, shared KiB and spilled bytes by capability."""
    rows: dict[tuple[KernelCase, str], dict[int, Compiled]] = {}
    for entry in compiled:
        rows.setdefault((entry.case, entry.kernel), {})[entry.capability] = entry
    ordered = sorted(rows, key=lambda row: (_order(row[0]), row[1]))
    names = {row: f"{row[1]}: {row[0]}" for row in ordered}
    width = max(map(len, names.values()))
    yield f"{'registers / shared KiB / spilled bytes':<{width}}" + "".join(
        f"  {f'sm_{capability}':>15}" for capability in CAPABILITIES
    )
    for row in ordered:
        cells = (
            f"{e.registers} / {e.shared / 1024:.1f} / {e.local}"
            for e in (rows[row][capability] for capability in CAPABILITIES)
        )
        yield f"{names[row]:<{width}}" + "".join(f"  {cell:>15}" for cell in cells)


def _order(case: KernelCase) -> tuple[Any, ...]:
    """By template, then by the values of its holes; a template's holes are always the same."""
    return case.template, tuple(value for _, value in case.holes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what ships and print what it takes; the exit status."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(
        prog="python -m dflash_graph.ahead_of_time",
        description="Compile every kernel of the shipped presets ahead of time.",
    )
    parser.add_argument("--cache", help="folder of rendered kernels; default: the user's cache")
    parser.add_argument("--max-spill-bytes", type=int, default=0, help="of a thread; default 0")
    parser.add_argument("--jobs", type=int, default=usable or 1, help="processes at a time")
    given = parser.parse_args(arguments)
    cases = shipped_cases()
    total = len(cases) * len(CAPABILITIES)
    compiled: list[Compiled] = []
    try:
        results = compile_all(cases, cache_dir=given.cache, jobs=given.jobs)
        for done, entries in enumerate(results, 1):
            compiled.extend(entries)
            if done % 20 == 0 or done == total:
                print(f"{done} of {total} compiled", file=sys.stderr, flush=True)
    except DFlashGraphError as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        print("triton is not installed: pip install 'dflash-graph[triton]'", file=sys.stderr)
        return 1
    for line in table(compiled):
        print(line)
    wrong = problems(compiled, given.max_spill_bytes)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
