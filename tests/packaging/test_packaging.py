"""What installs: the package list, the mapped folders, the wheel, the editable form, the size."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAPPED = ("ops", "templates", "profiles")
FOLDERS = ("dflash_graph", *MAPPED)
DATA_SUFFIXES = {".safetensors", ".json", ".md", ".txt", ".jinja"}
TRACKED_LIMIT = 45_000_000  # bytes

#: Run in an install: every mapped package and every piece of data is where the API says.
PROBE = """
import sys
from pathlib import Path
import dflash_graph.ops, dflash_graph.templates, dflash_graph.profiles
from dflash_graph import demo
assert (demo.target_directory() / "model.safetensors").is_file()
for kind in demo.DRAFT_KINDS:
    assert (demo.draft_directory(kind) / "config.json").is_file()
assert len(demo.prompts()) == 20
names = dflash_graph.profiles.preset_names()
assert names and all(dflash_graph.profiles.load_preset(name)["name"] == name for name in names)
place = Path(sys.argv[1]).resolve()
for package in ("ops", "templates", "profiles", "demo"):
    module = sys.modules[f"dflash_graph.{package}"]
    assert place in Path(module.__file__).resolve().parents, module.__file__
print("fine")
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command away from the repository and return what it printed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that builds leave nothing in the repository."""
    copy = tmp_path_factory.mktemp("sources")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", out, sources, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, to put on the path."""
    site = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", site, wheel, cwd=site)
    return site


def test_package_list_is_the_tree() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = config["tool"]["setuptools"]["packages"]
    mapping = config["tool"]["setuptools"]["package-dir"]
    found = []
    for folder in FOLDERS:
        name = folder if folder == "dflash_graph" else f"dflash_graph.{folder}"
        assert mapping[name] == folder
        for path in (ROOT / folder).rglob("__init__.py"):
            found.append(".".join([name, *path.parent.relative_to(ROOT / folder).parts]))
    assert sorted(listed) == sorted(found)
    modules = {path.stem for path in (ROOT / "dflash_graph").iterdir()}
    assert not modules & set(MAPPED), "a module here would hide the mapped folder of its name"


@pytest.mark.parametrize("folder", MAPPED)
def test_mapped_folder_refuses_its_bare_name(folder: str) -> None:
    with pytest.raises(ImportError, match=rf"^import dflash_graph\.{folder}$"):
        runpy.run_path(str(ROOT / folder / "__init__.py"), run_name=folder)


def test_wheel_holds_every_module_and_all_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {"dflash_graph/py.typed"}
    for folder in FOLDERS:
        prefix = Path("dflash_graph") / ("" if folder == "dflash_graph" else folder)
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", *DATA_SUFFIXES}:
                expected.add((prefix / path.relative_to(ROOT / folder)).as_posix())
    assert names == expected
    assert {
        "dflash_graph/demo/target/model.safetensors",
        "dflash_graph/demo/target/tokenizer.json",
        "dflash_graph/demo/dflash/model.safetensors",
        "dflash_graph/demo/dflash2/model.safetensors",
        "dflash_graph/demo/LICENSE-PSF.txt",
        "dflash_graph/profiles/presets/qwen3.5-27b-dflash2.json",
    } <= names


def test_wheel_works_away_from_the_repository(installed: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-P", "-c", PROBE, installed)
    assert run(*command, cwd=tmp_path, PYTHONPATH=str(installed)) == "fine\n"


def test_module_and_console_script_are_the_same_command(installed: Path, tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(installed), "COLUMNS": "100", "NO_COLOR": "1"}
    module = run(sys.executable, "-P", "-m", "dflash_graph", "--help", cwd=tmp_path, **env)
    (script,) = (installed / "bin").glob("dflash-graph*")
    assert module == run(script, "--help", cwd=tmp_path, **env)
    assert "dflash-graph" in module


def test_editable_install_works_away_from_the_repository(sources: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation")
    prefix = tmp_path / "prefix"
    options = ("--ignore-installed", "--prefix", prefix)
    run(*pip, *options, "--editable", sources, cwd=tmp_path)
    (site,) = prefix.glob("lib*/python*/site-packages")
    # Without the site module, so that an editable install of the repository itself stays out.
    start = f"import site, sys; site.addsitedir({str(site)!r}); " + "".join(
        f"sys.path.append({sysconfig.get_path(kind)!r}); " for kind in ("purelib", "platlib")
    )
    command = (sys.executable, "-S", "-P", "-c", start + PROBE, sources)
    assert run(*command, cwd=tmp_path) == "fine\n"


def test_tracked_files_stay_small() -> None:
    if not (ROOT / ".git").exists():  # an unpacked source archive
        return
    listing = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    files = [ROOT / name for name in listing.split("\0") if name]
    total = sum(path.stat().st_size for path in files if path.is_file())
    assert total < TRACKED_LIMIT, f"{total / 1e6:.1f} MB of files, expected under 45 MB"
