"""Weights: storages and views of uses, conversion, coverage, and random stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dflash_graph import weights as weights_module
from dflash_graph.checkpoint import Checkpoint, Layout, draft_layout, target_layout
from dflash_graph.errors import (
    GraphError,
    MissingTensorError,
    ShapeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from dflash_graph.geometry import read_draft_geometry, read_target_geometry
from dflash_graph.tensor import TensorSpec, WeightUse
from dflash_graph.weights import MAX_COPIED_BYTES, WeightStore, random_weights

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def use(*names: str, shape: tuple[int, ...], dtype: str = "float32") -> WeightUse:
    return WeightUse(tuple(f"target/{name}" for name in names), TensorSpec(shape, dtype))


def checkpoint(directory: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, directory / "model.safetensors")
    layout = Layout({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return Checkpoint.open(directory, layout)


def load(source: Checkpoint, *uses: WeightUse) -> WeightStore:
    return WeightStore.load({"target": source}, uses, "cpu")


@pytest.fixture
def qkv(tmp_path: Path, rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(rows, 4, generator=rng) for name, rows in (("q", 6), ("k", 2), ("v", 3))
    }


def test_one_part_without_conversion_is_the_mapped_file(
    tmp_path: Path, qkv: dict[str, torch.Tensor]
) -> None:
    source = checkpoint(tmp_path, qkv)
    uses = [use(name, shape=tuple(tensor.shape)) for name, tensor in qkv.items()]
    store = load(source, *uses)
    for name, one in zip(qkv, uses, strict=True):
        assert store[one].data_ptr() == source.tensor(name).data_ptr()
        assert torch.equal(store[one], qkv[name])
    assert store.nbytes == store.mapped_nbytes == 11 * 4 * 4
    assert len(store) == 3 and list(store) == uses and uses[0] in store


def test_runs_of_a_packed_use_are_views(tmp_path: Path, qkv: dict[str, torch.Tensor]) -> None:
    packed = use("q", "k", "v", shape=(11, 4))
    runs = {
        use("k", "v", shape=(5, 4)): slice(6, 11),
        use("q", "k", shape=(8, 4)): slice(0, 8),
        use("k", shape=(2, 4)): slice(6, 8),
        use("v", shape=(3, 2, 2)): slice(8, 11),
    }
    store = load(checkpoint(tmp_path, qkv), *runs, packed)
    assert torch.equal(store[packed], torch.cat(list(qkv.values())))
    for run, rows in runs.items():
        expected = store[packed][rows]
        assert store[run].data_ptr() == expected.data_ptr()
        assert torch.equal(store[run].flatten(), expected.flatten())
        assert store[run].shape == run.spec.bind({}) and store[run].is_contiguous()
    assert (store.nbytes, store.mapped_nbytes) == (11 * 4 * 4, 0)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conversion_rounds_each_value_once(
    tmp_path: Path, qkv: dict[str, torch.Tensor], stored: torch.dtype, dtype: str
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in qkv.items()}
    uses = [use("q", "k", shape=(8, 4), dtype=dtype), use("v", shape=(3, 4), dtype=dtype)]
    store = load(checkpoint(tmp_path, tensors), *uses)
    wanted = getattr(torch, dtype)
    assert torch.equal(store[uses[0]], torch.cat([tensors["q"], tensors["k"]]).to(wanted))
    assert torch.equal(store[uses[1]], tensors["v"].to(wanted))
    assert store.mapped_nbytes == (store[uses[1]].nbytes if stored == wanted else 0)


def test_parts_of_different_dtypes_are_packed(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([1.5, 2.5]), "b": torch.tensor([3.5], dtype=torch.bfloat16)}
    both = use("a", "b", shape=(3,))
    assert load(checkpoint(tmp_path, tensors), both)[both].tolist() == [1.5, 2.5, 3.5]


def test_large_tensors_are_copied_slice_by_slice(
    tmp_path: Path, qkv: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "_SLICE_ELEMENTS", 7)
    packed, alone = use("q", "k", shape=(8, 4)), use("v", shape=(3, 4))
    seen: list[tuple[int, int]] = []
    store = WeightStore.load(
        {"target": checkpoint(tmp_path, qkv)},
        [packed, alone],
        "cpu",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert torch.equal(store[packed], torch.cat([qkv["q"], qkv["k"]]))
    done = [bytes_done for bytes_done, _ in seen]
    assert len(seen) == 4 + 2 + 1 and done == sorted(set(done))
    assert {total for _, total in seen} == {store.nbytes} and done[-1] == store.nbytes


def test_axes_are_merged_and_split_but_never_transposed(
    tmp_path: Path, rng: torch.Generator
) -> None:
    tensors = {
        "conv1d.weight": torch.randn(6, 1, 4, generator=rng),
        "kernel": torch.randn(8, 3, generator=rng),
    }
    source = checkpoint(tmp_path, tensors)
    conv, kernel = use("conv1d.weight", shape=(6, 4)), use("kernel", shape=(2, 2, 2, 3))
    store = load(source, conv, kernel)
    assert torch.equal(store[conv], tensors["conv1d.weight"].squeeze(1))
    assert torch.equal(store[kernel], tensors["kernel"].view(2, 2, 2, 3))
    assert store.mapped_nbytes == store.nbytes
    for shape in ((3, 8), (6, 4), (5, 3)):
        with pytest.raises(TensorShapeError, match=r"target/kernel: expected .* of the graph"):
            load(source, conv, use("kernel", shape=shape))
    with pytest.raises(TensorShapeError, match=r"expected 9 rows .*got 8"):
        load(source, conv, use("kernel", shape=(9, 3)))


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    save_file({"embed_tokens.weight": torch.ones(5, 2)}, tmp_path / "model.safetensors")
    layout = Layout(
        {"embed_tokens.weight": (5, 2)}, aliases={"lm_head.weight": "embed_tokens.weight"}
    )
    head, embedding = (use(f"{name}.weight", shape=(5, 2)) for name in ("lm_head", "embed_tokens"))
    store = load(Checkpoint.open(tmp_path, layout), head, embedding)
    assert store[head].data_ptr() == store[embedding].data_ptr()
    assert store.nbytes == 5 * 2 * 4


def test_every_tensor_must_be_read(tmp_path: Path, qkv: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UnexpectedTensorError) as caught:
        load(checkpoint(tmp_path, qkv), use("q", shape=(6, 4)))
    assert "each of the 3 tensors, 2 are read by none: target/k, target/v" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "phrase"),
    [
        ("target/o", r"target/o: expected a tensor of .*it has 3, e\.g\. 'q'"),
        ("draft/q", r"draft/q: expected a role among \['target'\], got 'draft'"),
        ("q", r"weights: q: expected a role"),
    ],
)
def test_unknown_parts(
    tmp_path: Path, qkv: dict[str, torch.Tensor], part: str, phrase: str
) -> None:
    wrong = WeightUse((part,), TensorSpec((1,), "float32"))
    with pytest.raises(MissingTensorError, match=phrase):
        load(checkpoint(tmp_path, qkv), wrong)


@pytest.mark.parametrize("rows", [MAX_COPIED_BYTES // 4, MAX_COPIED_BYTES // 4 + 1])
@pytest.mark.parametrize("second", ["dtype", "packing"])
def test_only_small_tensors_may_stand_twice(tmp_path: Path, rows: int, second: str) -> None:
    tensors = {"a": torch.ones(1), "b": torch.ones(rows), "c": torch.ones(1)}
    uses = [use("a", "b", shape=(rows + 1,)), use("c", shape=(1,))]
    if second == "dtype":
        uses.insert(0, use("b", shape=(rows,), dtype="float64"))
        limit = MAX_COPIED_BYTES // 8
    else:
        uses.append(use("b", "c", shape=(rows + 1,)))
        limit = MAX_COPIED_BYTES // 4
    source = checkpoint(tmp_path, tensors)
    if rows > limit:
        with pytest.raises(GraphError, match=r"weight target/b: expected one storage") as caught:
            load(source, *uses)
        assert "target/a + target/b (float32)" in str(caught.value)
    else:
        store = load(source, *uses)
        assert all(torch.equal(store[one], torch.ones_like(store[one])) for one in uses)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec((6, 4), "int32"),
        TensorSpec(("slots", 4), "float32"),
        TensorSpec((), "float32"),
        TensorSpec((0, 4), "float32"),
    ],
)
def test_specs_that_are_no_weights(
    tmp_path: Path, qkv: dict[str, torch.Tensor], spec: TensorSpec
) -> None:
    uses = [use("k", shape=(2, 4)), use("v", shape=(3, 4)), WeightUse(("target/q",), spec)]
    with pytest.raises(ShapeError, match="weight target/q: expected parts, fixed axes"):
        load(checkpoint(tmp_path, qkv), *uses)
    with pytest.raises(ShapeError, match="weight target/q: expected parts, fixed axes"):
        random_weights(uses, 0, "cpu")


def test_a_use_that_was_not_loaded(tmp_path: Path, qkv: dict[str, torch.Tensor]) -> None:
    store = load(checkpoint(tmp_path, qkv), use("q", "k", "v", shape=(11, 4)))
    with pytest.raises(GraphError, match=r"target/k float32\[2, 4\]: expected one of the 1 uses"):
        store[use("k", shape=(2, 4))]


@given(data=st.data())
def test_any_runs_of_a_packed_use_equal_the_packed_rows(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    names = [f"p{index}" for index in range(len(rows))]
    tensors = {name: torch.rand(count, 2) for name, count in zip(names, rows, strict=True)}
    starts = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=4))
    runs = []
    for start in starts:
        end = data.draw(st.integers(start + 1, len(rows)))
        runs.append((use(*names[start:end], shape=(sum(rows[start:end]), 2)), start, end))
    packed = use(*names, shape=(sum(rows), 2))
    source = checkpoint(tmp_path_factory.mktemp("runs"), tensors)
    store = load(source, *(run for run, _, _ in runs), packed)
    for run, start, end in runs:
        assert torch.equal(store[run], torch.cat([tensors[name] for name in names[start:end]]))
    assert store.nbytes == sum(rows) * 2 * 4


@pytest.mark.parametrize("case", ["target_dense_2x", "target_moe"])
def test_golden_targets_load_whole_without_a_copy(case: str) -> None:
    source = Checkpoint.open(GOLDEN / case, target_layout(read_target_geometry(GOLDEN / case)))
    uses = [use(name, shape=shape) for name, shape in source.shapes.items()]
    store = load(source, *uses)
    assert store.mapped_nbytes == store.nbytes == sum(store[one].nbytes for one in uses)


def test_target_and_draft_load_into_one_store() -> None:
    target, draft = GOLDEN / "target_dense_2x", GOLDEN / "dflash2_g16"
    checkpoints = {
        "target": Checkpoint.open(target, target_layout(read_target_geometry(target))),
        "draft": Checkpoint.open(draft, draft_layout(read_draft_geometry(draft))),
    }
    uses = {
        (role, name): WeightUse((f"{role}/{name}",), TensorSpec(shape, "bfloat16"))
        for role, source in checkpoints.items()
        for name, shape in source.shapes.items()
    }
    store = WeightStore.load(checkpoints, uses.values(), "cpu")
    for (role, name), one in uses.items():
        assert torch.equal(store[one], checkpoints[role].tensor(name).to(torch.bfloat16))


def test_random_weights_have_the_scale_of_their_role(rng: torch.Generator) -> None:
    seed = int(torch.randint(2**31, (), generator=rng))
    shapes = {
        "target/layers.0.mlp.gate_proj.weight": (512, 64),
        "target/layers.0.input_layernorm.weight": (64,),
        "target/layers.0.linear_attn.norm.weight": (16,),
        "target/layers.0.linear_attn.A_log": (8,),
        "target/layers.0.linear_attn.dt_bias": (8,),
        "draft/layers.0.self_attn.q_norm.weight": (64,),
        "draft/layers.0.mlp_conv.base_kernel": (2, 2, 64),
    }
    uses = {
        name: WeightUse((name,), TensorSpec(shape, "float32")) for name, shape in shapes.items()
    }
    store = random_weights(uses.values(), seed, "cpu")
    matrix, norm, gdn_norm, a_log, dt_bias, draft_norm, kernel = (store[uses[n]] for n in uses)
    assert 0.015 < matrix.std() < 0.025 and matrix.mean().abs() < 0.005
    assert not norm.any()
    assert (gdn_norm == 1).all() and (draft_norm == 1).all() and (dt_bias == 1).all()
    assert (a_log >= 0).all() and (a_log <= 2.7726).all()
    assert (kernel[:, 0] == 1).all() and not kernel[:, 1].any()

    again = random_weights(uses.values(), seed, "cpu")
    other = random_weights(uses.values(), seed + 1, "cpu")
    assert torch.equal(again[next(iter(uses.values()))], matrix)
    assert not torch.equal(other[next(iter(uses.values()))], matrix)


def test_random_weights_share_storage_as_loaded_ones_do() -> None:
    packed, tail, middle = (
        use("q", "k", "v", shape=(11, 4), dtype="bfloat16"),
        use("k", "v", shape=(5, 4), dtype="bfloat16"),
        use("k", shape=(2, 4), dtype="bfloat16"),
    )
    value = use("v", shape=(3, 4), dtype="bfloat16")
    store = random_weights([middle, tail, packed, value], 0, "cpu")
    assert store[tail].data_ptr() == store[packed][6:].data_ptr()
    assert store[middle].data_ptr() == store[packed][6:].data_ptr()
    assert store[value].data_ptr() == store[packed][8:].data_ptr()
    assert (store.nbytes, store.mapped_nbytes) == (11 * 4 * 2, 0)


def test_random_weights_refuse_a_run_whose_place_is_unknown() -> None:
    packed = use("a", "b", "c", "d", shape=(8,))
    with pytest.raises(GraphError, match="its offset is unknown"):
        random_weights([packed, use("b", "c", shape=(4,))], 0, "cpu")
    with pytest.raises(GraphError, match="expected a run inside the 8 elements"):
        random_weights([packed, use("a", shape=(9,))], 0, "cpu")
