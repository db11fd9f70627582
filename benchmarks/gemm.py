"""How fast the `linear` kernel reads every matrix of a round, beside cuBLAS and the read ceiling.

    python benchmarks/gemm.py --rows 8 16 64 --json gemm.json

Every product that a verify or a propose of the preset makes is launched with its default choice
inside a captured graph. Weights rotate through more memory than the L2 holds, so each is read from
DRAM; kernel and cuBLAS take turns, and figures are medians over turns. The ceiling is measured in
the same run: a kernel that only reads, and a large copy (both directions counted). Results are
compared with float64 first: a matrix that is wrong gets no time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_graph.errors import DFlashGraphError
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.kernels import KernelCase, default_choice, row_bucket
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_round
from dflash_graph.op import Sizes
from dflash_graph.profiles import load_preset, preset_names
from dflash_graph.rendering import HoleValue
from dflash_graph.testing import BF16_REDUCTION, TENSOR_CORE_REDUCTION, assert_matches

#: Ops that are a product of rows with one weight, and which argument that is. The kernel timed is
#: `linear`'s for all; where an op keeps its accumulator, so does the kernel.
PRODUCTS = {
    "linear": "weight",
    "context_kv": "weight",
    "conv_prepare": "projection",
    "head_argmax": "weight",
    "head_scores": "weight",
    "head_topk": "weight",
}
CEILING_BYTES = 4 << 30


class Matrix(NamedTuple):
    """A weight `[O, I]` and how its product is kept."""

    op: str
    outputs: int
    inputs: int

    @property
    def bytes(self) -> int:
        return 2 * self.outputs * self.inputs

    @property
    def unrounded(self) -> bool:
        return self.op != "linear"


def matrices(preset: str) -> Counter[Matrix]:
    """Matrices of a greedy round's forward segment, and how often a round reads each shape."""
    configs = load_preset(preset)
    target = target_geometry_from_config(configs["target"], f"{preset}.target")
    draft = draft_geometry_from_config(configs["draft"], f"{preset}.draft")
    pair = ModelPair(target, draft, dtype="bfloat16")
    graph = declare_round(pair, "triton", draft_tokens=7, batch=1).forward
    found: Counter[Matrix] = Counter()
    for node in graph.nodes:
        if node.op in PRODUCTS:
            name = node.inputs[PRODUCTS[node.op]]
            assert isinstance(name, str)
            shape = graph.values[name].spec.bind({})
            found[Matrix(node.op, shape[0], shape[1])] += 1
    return found


def case_for(matrix: Matrix, rows: int) -> KernelCase:
    """The `linear` kernel with its default choice."""
    sizes = Sizes({"O": matrix.outputs, "I": matrix.inputs, "B": 1, "W": rows, "tiled": True})
    choice = default_choice("linear", sizes, "bfloat16")
    holes: dict[str, HoleValue] = {
        "O": matrix.outputs,
        "I": matrix.inputs,
        "dtype": "bfloat16",
        "unrounded": matrix.unrounded,
        "BLOCK_R": row_bucket(rows),
        **choice.tiles,
    }
    ordered = tuple(sorted(holes.items()))
    return KernelCase("linear", "linear", ordered, choice.num_warps, choice.num_stages)


def captured(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of one call of `body`, after one call that compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def interleaved(graphs: Sequence[torch.cuda.CUDAGraph], turns: int) -> list[float]:
    """Median microseconds of a replay of each graph; they take turns."""
    times: list[list[float]] = [[] for _ in graphs]
    for turn in range(-2, turns):  # two turns to steady clocks
        marks = []
        for graph in graphs:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        for kept, (start, end) in zip(times, marks, strict=True):
            if turn >= 0:
                kept.append(1e3 * start.elapsed_time(end))
    return [statistics.median(kept) for kept in times]


def ceilings(turns: int) -> dict[str, float]:
    """TB/s of a kernel that only reads, and of a copy with both directions counted."""
    from read_kernel import BLOCK, read_all

    source = torch.zeros(CEILING_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    sums = torch.empty(source.numel() // BLOCK.value, dtype=torch.int32, device="cuda")

    def copy_all() -> None:
        target.copy_(source)

    graphs = [captured(partial(read_all, source, sums)), captured(copy_all)]
    read, copy = interleaved(graphs, turns)
    return {"read": CEILING_BYTES / read / 1e6, "copy": 2 * CEILING_BYTES / copy / 1e6}


def check(module: ModuleType, case: KernelCase, x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Raise AssertionError unless the kernel's product is right; some features are compared."""
    y.fill_(float("nan"))
    module.launch(x, weight, y, num_warps=case.num_warps, num_stages=case.num_stages)
    assert bool(torch.isfinite(y).all()), "not every feature was written"
    features = torch.arange(0, weight.shape[0], max(1, weight.shape[0] // 512), device="cuda")
    oracle = x.double() @ weight[features].double().t()
    tolerance = TENSOR_CORE_REDUCTION if y.dtype is torch.float32 else BF16_REDUCTION
    assert_matches(y[:, features], oracle, tolerance, str(case))


def measure(
    matrix: Matrix, rows: int, *, cache_dir: str, rotate_bytes: int, turns: int
) -> dict[str, Any]:
    """Kernel and cuBLAS on one matrix; times are of one product."""
    copies = max(2, -(-rotate_bytes // matrix.bytes))
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = torch.randn(copies, matrix.outputs, matrix.inputs, **half)
    weights *= matrix.inputs**-0.5
    x = torch.randn(rows, matrix.inputs, **half)
    kept = torch.float32 if matrix.unrounded else torch.bfloat16
    y = torch.empty(rows, matrix.outputs, device="cuda", dtype=kept)
    library = torch.empty(rows, matrix.outputs, **half)
    case = case_for(matrix, rows)
    module = case.module(cache_dir)
    check(module, case, x, weights[0], y)

    def kernel() -> None:
        for weight in weights:
            module.launch(x, weight, y, num_warps=case.num_warps, num_stages=case.num_stages)

    def cublas() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=library)

    ours, theirs = (t / copies for t in interleaved([captured(kernel), captured(cublas)], turns))
    return {
        "op": matrix.op,
        "outputs": matrix.outputs,
        "inputs": matrix.inputs,
        "rows": rows,
        "bytes": matrix.bytes,
        "case": str(case),
        "kernel_us": ours,
        "kernel_tb_per_s": matrix.bytes / ours / 1e6,
        "cublas_us": theirs,
        "cublas_tb_per_s": matrix.bytes / theirs / 1e6,
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The table for people, and a total of a round for every count of rows."""
    ceiling = report["ceiling_tb_per_s"]
    made = [
        f"{report['device']}, torch {report['torch']}, triton {report['triton']}; ceiling TB/s: "
        f"read {ceiling['read']:.2f}, copy {ceiling['copy']:.2f}",
        "rows  op            O       I       n        MB  kernel us  TB/s  share  cuBLAS us  TB/s",
    ]
    best = max(ceiling.values())
    for row in report["products"]:
        made.append(
            f"{row['rows']:>4}  {row['op']:<12} {row['outputs']:>6}  {row['inputs']:>6}  "
            f"{row['in_a_round']:>3}  {row['bytes'] / 1e6:>9.2f}  {row['kernel_us']:>9.2f}  "
            f"{row['kernel_tb_per_s']:>4.2f}  {row['kernel_tb_per_s'] / best:>5.0%}  "
            f"{row['cublas_us']:>9.2f}  {row['cublas_tb_per_s']:>4.2f}"
        )
    for rows in sorted({row["rows"] for row in report["products"]}):
        some = [row for row in report["products"] if row["rows"] == rows]
        total, ours, theirs = (
            sum(row["in_a_round"] * row[key] for row in some)
            for key in ("bytes", "kernel_us", "cublas_us")
        )
        made.append(
            f"a round of {rows} rows: {total / 1e9:.2f} GB, floor {total / best / 1e9:.2f} ms, "
            f"kernel {ours / 1e3:.2f} ms, cuBLAS {theirs / 1e3:.2f} ms"
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="qwen3.5-27b-dflash2", choices=preset_names())
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--turns", type=int, default=20, help="timed replays of each graph")
    parser.add_argument("--rotate-mib", type=int, default=512, help="weights to rotate through")
    parser.add_argument("--cache", help="folder of rendered kernels; default: a temporary one")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    if min(*arguments.rows, arguments.turns, arguments.rotate_mib) < 1:
        parser.error("rows, turns and rotate-mib must be at least 1")
    if not torch.cuda.is_available():
        print("gemm: needs a CUDA device, torch sees none", file=sys.stderr)
        return 1
    try:
        import triton
    except ModuleNotFoundError:
        print("gemm: triton is not installed: pip install 'dflash-graph[triton]'", file=sys.stderr)
        return 1

    torch.manual_seed(0)
    products = []
    with tempfile.TemporaryDirectory() as temporary:
        ceiling = ceilings(arguments.turns)
        found = matrices(arguments.preset)
        for index, (matrix, count) in enumerate(found.items()):
            for rows in arguments.rows:
                try:
                    row = measure(
                        matrix,
                        rows,
                        cache_dir=arguments.cache or temporary,
                        rotate_bytes=arguments.rotate_mib << 20,
                        turns=arguments.turns,
                    )
                except (AssertionError, DFlashGraphError) as error:
                    print(f"gemm: {matrix} with {rows} rows: {error}", file=sys.stderr)
                    return 1
                products.append({"in_a_round": count, **row})
            print(f"{index + 1} of {len(found)} matrices done", file=sys.stderr, flush=True)
    products.sort(key=lambda row: (row["rows"], -row["bytes"], row["op"]))
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "preset": arguments.preset,
        "turns": arguments.turns,
        "rotate_mib": arguments.rotate_mib,
        "ceiling_tb_per_s": ceiling,
        "products": products,
    }
    for line in lines(report):
        print(line)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
