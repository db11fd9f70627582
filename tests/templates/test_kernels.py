"""From op calls to kernels, and kernels compiled for devices that are not here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_graph import ahead_of_time
from dflash_graph.ahead_of_time import (
    CAPABILITIES,
    Compiled,
    compile_case,
    problems,
    shipped_work,
    table,
)
from dflash_graph.choices import shipped_choices
from dflash_graph.errors import ShapeError, TemplateError
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.kernels import (
    Choice,
    KernelCase,
    kernel_case,
    kernel_cases,
    kernel_ops,
    row_bucket,
    shipped_cases,
)
from dflash_graph.kernels.products import product_choice
from dflash_graph.models.pair import ModelPair
from dflash_graph.op import get_op
from dflash_graph.profiles import load_preset
from dflash_graph.rendering import render, template_info, template_names
from dflash_graph.tensor import TensorSpec

SMALL = (
    ("linear", {"x": "1 3 45", "weight": "19 45"}, {"tiled": True}),
    ("linear", {"x": "1 40 256", "weight": "64 256"}, {"tiled": True}),
    ("rms_norm", {"x": "2 3 24", "weight": "24"}, {"eps": 1e-6, "offset": True}),
    ("swiglu_linear", {"x": "2 3 40", "weight": "260 40"}, {"ffn_width": 130}),
)


def product_tiles(**changes: int) -> dict[str, int]:
    """Tiles of a product, but for `changes` those of a default choice."""
    return {**product_choice(64, 64, 1, "bfloat16", splits=False).tiles, **changes}


def small_case(op: str, shapes: dict[str, str], attributes: dict, dtype: str) -> KernelCase:
    specs = {
        name: TensorSpec(tuple(map(int, shape.split())), dtype) for name, shape in shapes.items()
    }
    case = kernel_case(op, specs, attributes)
    assert case is not None
    return case


def test_row_buckets() -> None:
    rows = (1, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129)
    expected = [16, 16, 16, 32, 32, 64, 64, 128, 128, 128, 128]
    assert [row_bucket(n) for n in rows] == expected


def test_what_was_measured_is_looked_up_by_the_rows_of_the_op() -> None:
    """A draft's head leaves out the anchor's column, and so often a row tile."""
    (choices,) = (found for found in shipped_choices() if found.device == "NVIDIA H200")
    (entry,) = (e for e in choices.entries if e.op == "head_topk")
    stages = dict(entry.num_stages)
    assert len(set(stages.values())) > 1
    attributes = dict(entry.sizes)
    vocab, hidden = attributes.pop("V"), attributes.pop("H")
    law = {"skip": 1, "public_vocab": vocab, "multiplier": 1.0, "softcap": 0.0, **attributes}
    seen = set()
    for batch in range(1, 9):
        for columns in range(2, 17):
            specs = {
                "x": TensorSpec((batch, columns, hidden), "bfloat16"),
                "weight": TensorSpec((vocab, hidden), "bfloat16"),
            }
            case = kernel_case("head_topk", specs, law, choices=choices)
            assert case is not None
            tile = int(dict(case.holes)["BLOCK_R"])
            assert tile == row_bucket(batch * (columns - 1))
            seen.add(tile)
            assert case.num_stages == stages.get(tile, case.num_stages)
    assert seen == {16, 32, 64, 128}


def test_every_template_belongs_to_an_op_and_the_reverse() -> None:
    stated = {name: template_info(name).ops for name in template_names()}
    for ops in stated.values():
        assert all(get_op(op).name == op for op in ops)
    assert sorted(op for ops in stated.values() for op in ops) == list(kernel_ops())


def test_calls_without_a_kernel() -> None:
    specs = {"x": TensorSpec((1, 3, 45), "float32"), "weight": TensorSpec((19, 45), "float32")}
    assert kernel_case("linear", specs, {"tiled": False}) is None
    gate_up = {"gate_up": TensorSpec((1, 3, 8), "float32")}
    assert kernel_case("swiglu", gate_up, {"ffn_width": 4}) is None
    with pytest.raises(ShapeError, match="attributes"):
        kernel_case("linear", specs, {})


def test_a_choice_replaces_the_default() -> None:
    specs = {"x": TensorSpec((1, 3, 45), "float32"), "weight": TensorSpec((19, 45), "float32")}
    tiles = product_tiles(BLOCK_O=128, BLOCK_I=16, SPLIT=2)
    choice = Choice(tiles, num_warps=8, num_stages=1)
    case = kernel_case("linear", specs, {"tiled": True}, choice=choice)
    assert case is not None
    assert dict(case.holes) == {
        "O": 19,
        "I": 45,
        "dtype": "float32",
        "unrounded": False,
        "scaled": False,
        "BLOCK_R": 16,
        "pdl": False,
        **tiles,
    }
    assert case.workspace == 4 * 2 * 3 * 19
    assert (case.num_warps, case.num_stages) == (8, 1)


def test_shipped_cases_render_and_fix_tiles_by_weight(tmp_path: Path) -> None:
    cases = shipped_cases()
    assert len(set(cases)) == len(cases)
    assert {case.op for case in cases} == set(kernel_ops())
    fixed: dict[tuple, set] = {}
    buckets: dict[tuple, set] = {}
    for case in cases:
        render(case.template, dict(case.holes), cache_dir=tmp_path)
        holes = dict(case.holes)
        if "SPLIT" in holes:
            weight = (case.op, holes["O"], holes["I"], holes["dtype"])
            tiles = (holes["BLOCK_O"], holes["BLOCK_I"], holes["SPLIT"], case.num_warps)
            fixed.setdefault(weight, set()).add(tiles)
            buckets.setdefault(weight, set()).add(holes["BLOCK_R"])
    assert all(len(tiles) == 1 for tiles in fixed.values())
    large = {
        ("swiglu_linear", 34816, 5120, "bfloat16"),
        ("linear_residual_norm", 5120, 17408, "bfloat16"),
        ("gdn_project", 16480, 5120, "bfloat16"),
    }
    assert large < fixed.keys()
    # Sixteen columns and one to eight requests: 16 to 128 rows.
    assert all(found == {16, 32, 64, 128} for found in buckets.values())


@pytest.mark.parametrize("name", ["demo-dflash", "demo-dflash2"])
def test_the_largest_rounds_meet_the_kernels_of_all(name: str) -> None:
    preset = load_preset(name)
    target = target_geometry_from_config(preset["target"], "target")
    draft = draft_geometry_from_config(preset["draft"], "draft")
    pair = ModelPair(target, draft, dtype="bfloat16")
    largest = set(kernel_cases(pair))
    for draft_tokens, batch in ((1, 1), (1, 8), (6, 3), (7, 8), (8, 2), (14, 8), (15, 1)):
        found = set(kernel_cases(pair, draft_tokens=draft_tokens, max_batch=batch))
        assert found <= largest, (draft_tokens, batch, found - largest)


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("op", "shapes", "attributes"), SMALL)
def test_compiles_ahead_of_time(
    op: str,
    shapes: dict[str, str],
    attributes: dict,
    dtype: str,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    case = small_case(op, shapes, attributes, dtype)
    (found,) = compile_case(case, capability, cache_dir=tmp_path)
    assert (found.case, found.capability) == (case, capability)
    assert 8 <= found.registers <= 255
    assert found.shared > 0 or op != "linear"
    assert problems([found], 0) == []


def sum_layouts(file: Path, summed: str) -> list[str]:
    """How a compiled kernel shares what it sums among threads and lanes, sum by sum.

    Args:
        file: the kernel in Triton's GPU dialect.
        summed: pattern of the shape and dtype of what is summed.
    """
    text = file.read_text(encoding="utf-8")
    found = []
    for layout in re.findall(rf"}}\) : \(tensor<{summed}, (#\w+)>", text):
        (where,) = re.findall(
            rf"^{layout} = #ttg.blocked<{{(sizePerThread = .*), warpsPerCTA", text, re.MULTILINE
        )
        found.append(where)
    return found


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_squares_of_a_row_are_summed_in_one_order(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes and neighbours of a lane, in tiles that are like those of the weight or are not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    found = set()
    for rows, block_o, warps in ((1, 128, 4), (64, 64, 4), (64, 128, 8), (128, 128, 8)):
        specs = {
            "z": TensorSpec((1, rows, 256), "bfloat16"),
            "squares": TensorSpec((1, rows, 4), "float32"),
            "weight": TensorSpec((256, 256), "bfloat16"),
        }
        tiles = product_tiles(BLOCK_O=block_o, BLOCK_I=128, SPLIT=1)
        choice = Choice(tiles, num_warps=warps, num_stages=1)
        case = kernel_case("scaled_linear", specs, {"segments": 4, "eps": 1e-6}, choice=choice)
        assert case is not None
        compile_case(case, capability, cache_dir=tmp_path)
    files = list(tmp_path.glob("triton/*/linear_kernel.ttgir"))
    assert len(files) == 4
    for file in files:
        (layout,) = sum_layouts(file, r"\d+x1x128xf32")
        found.add(layout)
    assert found == {"sizePerThread = [1, 1, 4], threadsPerWarp = [1, 1, 32]"}


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_rule_sums_in_one_order(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and rule alike: eight lanes of four neighbours a row, in all tiles a launch takes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    sizes = {"key_heads": 2, "key_dim": 128, "value_heads": 4, "value_dim": 64, "eps": 1e-6}
    shapes = {
        "taps_weight": ("768 4", "bfloat16"),
        "history": ("5 3 768", "bfloat16"),
        "a_log": ("4", "float32"),
        "dt_bias": ("4", "float32"),
        "norm": ("64", "bfloat16"),
        "state": ("5 4 64 128", "float32"),
    }
    for batch, block, warps in ((1, 16, 2), (1, 16, 4), (2, 32, 2), (2, 64, 4), (8, 64, 16)):
        shapes |= {
            "x": (f"{batch} 5 768", "bfloat16"),
            "ba": (f"{batch} 5 8", "bfloat16"),
            "z": (f"{batch} 5 256", "bfloat16"),
            "slots": (f"{batch}", "int32"),
            "live": (f"{batch}", "int32"),
        }
        specs = {
            name: TensorSpec(tuple(map(int, shape.split())), dtype)
            for name, (shape, dtype) in shapes.items()
        }
        choice = Choice({"BLOCK_V": block}, num_warps=warps, num_stages=1)
        case = kernel_case("gdn_mixer", specs, sizes, choice=choice)
        assert case is not None
        compile_case(case, capability, cache_dir=tmp_path)
    found: dict[str, set[str]] = {}
    for file in tmp_path.glob("triton/*/gdn_mixer_*.ttgir"):
        if "norm" in file.name:
            continue
        layouts = sum_layouts(file, r"\d+x32xf32")
        assert layouts
        for layout in layouts:
            found.setdefault(layout, set()).add(file.name)
    assert found == {
        "sizePerThread = [1, 4], threadsPerWarp = [4, 8]": {
            "gdn_mixer_kernel.ttgir",
            "gdn_mixer_prepare_kernel.ttgir",
        }
    }


@pytest.mark.usefixtures("needs_triton")
def test_spills_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warp holds 64 x 128 accumulators: more registers than a thread has."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    specs = {
        "x": TensorSpec((8, 16, 64), "bfloat16"),
        "weight": TensorSpec((256, 64), "bfloat16"),
    }
    tiles = product_tiles(BLOCK_O=64, BLOCK_I=16, SPLIT=1)
    choice = Choice(tiles, num_warps=1, num_stages=1)
    case = kernel_case("linear", specs, {"tiled": True}, choice=choice)
    assert case is not None
    (found,) = compile_case(case, 80, cache_dir=tmp_path)
    assert found.local > 100
    (problem,) = problems([found], 0)
    assert f"{found.local} bytes of spills, bound 0" in problem
    assert problems([found], found.local) == []


@pytest.mark.usefixtures("needs_triton")
def test_a_kernel_that_does_not_compile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    case = small_case(*SMALL[2], "float32")
    broken = KernelCase(case.op, case.template, case.holes, num_warps=3, num_stages=1)
    with pytest.raises(TemplateError, match=r"rms_norm .* for sm_90: .*power of 2"):
        compile_case(broken, 90, cache_dir=tmp_path)


def test_table_and_problems() -> None:
    case = small_case(*SMALL[0], "float32")
    rows = [
        Compiled(case, "linear_kernel", capability, 40, 100 * 1024, 0)
        for capability in CAPABILITIES
    ]
    tuned = Compiled(replace(case, num_stages=5), "linear_kernel", 90, 41, 0, 0)
    head, line, measured = table([*rows, tuned])
    assert "sm_80" in head and "sm_120" in head
    assert line.startswith("linear_kernel: linear BLOCK_I=32") and line.count("40 / 100.0 / 0") == 3
    assert measured.split("stages=5")[1].split() == ["-", "41", "/", "0.0", "/", "0", "-"]
    (problem,) = problems(rows, 0)
    assert "sm_120: 102400 bytes of shared memory, the device has 101376" in problem


def test_what_a_profile_chooses_is_compiled_where_it_was_measured() -> None:
    work = shipped_work()
    assert len(set(work)) == len(work)
    targets: dict[KernelCase, set[int]] = {}
    for case, capability in work:
        targets.setdefault(case, set()).add(capability)
    assert all(targets[case] == set(CAPABILITIES) for case in shipped_cases())
    for choices in shipped_choices():
        assert choices.capability in CAPABILITIES
        dtypes = {entry.dtype for entry in choices.entries}
        wanted = [
            case
            for case in shipped_cases(choices)
            if dict(case.holes).get("dtype", "any") in {"any", *dtypes}
        ]
        assert all(choices.capability in targets[case] for case in wanted)
        tuned = {case.op for case in wanted if targets[case] == {choices.capability}}
        assert tuned >= {entry.op for entry in choices.entries}


@pytest.mark.usefixtures("needs_triton")
def test_the_command_fails_on_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = small_case(*SMALL[3], "float32")
    work = tuple((case, capability) for capability in CAPABILITIES)
    monkeypatch.setattr(ahead_of_time, "shipped_work", lambda: work)
    for local, status in ((0, 0), (8, 1)):
        made = [
            (Compiled(case, "swiglu_linear_kernel", capability, 40, 0, local),)
            for capability in CAPABILITIES
        ]
        monkeypatch.setattr(ahead_of_time, "compile_all", lambda *_, made=made, **__: iter(made))
        assert ahead_of_time.main(["--cache", str(tmp_path)]) == status
        out, err = capsys.readouterr()
        assert "3 of 3 compiled" in err and "swiglu_linear" in out
        assert ("8 bytes of spills" in err) == (status == 1)
