"""Kernels compiled ahead of time, for devices that need not be here, and what they take there.

    python -m dflash_graph.ahead_of_time --cache build/kernels

compiles every kernel of the presets that ship for every capability, and what a profile that ships
chooses instead for the capability it was measured on; prints registers, shared memory and local
memory of each, and fails if one spills. Needs triton, no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dflash_graph.choices import shipped_choices
from dflash_graph.errors import DFlashGraphError, TemplateError
from dflash_graph.kernels import KernelCase, shipped_cases
from dflash_graph.rendering import cache_folder, render

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
    module = case.module(cache_dir)
    found = []
    for name in module.KERNELS:
        kernel = _compile(case, module, name, capability)
        registers, local = _usage(kernel.asm["cubin"])
        shared = kernel.metadata.shared
        found.append(Compiled(case, name, capability, registers, shared, local))
    return tuple(found)


def _compile(case: KernelCase, module: ModuleType, name: str, capability: int) -> Any:
    """Compile one kernel as a launch would, so that the launch finds it in triton's cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = module.KERNELS[name]
    pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        fn=getattr(module, name),
        signature=signature,
        constexprs={},
        attrs={(index,): [["tt.divisibility", 16]] for index in pointers},
    )
    fixed: Mapping[str, int] = getattr(module, "WARPS", {})
    stages = 1 if name in fixed else case.num_stages
    options = {
        **module.OPTIONS,
        "num_warps": fixed.get(name, case.num_warps),
        "num_stages": stages,
    }
    try:
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:  # the compiler's errors have no common class
        raise TemplateError(f"{case} {name} for sm_{capability}: {error}") from error


def precompile(
    cases: Sequence[KernelCase],
    capability: int,
    progress: Callable[[int, int], None] | None = None,
    *,
    jobs: int | None = None,
) -> None:
    """Fill triton's cache with the kernels of a start-up, several processes at a time.

    What an earlier start-up has compiled with the same triton is skipped. A case that does not
    compile here is left to its launch, which says why.

    Args:
        cases: distinct kernels.
        capability: of the device.
        progress: called with the cases done and their number.
        jobs: processes; by default one for each usable processor.
    """
    import triton

    folder = cache_folder()
    stamp = f"sm_{capability} triton {triton.__version__}"
    marks = {case: folder / f"{_mark(case, stamp)}.compiled" for case in cases}
    missing = [case for case in cases if not marks[case].exists()]
    jobs = min(jobs or processors(), -(-len(missing) // 2))
    if jobs < 2:
        return
    workers = []
    for index in range(jobs):
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "dflash_graph.ahead_of_time", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert worker.stdin is not None
        pickle.dump((missing[index::jobs], capability), worker.stdin)
        worker.stdin.close()
        workers.append(worker)
    done = len(cases) - len(missing)
    try:
        for index, worker in enumerate(workers):
            assert worker.stdout is not None
            for line in worker.stdout:
                case = missing[index::jobs][int(line)]
                marks[case].touch()
                done += 1
                if progress is not None:
                    progress(done, len(cases))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _mark(case: KernelCase, stamp: str) -> str:
    """A file name for a compiled case."""
    source = render(case.template, dict(case.holes)).key
    identity = f"{stamp} {source} {case.num_warps} {case.num_stages}"
    return f"{case.template}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _work() -> None:
    """Compile the cases on standard input; the index of each goes to standard output."""
    cases, capability = pickle.load(sys.stdin.buffer)
    for index, case in enumerate(cases):
        try:
            module = case.module()
            for name in module.KERNELS:
                _compile(case, module, name, capability)
        except TemplateError:
            continue
        print(index, flush=True)


def processors() -> int:
    """Processors that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1


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


def shipped_work() -> tuple[tuple[KernelCase, int], ...]:
    """What ships, as (case, capability): defaults for every capability, and a profile's choices for
    its own, in the dtypes that it measured.
    """
    work = dict.fromkeys(itertools.product(shipped_cases(), CAPABILITIES))
    for choices in shipped_choices():
        dtypes = {None, *(entry.dtype for entry in choices.entries)}
        cases = shipped_cases(choices)
        kept = (case for case in cases if dict(case.holes).get("dtype") in dtypes)
        work |= dict.fromkeys((case, choices.capability) for case in kept)
    return tuple(work)


def compile_all(
    work: Sequence[tuple[KernelCase, int]], *, cache_dir: str | Path | None, jobs: int
) -> Iterator[tuple[Compiled, ...]]:
    """Compile each (case, capability), `jobs` at a time, in order of completion."""
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
            f"{e.registers} / {e.shared / 1024:.1f} / {e.local}" if e else "-"
            for e in (rows[row].get(capability) for capability in CAPABILITIES)
        )
        yield f"{names[row]:<{width}}" + "".join(f"  {cell:>15}" for cell in cells)


def _order(case: KernelCase) -> tuple[Any, ...]:
    """By template, then by the values of its holes; a template's holes are always the same."""
    return case.template, tuple(value for _, value in case.holes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what ships and print what it takes; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_graph.ahead_of_time",
        description="Compile every kernel of the shipped presets ahead of time.",
    )
    parser.add_argument("--cache", help="folder of rendered kernels; default: the user's cache")
    parser.add_argument("--max-spill-bytes", type=int, default=0, help="of a thread; default 0")
    parser.add_argument("--jobs", type=int, default=processors(), help="processes at a time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        _work()
        return 0
    work = shipped_work()
    compiled: list[Compiled] = []
    try:
        results = compile_all(work, cache_dir=given.cache, jobs=given.jobs)
        for done, entries in enumerate(results, 1):
            compiled.extend(entries)
            if done % 50 == 0 or done == len(work):
                print(f"{done} of {len(work)} compiled", file=sys.stderr, flush=True)
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
