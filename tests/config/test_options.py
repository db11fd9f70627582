"""Engine and sampling options: what is accepted, and the one line that a bad value gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_graph.errors import OptionError
from dflash_graph.options import EngineOptions, SamplingParams


def test_defaults_are_those_documented() -> None:
    options = EngineOptions()
    assert (options.draft_tokens, options.columns, options.max_batch) == (7, 8, 4)
    assert (options.max_context, options.prefill_chunk) == (8192, 1024)
    assert (options.device, options.dtype, options.lowering) == (None, None, None)
    assert options.speculative and options.cuda_graphs
    assert options.draft_causality == "none"
    assert options.proposal_head is options.draft_tree is options.public_vocab is None
    assert options.profile is None
    params = SamplingParams()
    assert params.is_greedy
    assert (params.top_k, params.top_p, params.min_p, params.seed) == (0, 1.0, 0.0, 0)
    assert (params.max_new_tokens, params.stop_token_ids, params.stop) == (128, (), ())


@pytest.mark.parametrize(
    "values",
    [
        {"draft_tokens": 1},
        {"draft_tokens": 15, "draft_tree": 16},
        {"max_batch": 1},
        {"max_batch": 8},
        {"draft_tree": 8},
        {"draft_tree": 32},
        {"draft_tree": "auto"},
        {"public_vocab": 1},
        {"draft_causality": "sliding"},
        {"proposal_head": Path("head.safetensors")},
        {"profile": Path("profile.json")},
        {"device": "cuda", "dtype": "float32", "lowering": "eager"},
    ],
)
def test_engine_options_keep_legal_values(values: dict[str, Any]) -> None:
    options = EngineOptions(**values)
    assert {name: getattr(options, name) for name in values} == values


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("draft_tokens", 0, "an integer 1..15"),
        ("draft_tokens", 16, "an integer 1..15"),
        ("draft_tokens", True, "an integer 1..15"),
        ("draft_tokens", 7.0, "an integer 1..15"),
        ("draft_tokens", "7", "an integer 1..15"),
        ("draft_tokens", None, "an integer 1..15"),
        ("max_batch", 0, "an integer 1..8"),
        ("max_batch", 9, "an integer 1..8"),
        ("device", "cuda:0", "'cuda', 'cpu' or None"),
        ("dtype", "float16", "'float32', 'bfloat16' or None"),
        ("lowering", "tvm", "'eager', 'inductor', 'triton' or None"),
        ("max_context", 0, "an integer 1.."),
        ("prefill_chunk", -1, "an integer 1.."),
        ("proposal_head", "", "a path"),
        ("proposal_head", 3, "a path"),
        ("profile", "", "a path"),
        ("profile", 3, "a path"),
        ("draft_tree", 1, "2..32"),
        ("draft_tree", 33, "2..32"),
        ("draft_tree", "all", "'auto'"),
        ("draft_causality", "full", "'none' or 'sliding'"),
        ("speculative", 1, "True or False"),
        ("public_vocab", 0, "an integer 1.."),
        ("cuda_graphs", None, "True or False"),
    ],
)
def test_engine_options_refuse(field: str, value: object, expected: str) -> None:
    assert_refused(EngineOptions, field, value, expected)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", float("nan"), "a finite float32"),
        ("temperature", float("inf"), "a finite float32"),
        ("temperature", 1e39, "a finite float32"),
        ("temperature", 1e-40, "2^-126"),
        ("temperature", True, "a finite float32"),
        ("temperature", "1", "a finite float32"),
        ("top_k", 1.5, "an integer"),
        ("top_k", True, "an integer"),
        ("top_k", 2**31, "31 bits"),
        ("top_p", 1.5, "a number 0..1"),
        ("top_p", -0.1, "a number 0..1"),
        ("top_p", float("nan"), "a number 0..1"),
        ("min_p", 1.1, "a number 0..1"),
        ("presence_penalty", float("-inf"), "a finite float32"),
        ("frequency_penalty", float("nan"), "a finite float32"),
        ("seed", -1, "0..2^64-1"),
        ("seed", 2**64, "0..2^64-1"),
        ("seed", False, "0..2^64-1"),
        ("max_new_tokens", 0, "an integer 1.."),
        ("stop_token_ids", [3, -1], "integers 0.."),
        ("stop_token_ids", [True], "integers 0.."),
        ("stop_token_ids", 3, "a list or tuple"),
        ("ignore_eos", "no", "True or False"),
        ("stop", "end", "a list or tuple of non-empty strings"),
        ("stop", ["end", ""], "a list or tuple of non-empty strings"),
        ("stop", [1], "a list or tuple of non-empty strings"),
    ],
)
def test_sampling_params_refuse(field: str, value: object, expected: str) -> None:
    assert_refused(SamplingParams, field, value, expected)


def test_sampling_params_convert_only_what_loses_nothing() -> None:
    params = SamplingParams(
        temperature=1, stop_token_ids=[2, 5], stop=["\n"], seed=2**64 - 1, top_p=0.0
    )
    assert params.temperature == 1.0 and isinstance(params.temperature, float)
    assert params.stop_token_ids == (2, 5) and params.stop == ("\n",)
    assert params.seed == 2**64 - 1
    assert not params.is_greedy
    assert SamplingParams(temperature=-1.0).is_greedy


@pytest.mark.parametrize("options", [EngineOptions, SamplingParams])
def test_unknown_options_are_refused_with_those_that_exist(options: type) -> None:
    with pytest.raises(OptionError) as caught:
        options(drafts=3)
    message = str(caught.value)
    assert "'drafts'" in message and all(name in message for name in options.model_fields)


def test_a_tree_holds_the_main_chain() -> None:
    with pytest.raises(OptionError, match=r"draft_tree: expected at least 8 columns.*got 7"):
        EngineOptions(draft_tree=7)
    assert EngineOptions(draft_tree=7, draft_tokens=6).draft_tree == 7


def test_options_are_frozen_hashable_and_replaced_with_checks() -> None:
    options = EngineOptions()
    with pytest.raises(ValueError, match="frozen"):
        options.max_batch = 2
    assert hash(options) == hash(EngineOptions())
    assert options.replace(max_batch=2).max_batch == 2 and options.max_batch == 4
    with pytest.raises(OptionError, match=r"max_batch: expected an integer 1\.\.8, got 9"):
        options.replace(max_batch=9)


def test_options_survive_json() -> None:
    options = EngineOptions(proposal_head="head", draft_tree="auto", profile="a.json")
    assert EngineOptions.model_validate_json(options.model_dump_json()) == options
    params = SamplingParams(stop=["a"], stop_token_ids=[1], temperature=0.5)
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params
    with pytest.raises(OptionError, match="expected a mapping of options"):
        EngineOptions.model_validate([1])


@pytest.mark.parametrize(
    ("has_cuda", "given", "resolved"),
    [
        (True, {}, ("cuda", "bfloat16", "triton")),
        (False, {}, ("cpu", "float32", "inductor")),
        (True, {"device": "cpu"}, ("cpu", "float32", "inductor")),
        (False, {"device": "cuda"}, ("cuda", "bfloat16", "triton")),
        (False, {"lowering": "eager", "dtype": "bfloat16"}, ("cpu", "bfloat16", "eager")),
    ],
)
def test_resolved_fills_defaults_by_device(
    monkeypatch: pytest.MonkeyPatch,
    has_cuda: bool,
    given: dict[str, Any],
    resolved: tuple[str, str, str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    options = EngineOptions(**given)
    filled = options.resolved()
    assert (filled.device, filled.dtype, filled.lowering) == resolved
    assert options == EngineOptions(**given)
    assert filled.resolved() == filled


def test_triton_on_the_cpu_is_refused_with_what_exists() -> None:
    with pytest.raises(OptionError, match=r"lowering: expected 'eager' or 'inductor'.*'triton'"):
        EngineOptions(device="cpu", lowering="triton").resolved()


def assert_refused(options: type, field: str, value: object, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        options(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{options.__name__}.{field}: expected ")
    assert expected in message
    assert f"got {value!r}" in message
    assert "\n" not in message
