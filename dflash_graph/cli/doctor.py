"""`doctor`: what of this machine and environment can be used."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final, Literal

import typer

from dflash_graph.cli.output import AsJson, is_styled, print_json

NAME: Final = "doctor"
SHORT: Final = "Check this machine and environment."
EPILOG: Final = """\b
Examples:
  dflash-graph doctor
  dflash-graph doctor --json"""

Status = Literal["ok", "warn", "fail"]

_COLORS: Final = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}
_OPTIONAL: Final = {"triton": "CUDA kernels need it", "fla-core": "prefill on CUDA uses it"}


@dataclass(frozen=True)
class Check:
    """One finding: `ok`, `warn` (something optional is missing) or `fail` (something needed is)."""

    name: str
    status: Status
    detail: str


def command(as_json: AsJson = False) -> None:
    """Say what of this machine and environment can be used.

    The exit code is 1 if something needed is missing or wrong.
    """
    checks: list[Check] = []
    for name, group in _GROUPS.items():
        for check in _guarded(name, group):
            checks.append(check)
            if not as_json:
                _print(check)
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        print_json({"is_usable": not failed, "checks": [asdict(check) for check in checks]})
    if failed:
        raise typer.Exit(1)


def _print(check: Check) -> None:
    color = _COLORS[check.status] if is_styled(sys.stdout) else None
    typer.echo(f"{typer.style(f'{check.status:<4}', fg=color)}  {check.name:<12} {check.detail}")


def _guarded(name: str, group: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The checks of a group; whatever it raises is a finding as well."""
    try:
        yield from group()
    except Exception as error:  # a broken installation may raise anything
        yield Check(name, "fail", f"{type(error).__name__}: {' '.join(str(error).split())}")


def _system() -> Iterator[Check]:
    needed = sys.version_info >= (3, 11)
    python = f"{platform.python_version()} ({sys.executable})"
    yield Check("python", "ok" if needed else "fail", python)
    yield Check("platform", "ok", platform.platform())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cpu", "ok", f"{usable} of {os.cpu_count()} cores, {memory / 2**30:.1f} GiB memory")


def _needed() -> list[str]:
    """What this distribution requires without an extra, as its metadata says: rich>=13.7."""
    return [line for line in requires("dflash-graph") or [] if "extra ==" not in line]


def _optional(name: str) -> str:
    """What an extra requires of a distribution."""
    stated = [line.partition(";")[0] for line in requires("dflash-graph") or []]
    return next((line for line in stated if _name(line) == name), name)


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _packages() -> Iterator[Check]:
    for requirement in _needed():
        yield _package(requirement, "fail", "pip install dflash-graph brings it")
    for name, use in _OPTIONAL.items():
        yield _package(_optional(name), "warn", use)


def _package(requirement: str, lacking: Status, hint: str) -> Check:
    """A distribution against its lower bound, the only kind of bound that this one states."""
    name, least = _name(requirement), re.search(r">=\s*([\d.]+)", requirement)
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check(name, lacking, f"not installed; {hint}")
    if least is not None and _release(found) < _release(least[1]):
        return Check(name, lacking, f"{found}; expected at least {least[1]}: {hint}")
    return Check(name, "ok", found)


def _release(stated: str) -> tuple[int, ...]:
    """The numbers of a version, to compare: 2.11.0+cpu and 2.11 are the same release."""
    numbers = re.match(r"\d+(?:\.\d+)*", stated)
    return tuple(map(int, re.sub(r"(\.0+)+$", "", numbers[0]).split("."))) if numbers else ()


def _compiler() -> Iterator[Check]:
    """Inductor takes $CXX, else g++ (clang++ on macOS)."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    asked = (shlex.split(os.environ.get("CXX", "")) or [default])[0]
    path = shutil.which(asked)
    if path is None:
        others = [name for name in ("g++", "clang++") if shutil.which(name)]
        hint = f"set CXX={others[0]}" if others else "install one"
        yield Check("c++", "warn", f"no {asked}; lowering inductor needs a compiler: {hint}")
        return
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    first = (said.stdout.splitlines() or ["it says nothing of its version"])[0]
    status: Status = "ok" if said.returncode == 0 else "warn"
    yield Check("c++", status, f"{path}: {first}")


def _cuda() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check("cuda", "warn", "torch sees no device; the CPU is used")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.1f} GiB"
        detail = f"{device.name}, capability {device.major}.{device.minor}, {memory}"
        yield Check(f"cuda:{index}", "ok", detail)


def _caches() -> Iterator[Check]:
    """What inductor compiles is kept between runs, where its folder can be written; so are rendered
    kernels, and what autotune measures.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    from dflash_graph.errors import TemplateError
    from dflash_graph.profile_store import VARIABLE, user_folder
    from dflash_graph.rendering import CACHE_VARIABLE, cache_folder

    inductor = "TORCHINDUCTOR_CACHE_DIR"
    yield _folder("cache", Path(os.environ.get(inductor) or default_cache_dir()), inductor)
    try:
        yield _folder("kernels", cache_folder(), CACHE_VARIABLE)
    except TemplateError as error:
        yield Check("kernels", "warn", str(error))
    yield _folder("profiles", user_folder(), VARIABLE)


def _folder(name: str, folder: Path, variable: str) -> Check:
    """Whether a folder can be written, or made where it is not there yet."""
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    is_writable = os.path.isdir(there) and os.access(there, os.W_OK)
    hint = "" if is_writable else f"; not writable, set {variable}"
    return Check(name, "ok" if is_writable else "warn", f"{folder}{hint}")


def _demo() -> Iterator[Check]:
    """Every header of the demo checkpoints is checked, and the text files are read."""
    from dflash_graph import demo
    from dflash_graph.checkpoint import Checkpoint, draft_layout, target_layout
    from dflash_graph.geometry import check_pair, read_draft_geometry, read_target_geometry
    from dflash_graph.text import load_tokenizer

    folder = demo.target_directory()
    target = read_target_geometry(folder)
    Checkpoint.open(folder, target_layout(target))
    for kind in demo.DRAFT_KINDS:
        draft = read_draft_geometry(demo.draft_directory(kind))
        check_pair(target, draft)
        Checkpoint.open(demo.draft_directory(kind), draft_layout(draft))
    if load_tokenizer(folder) is None:
        yield Check("demo", "fail", f"{folder / 'tokenizer.json'} is missing; install again")
        return
    yield Check(
        "demo", "ok", f"a target, {len(demo.DRAFT_KINDS)} drafts, {len(demo.prompts())} prompts"
    )


def _self_check() -> Iterator[Check]:
    """One registered op against its reference in float64."""
    import torch

    from dflash_graph.ops import get_op

    op = get_op("rms_norm")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 256, generator=generator)
    weight = torch.randn(256, generator=generator)
    found = op(x=x, weight=weight, eps=1e-6, offset=True)
    oracle = op.reference(x.double(), weight.double(), eps=1e-6, offset=True)
    error = float((found.double() - oracle).abs().max() / oracle.abs().max())
    status: Status = "ok" if error < 1e-6 else "fail"
    yield Check("self-check", status, f"rms_norm is {error:.1e} off its float64 reference")


_GROUPS: Final[dict[str, Callable[[], Iterator[Check]]]] = {
    "system": _system,
    "packages": _packages,
    "c++": _compiler,
    "cuda": _cuda,
    "cache": _caches,
    "demo": _demo,
    "self-check": _self_check,
}
