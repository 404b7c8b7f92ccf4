"""Makes the models of the tests: ``python make.py [FOLDER]``. It needs the packages onnx and numpy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

F = TensorProto.FLOAT
MAKERS: dict[str, Callable[[], ModelProto]] = {}
tensor = helper.make_tensor_value_info
node = helper.make_node


def maker(f: Callable[[], ModelProto]) -> Callable[[], ModelProto]:
    MAKERS[f.__name__] = f
    return f


def array(name: str, values: object, dtype: str = "float32") -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def weights(name: str, *shape: int, seed: int = 0) -> TensorProto:
    return array(name, np.random.default_rng(seed).standard_normal(shape) * 0.5)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[object],
    outputs: Sequence[object],
    stored: Sequence[TensorProto] = (),
    opset: int = 21,
    **facts: object,
) -> ModelProto:
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), list(stored))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="tests")
    for key, value in facts.items():
        setattr(made, key, value)
    return made


@maker
def add() -> ModelProto:
    """An overridable initializer, and a description."""
    made = model(
        [node("Add", ["x", "w"], ["y"])],
        [tensor("x", F, ["N", 3]), tensor("w", F, [3])],
        [tensor("y", F, ["N", 3])],
        [array("w", [1, 2, 3])],
        doc_string="adds a row",
        domain="tests.halcyon",
        model_version=7,
    )
    made.graph.doc_string = "one addition"
    helper.set_model_props(made, {"author": "nobody", "labels": "a,b"})
    return made


@maker
def mlp() -> ModelProto:
    """A classifier of rows, with a second output that not every caller needs."""
    return model(
        [
            node("Gemm", ["x", "w1", "b1"], ["h"], name="first"),
            node("Relu", ["h"], ["r"], name="relu"),
            node("Gemm", ["r", "w2", "b2"], ["logits"], name="second"),
            node("Softmax", ["logits"], ["probabilities"], axis=-1, name="softmax"),
        ],
        [tensor("x", F, ["batch", 16])],
        [tensor("probabilities", F, ["batch", 4]), tensor("logits", F, ["batch", 4])],
        [
            weights("w1", 16, 32, seed=1),
            weights("b1", 32, seed=2),
            weights("w2", 32, 4, seed=3),
            weights("b2", 4, seed=4),
        ],
    )


@maker
def conv() -> ModelProto:
    """Images of any size."""
    return model(
        [
            node("Conv", ["image", "w"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
            node("Relu", ["c"], ["features"]),
            node("GlobalAveragePool", ["features"], ["pooled"]),
        ],
        [tensor("image", F, ["n", 3, "height", "width"])],
        [tensor("features", F, ["n", 8, None, None]), tensor("pooled", F, ["n", 8, 1, 1])],
        [weights("w", 8, 3, 3, 3, seed=5)],
    )


@maker
def strings() -> ModelProto:
    """Normalises words, joins them, and looks them up."""
    s = TensorProto.STRING
    return model(
        [
            node("StringNormalizer", ["words"], ["lower"], case_change_action="LOWER", locale="C"),
            node("StringConcat", ["lower", "suffix"], ["joined"]),
            node(
                "LabelEncoder",
                ["lower"],
                ["ids"],
                domain="ai.onnx.ml",
                keys_strings=["cat", "dog", "straße"],
                values_int64s=[1, 2, 3],
                default_int64=-1,
            ),
        ],
        [tensor("words", s, [None]), tensor("suffix", s, [1])],
        [tensor("joined", s, [None]), tensor("ids", TensorProto.INT64, [None])],
    )


@maker
def classifier() -> ModelProto:
    """What converters write for scikit-learn: labels, and a dict of probabilities for each row."""
    ml = "ai.onnx.ml"
    floats = helper.make_tensor_type_proto(F, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, floats))
    names = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.STRING, floats))
    coefficients = np.random.default_rng(6).standard_normal(12).astype("float32").tolist()
    return model(
        [
            node(
                "LinearClassifier",
                ["x"],
                ["label", "scores"],
                domain=ml,
                coefficients=coefficients,
                intercepts=[0.1, -0.2, 0.3],
                classlabels_ints=[0, 1, 2],
                multi_class=1,
                post_transform="SOFTMAX",
            ),
            node("ZipMap", ["scores"], ["by_number"], domain=ml, classlabels_int64s=[0, 1, 2]),
            node("ZipMap", ["scores"], ["by_name"], domain=ml, classlabels_strings=["a", "b", "c"]),
        ],
        [tensor("x", F, [None, 4])],
        [
            tensor("label", TensorProto.INT64, [None]),
            helper.make_value_info("by_number", maps),
            helper.make_value_info("by_name", names),
        ],
    )


@maker
def dictionary() -> ModelProto:
    """Takes a dict."""
    floats = helper.make_tensor_type_proto(F, [])
    return model(
        [node("DictVectorizer", ["x"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b", "c"])],
        [helper.make_value_info("x", helper.make_map_type_proto(TensorProto.STRING, floats))],
        [tensor("y", F, None)],
    )


@maker
def split() -> ModelProto:
    """A list of rows, and the sum of a list."""
    rows = helper.make_tensor_sequence_value_info("rows", F, None)
    parts = helper.make_tensor_sequence_value_info("parts", F, None)
    return model(
        [
            node("SplitToSequence", ["x"], ["rows"], axis=0),
            node("ConcatFromSequence", ["parts"], ["all"], axis=0),
            node("ReduceSum", ["all"], ["total"], keepdims=0),
        ],
        [tensor("x", F, ["N", 3]), parts],
        [rows, tensor("total", F, [])],
    )


@maker
def optional() -> ModelProto:
    """Takes a tensor or nothing."""
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(F, [2]))
    return model(
        [node("OptionalHasElement", ["x"], ["has"])],
        [helper.make_value_info("x", kind)],
        [tensor("has", TensorProto.BOOL, [])],
    )


@maker
def quantised() -> ModelProto:
    """A product of bytes, as quantisers write it.

    The weights have 7 bits: without VNNI, onnxruntime adds two products of bytes in 16 bits, which saturates
    for larger ones.
    """
    rng = np.random.default_rng(7)
    return model(
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            node("MatMulInteger", ["q", "w", "zero", "wz"], ["i"]),
            node("Cast", ["i"], ["f"], to=F),
            node("Mul", ["scale", "ws"], ["s"]),
            node("Mul", ["f", "s"], ["scaled"]),
            node("Add", ["scaled", "b"], ["y"]),
        ],
        [tensor("x", F, ["N", 8])],
        [tensor("y", F, ["N", 5])],
        [
            array("w", rng.integers(-64, 64, (8, 5)), "int8"),
            array("wz", 0, "int8"),
            array("ws", 0.01),
            weights("b", 5, seed=8),
        ],
    )


def counting(name: str, condition: str) -> NodeProto:
    """A loop that doubles `x` while the sum is below a limit, or for ever."""
    body = helper.make_graph(
        [
            node("Add", ["v", "one"], ["next"]),
            node(
                "Identity" if condition == "for ever" else "Less",
                ["go"] if condition == "for ever" else ["next", "limit"],
                ["again"],
            ),
        ],
        "body",
        [tensor("i", TensorProto.INT64, []), tensor("go", TensorProto.BOOL, []), tensor("v", F, [])],
        [tensor("again", TensorProto.BOOL, []), tensor("next", F, [])],
    )
    return node("Loop", ["", "start", "x"], ["y"], body=body, name=name)


@maker
def count() -> ModelProto:
    """Counts to a limit."""
    return model(
        [counting("count", "limit")],
        [tensor("x", F, []), tensor("limit", F, [])],
        [tensor("y", F, [])],
        [array("one", 1), array("start", True, "bool")],
    )


@maker
def endless() -> ModelProto:
    """Never ends."""
    return model(
        [counting("endless", "for ever")],
        [tensor("x", F, [])],
        [tensor("y", F, [])],
        [array("one", 1), array("start", True, "bool")],
    )


@maker
def long() -> ModelProto:
    """A graph without loops that takes long: products of large matrices."""
    nodes = [node("MatMul", [f"x{i}", "x0"], [f"p{i}"]) for i in range(120)]
    nodes += [node("Tanh", [f"p{i}"], [f"x{i + 1}"]) for i in range(120)]
    return model(nodes, [tensor("x0", F, ["n", "n"])], [tensor("x120", F, ["n", "n"])])


@maker
def casts() -> ModelProto:
    """One output for each element type that NumPy lacks, and some that it has."""
    types = [
        "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "INT4", "UINT4",
        "FLOAT16", "DOUBLE", "BOOL", "UINT8", "INT64",
    ]  # fmt: skip
    numbers = [(t.lower(), getattr(TensorProto, t)) for t in types]
    return model(
        [node("Cast", ["x"], [n], to=t) for n, t in numbers],
        [tensor("x", F, ["N"])],
        [tensor(n, t, ["N"]) for n, t in numbers],
    )


@maker
def uncasts() -> ModelProto:
    """One input for each element type that NumPy lacks."""
    types = ["BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4"]
    numbers = [(t.lower(), getattr(TensorProto, t)) for t in types]
    return model(
        [node("Cast", [n], [f"{n}_out"], to=F) for n, _ in numbers],
        [tensor(n, t, ["N"]) for n, t in numbers],
        [tensor(f"{n}_out", F, ["N"]) for n, _ in numbers],
    )


@maker
def branches() -> ModelProto:
    """Two outputs that need different inputs of the graph, one of them expensive."""
    return model(
        [node("Relu", ["x"], ["cheap"]), node("ConstantOfShape", ["size"], ["costly"])],
        [tensor("x", F, ["N"]), tensor("size", TensorProto.INT64, [1])],
        [tensor("cheap", F, ["N"]), tensor("costly", F, [None])],
    )


@maker
def unranked() -> ModelProto:
    """Sizes that are open in every way."""
    return model(
        [node("Relu", ["x"], ["y"]), node("Neg", ["z"], ["w"])],
        [tensor("x", F, None), tensor("z", F, [None, 2, "a"])],
        [tensor("y", F, None), tensor("w", F, [None, 2, "a"])],
    )


@maker
def random() -> ModelProto:
    """Random numbers without a seed."""
    return model(
        [node("RandomUniformLike", ["x"], ["y"]), node("RandomNormalLike", ["x"], ["z"])],
        [tensor("x", F, ["N"])],
        [tensor("y", F, ["N"]), tensor("z", F, ["N"])],
    )


@maker
def denoted() -> ModelProto:
    """A dimension with a denotation."""
    made = model([node("Relu", ["x"], ["y"])], [tensor("x", F, ["a", 3])], [tensor("y", F, ["a", 3])])
    made.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    return made


@maker
def external() -> ModelProto:
    """A weight in another file, whose contents are 1, 2, 3."""
    w = array("w", [1, 2, 3])
    set_external_data(w, location="external.bin", offset=0, length=12)
    w.ClearField("raw_data")
    w.data_location = TensorProto.EXTERNAL
    return model(
        [node("Add", ["x", "w"], ["y"])],
        [tensor("x", F, [3])],
        [tensor("y", F, [3])],
        [w],
    )


@maker
def untyped() -> ModelProto:
    """Outputs of which the file declares no type, no sizes, no names of sizes, or other names."""
    return model(
        [
            node("MatMul", ["x", "w"], ["product"]),
            node("Relu", ["product"], ["positive"]),
            node("Neg", ["product"], ["negative"]),
            node("Abs", ["product"], ["magnitude"]),
            node("Shape", ["x"], ["sizes"]),
        ],
        [tensor("x", F, ["N", 3])],
        [
            helper.make_empty_tensor_value_info("product"),
            tensor("positive", F, None),
            tensor("negative", F, [None, None]),
            tensor("magnitude", F, ["rows", "columns"]),
            helper.make_empty_tensor_value_info("sizes"),
        ],
        [weights("w", 3, 4, seed=5)],
    )


@maker
def integers() -> ModelProto:
    """Inputs of integer types, which are the outputs."""
    types = {"u8": TensorProto.UINT8, "i32": TensorProto.INT32, "u64": TensorProto.UINT64}
    return model(
        [node("Identity", [name], [f"{name}_out"]) for name in types],
        [tensor(name, t, None) for name, t in types.items()],
        [tensor(f"{name}_out", t, None) for name, t in types.items()],
    )


@maker
def stored() -> ModelProto:
    """Stored values of types that NumPy lacks, times the input."""
    types = {"bf16": TensorProto.BFLOAT16, "i4": TensorProto.INT4}
    nodes = [node("Cast", [name], [f"{name}_f32"], to=F) for name in types]
    nodes += [node("Mul", [f"{name}_f32", "x"], [f"{name}_out"]) for name in types]
    values = [helper.make_tensor(name, t, [2], [5, 6]) for name, t in types.items()]
    return model(nodes, [tensor("x", F, [])], [tensor(f"{name}_out", F, [2]) for name in types], values)


@maker
def one_name() -> ModelProto:
    """Two inputs whose sizes have one name, although nothing makes them equal."""
    return model(
        [node("Concat", ["a", "b"], ["c"], axis=0)],
        [tensor("a", F, ["N"]), tensor("b", F, ["N"])],
        [tensor("c", F, ["M"])],
    )


@maker
def unknown_operator() -> ModelProto:
    return model([node("Nothing", ["x"], ["y"])], [tensor("x", F, [1])], [tensor("y", F, [1])])


@maker
def dangling() -> ModelProto:
    return model([node("Add", ["x", "nowhere"], ["y"])], [tensor("x", F, [1])], [tensor("y", F, [1])])


@maker
def wrong_types() -> ModelProto:
    return model(
        [node("Add", ["x", "i"], ["y"])],
        [tensor("x", F, [1]), tensor("i", TensorProto.INT64, [1])],
        [tensor("y", F, [1])],
    )


def main(folder: Path) -> None:
    for name, make in MAKERS.items():
        (folder / f"{name}.onnx").write_bytes(make().SerializeToString(deterministic=True))
    (folder / "external.bin").write_bytes(np.array([1, 2, 3], "float32").tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
