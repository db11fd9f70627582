"""Rounds of the 27B with DFlash2 beside the read ceiling, cuBLAS with Inductor, and eager peers.

    python benchmarks/round.py --json round.json
    python benchmarks/round.py --draft-tokens 15 --batch 1
    python benchmarks/round.py --defaults --without-each --no-library
    python benchmarks/round.py --peers

Every row is a captured round over random weights and state, timed with device events; variants take
turns, figures are medians. The library's variant is the same round with every product by cuBLAS and
what stands around it compiled by Inductor, in CUDA Graphs of its own. `--defaults` times the round
as it is without a profile, `--without-each` without each entry that a run of autotune left: what
is fast among its own kind need not be beside others. `--peers` times greedy rounds of the public
packages transformers and dflash, eagerly, at the same geometry; both must be there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dflash_graph.bench import bench_document, bench_text, play_round, read_ceiling, round_with
from dflash_graph.bench.timing import captured, interleaved
from dflash_graph.choices import Choices
from dflash_graph.errors import DFlashGraphError
from dflash_graph.executors import RoundExecutor
from dflash_graph.lowering.segment import Launch
from dflash_graph.models.pair import preset_pair
from dflash_graph.options import EngineOptions
from dflash_graph.profiles import load_preset, preset_names
from dflash_graph.rounds import Model, Rounds, compile_rounds


def rms(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    wide = x.float()
    scale = weight.float() + 1.0 if offset else weight.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def conv(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    batch, columns, hidden = x.shape
    groups = delta.shape[-1]
    taps = base.float().view(2, groups, -1) + delta.float().unsqueeze(-1)
    taps = taps.reshape(batch, columns, 2, hidden)
    wide = x.float()
    before = torch.nn.functional.pad(wide[:, :-1], (0, 0, 1, 0))
    return taps[:, :, 0] * wide + taps[:, :, 1] * before


@torch.compile
def gate(both: Tensor) -> Tensor:
    a, b = both.chunk(2, -1)
    return (torch.nn.functional.silu(a.float()) * b.float()).to(both.dtype)


@torch.compile
def normed(y: Tensor, norm: Tensor, eps: float, offset: bool) -> Tensor:
    return rms(y, norm, eps, offset)


@torch.compile
def residual_normed(y: Tensor, x: Tensor, norm: Tensor, eps: float, offset: bool) -> Any:
    out = x + y
    return out, rms(out, norm, eps, offset)


@torch.compile
def conv_residual_normed(
    y: Tensor, base: Tensor, delta: Tensor, x: Tensor, norm: Tensor, eps: float, offset: bool
) -> Any:
    out = x + conv(y, base[1], delta).to(x.dtype)
    return out, rms(out, norm, eps, offset)


@torch.compile
def residual_scaled(y: Tensor, x: Tensor, norm: Tensor, offset: bool) -> Any:
    out = x + y
    wide = out.float()
    scale = norm.float() + 1.0 if offset else norm.float()
    squares = wide.square().unflatten(-1, (-1, 64)).sum(-1)
    return out, (wide * scale).to(x.dtype), squares


def factor(squares: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(squares.mean(-1, keepdim=True) / 64 + eps)


@torch.compile
def scaled(y: Tensor, squares: Tensor, eps: float) -> Tensor:
    return (y.float() * factor(squares, eps)).to(y.dtype)


@torch.compile
def scaled_gate(both: Tensor, squares: Tensor, eps: float) -> Tensor:
    a, b = (both.float() * factor(squares, eps)).chunk(2, -1)
    return (torch.nn.functional.silu(a) * b).to(both.dtype)


@torch.compile
def prepared(x: Tensor, d: Tensor, base: Tensor) -> Any:
    d = d.view(*x.shape[:-1], 2, 2, -1)
    return conv(x, base[0], d[:, :, 0]).to(x.dtype), d[:, :, 1]


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x.flatten(0, 1), weight.t()).view(*x.shape[:-1], -1)


def by_library(launch: Launch, t: Callable[[str], Tensor]) -> Callable[[], None] | None:
    """The launch with its product by cuBLAS, or None where it has none."""
    (node,) = launch.step.nodes
    given = {k: t(v) for k, v in node.inputs.items() if isinstance(v, str)}
    out = {k: t(v) for k, v in node.outputs.items()}
    a = dict(node.attributes)

    def run() -> None:
        match node.op:
            case "linear":
                torch.mm(given["x"].flatten(0, 1), given["weight"].t(), out=out["y"].flatten(0, 1))
            case "gdn_project":
                parts = given["weight"].split((a["channels"], a["value_width"], 2 * a["heads"]))
                for name, part in zip(("columns", "z", "ba"), parts, strict=True):
                    torch.mm(given["x"].flatten(0, 1), part.t(), out=out[name].flatten(0, 1))
            case "swiglu_linear":
                out["y"].copy_(gate(product(given["x"], given["weight"])))
            case "scaled_linear":
                y = product(given["z"], given["weight"])
                out["y"].copy_(scaled(y, given["squares"], a["eps"]))
            case "scaled_gdn_project":
                widths = (a["channels"], a["value_width"], 2 * a["heads"])
                for name, part in zip(
                    ("columns", "z", "ba"), given["weight"].split(widths), strict=True
                ):
                    out[name].copy_(scaled(product(given["x"], part), given["squares"], a["eps"]))
            case "scaled_swiglu_linear":
                both = product(given["z"], given["weight"])
                out["y"].copy_(scaled_gate(both, given["squares"], a["eps"]))
            case "linear_norm":
                y = product(given["x"], given["weight"])
                out["n"].copy_(normed(y, given["norm"], a["eps"], a["offset"]))
            case "linear_residual_norm":
                y = product(given["y"], given["weight"])
                x, n = residual_normed(y, given["x"], given["norm"], a["eps"], a["offset"])
                out["out"].copy_(x)
                out["n"].copy_(n)
            case "linear_residual_scale":
                y = product(given["y"], given["weight"])
                made = residual_scaled(y, given["x"], given["norm"], a["offset"])
                for name, value in zip(("out", "z", "squares"), made, strict=True):
                    out[name].copy_(value)
            case "linear_conv_residual_norm":
                y = product(given["y"], given["weight"])
                x, n = conv_residual_normed(
                    y,
                    given["base"],
                    given["delta"],
                    given["x"],
                    given["norm"],
                    a["eps"],
                    a["offset"],
                )
                out["out"].copy_(x)
                out["n"].copy_(n)
            case "conv_prepare":
                d = product(given["x"], given["projection"])
                p, delta = prepared(given["x"], d, given["base"])
                out["prepared"].copy_(p)
                out["delta"].copy_(delta)
            case "head_argmax" | "head_topk":
                x = given["x"][:, a["skip"] :].flatten(0, 1)
                scores = torch.mm(x, given["weight"].t()).view(*out["ids"].shape[:2], -1).float()
                if node.op == "head_argmax":
                    best, ids = scores.max(-1)
                else:
                    best, ids = torch.topk(scores, a["top_k"])
                out["ids"].copy_(ids)
                out["scores"].copy_(best)
            case _:
                raise AssertionError(f"{node.op} has a product that no library makes here")

    product_ops = ("linear", "scaled_", "gdn_project", "swiglu_linear", "conv_prepare")
    is_head = node.op in ("head_argmax", "head_topk")
    return run if is_head or node.op.startswith(product_ops) else None


def library_round(executor: RoundExecutor) -> list[Callable[[], None]]:
    """Replays of the forward and the finish segment with products by cuBLAS."""
    graphs = []
    for index, segment in enumerate(executor.segments):
        bodies = [
            by_library(launch, executor.tensors.__getitem__) or launch.run
            for launch in segment.launches
        ]

        @torch.no_grad()
        def run(bodies: Any = bodies, index: int = index) -> None:
            executor.frames[index].upload()
            for body in bodies:
                body()
            if index == 0:
                executor.outputs.download()

        graphs.append(captured(run).replay)
    return graphs


def default_choices(choices: Choices) -> Choices:
    """What stands without a profile: templates' defaults, nothing dependent."""
    return replace(choices, entries=(), pdl=False)


def without_each(choices: Choices) -> dict[str, Choices]:
    """Choices without each entry that a run of autotune left; the next in line takes its place."""
    return {
        f"without {left_out.key}": replace(
            choices, entries=tuple(entry for entry in choices.entries if entry is not left_out)
        )
        for left_out in choices.entries
        if left_out.evidence
    }


def compare(
    rounds: Rounds,
    batch: int,
    context: int,
    turns: int,
    model: Model,
    *,
    library: bool,
    others: Mapping[str, Choices],
) -> dict[str, float]:
    """Median microseconds of the round by kernels, by libraries and with other choices, taking
    turns.
    """
    play_round(rounds[batch], rounds, batch, context)
    kinds = {"kernels": [lambda i=i: rounds[batch].run_queued(i) for i in range(2)]}
    if library:
        kinds["cublas and inductor"] = library_round(rounds[batch])
    for name, choices in others.items():
        made = round_with(choices, rounds, model, batch, context)
        kinds[name] = [lambda made=made, i=i: made.run_queued(i) for i in range(2)]
    times = interleaved([part for parts in kinds.values() for part in parts], turns)
    return {
        name: statistics.median(map(sum, zip(*times[2 * i : 2 * i + 2], strict=True)))
        for i, name in enumerate(kinds)
    }


def host_gap(rounds: Rounds, batch: int, context: int, count: int = 60) -> float:
    """Median microseconds from a round's results to the launch of the next, through the engine."""
    from dflash_graph.engine import Engine
    from dflash_graph.options import SamplingParams

    executor = rounds[batch]
    marks: list[tuple[float, float]] = []
    run = executor.run

    def timed(index: int = 0, probe: Any = None, meanwhile: Any = None) -> None:
        start = time.perf_counter()
        run(index, probe, meanwhile)
        if index == 0:
            marks.append((start, time.perf_counter()))

    # The engine's own rounds are to be timed: this one executor is wrapped, and unwrapped below.
    executor.run = timed  # type: ignore[method-assign]
    try:
        engine = Engine(rounds)
        budget = min(count * rounds.columns, rounds.capacities.context - 40)
        params = SamplingParams(max_new_tokens=budget, ignore_eos=True)
        for index in range(batch):
            engine.submit([1 + index + i for i in range(20)], params)
        while len(marks) < count and not engine.is_idle:
            engine.step()
    finally:
        del executor.run
    gaps = [start - end for (_, end), (start, _) in itertools.pairwise(marks)]
    return 1e6 * statistics.median(gaps[5:])


def peer_rounds(preset: dict[str, Any], context: int, columns: int, count: int) -> dict[str, Any]:
    """Greedy rounds of one request by the packages transformers and dflash, eagerly, over random
    weights: milliseconds a round from its own statistics, prefill left out.
    """
    import dflash.model
    import transformers

    target_config = transformers.Qwen3_5TextConfig(**preset["target"])
    draft_config = transformers.Qwen3Config(**preset["draft"])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            target = transformers.Qwen3_5ForCausalLM(target_config).eval()
            draft = dflash.model.DFlash2DraftModel(draft_config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, target_config.vocab_size, (1, context), device="cuda")
    with torch.no_grad():
        for turn in range(2):  # the first one loads kernels
            found = dflash.model.dflash_generate(
                draft,
                target,
                ids,
                max_new_tokens=count if turn else 4,
                stop_token_ids=None,
                block_size=columns,
                return_stats=True,
            )
    took = 1e3 * found.time_per_output_token * found.num_output_tokens
    rounds = len(found.acceptance_lengths)
    return {
        "transformers": transformers.__version__,
        "dflash": importlib.metadata.version("dflash"),
        "rounds": rounds,
        "round_ms": took / rounds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="qwen3.5-27b-dflash2", choices=preset_names())
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--no-library", action="store_true", help="leave cuBLAS and Inductor out")
    parser.add_argument("--defaults", action="store_true", help="also the default choices")
    parser.add_argument(
        "--without-each", action="store_true", help="also without each entry of autotune"
    )
    parser.add_argument("--no-ops", action="store_true", help="leave the table of ops out")
    parser.add_argument("--host", action="store_true", help="also host time between rounds")
    parser.add_argument("--peers", action="store_true", help="also transformers and dflash")
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("round: needs a CUDA device, torch sees none", file=sys.stderr)
        return 1
    options = EngineOptions(
        draft_tokens=given.draft_tokens,
        max_batch=max(given.batch),
        device="cuda",
        lowering="triton",
        max_context=given.context + 1024,
    )
    try:
        start = time.perf_counter()
        model = Model.random(preset_pair(given.preset), options)
        torch.cuda.synchronize()
        weights = time.perf_counter() - start
        start = time.perf_counter()
        rounds = compile_rounds(model, options)
        document = bench_document(
            rounds,
            batches=given.batch,
            context=given.context,
            turns=given.turns,
            ops=not given.no_ops,
        )
        document["weights_seconds"] = weights
        document["start_seconds"] = sum(rounds.startup.values())
    except DFlashGraphError as error:
        print(f"round: {error}", file=sys.stderr)
        return 1
    print(bench_text(document), end="", flush=True)
    _write(given.json, document)
    if given.host:
        document["host_gap_us"] = {b: host_gap(rounds, b, given.context) for b in given.batch}
        print("host time between rounds, us:", document["host_gap_us"], flush=True)
    others: dict[str, Choices] = {}
    if given.defaults and rounds.choices is not None:
        others["default choices"] = default_choices(rounds.choices)
    if given.without_each and rounds.choices is not None:
        others |= without_each(rounds.choices)
    library = not given.no_library
    if others or library:
        document["compared_us"] = {}
        for batch in given.batch:
            found = compare(
                rounds, batch, given.context, given.turns, model, library=library, others=others
            )
            document["compared_us"][batch] = found
            print(f"B = {batch}: " + ", ".join(f"{k} {v / 1e3:.3f} ms" for k, v in found.items()))
    document["read_ceiling_after"] = read_ceiling()
    if given.peers:
        del rounds, model
        torch.cuda.empty_cache()
        document["peers"] = peer_rounds(
            load_preset(given.preset), given.context, given.draft_tokens + 1, 12
        )
        print(document["peers"])
    _write(given.json, document)
    return 0


def _write(path: str | None, document: dict[str, Any]) -> None:
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
