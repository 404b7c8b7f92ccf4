"""Makes the models of the C library's tests: `python make.py`. It needs the package onnx (1.23 made the files)."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: dict[str, np.ndarray] | None = None,
    domains: tuple[str, ...] = (),
) -> None:
    """Writes a model beside this file."""
    initializers = [numpy_helper.from_array(v, k) for k, v in (weights or {}).items()]
    graph = helper.make_graph(nodes, name, inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 21), *(helper.make_opsetid(d, 1) for d in domains)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="halcyon tests")
    onnx.save(model, Path(__file__).with_name(f"{name}.onnx"))


def tensor(name: str, dtype: int, shape: list[int | str] | None) -> onnx.ValueInfoProto:
    """A port that holds a tensor."""
    return helper.make_tensor_value_info(name, dtype, shape)


def main() -> None:
    """Makes all models."""
    text, f32, i64 = TensorProto.STRING, TensorProto.FLOAT, TensorProto.INT64
    # Text in, text out.
    save(
        "text",
        [helper.make_node("StringConcat", ["a", "b"], ["joined"])],
        [tensor("a", text, ["n"]), tensor("b", text, ["n"])],
        [tensor("joined", text, ["n"])],
    )
    # Two inputs of the same size.
    save(
        "pair",
        [helper.make_node("Add", ["x", "y"], ["sum"])],
        [tensor("x", f32, ["n"]), tensor("y", f32, ["n"])],
        [tensor("sum", f32, ["n"])],
    )
    # Values of kinds that the C library cannot pass.
    sequence = helper.make_tensor_sequence_value_info("both", f32, None)
    save(
        "sequence",
        [helper.make_node("SequenceConstruct", ["x", "x"], ["both"])],
        [tensor("x", f32, [2])],
        [sequence],
    )
    # An index that may be out of range.
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    save(
        "rows",
        [helper.make_node("Gather", ["table", "ids"], ["rows"])],
        [tensor("ids", i64, ["n"])],
        [tensor("rows", f32, ["n", 3])],
        {"table": table},
    )
    # An operator that does not exist.
    save(
        "unknown",
        [helper.make_node("Frobnicate", ["x"], ["y"], domain="example")],
        [tensor("x", f32, [2])],
        [tensor("y", f32, [2])],
        domains=("example",),
    )
    # Sizes that only a run computes, and an input whose rank is open.
    save(
        "nonzero",
        [helper.make_node("NonZero", ["x"], ["at"]), helper.make_node("Transpose", ["at"], ["rows"])],
        [tensor("x", f32, None)],
        [tensor("rows", i64, ["n", "rank"])],
    )
    # Outputs without a type, which depends on a value, an open rank, and a size that only a run computes.
    save(
        "untyped",
        [
            helper.make_node("Reshape", ["x", "s"], ["y"]),
            helper.make_node("NonZero", ["y"], ["at"]),
            helper.make_node("Identity", ["s"], ["size"]),
        ],
        [tensor("x", f32, None), tensor("s", i64, [2])],
        [*map(helper.make_empty_tensor_value_info, ["y", "at"]), tensor("size", i64, [2])],
    )
    # Outputs that are constants, whose bytes lie anywhere in the model.
    odd = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    save(
        "constants",
        [helper.make_node("Identity", ["c"], ["copy"]), helper.make_node("Identity", ["x"], ["same"])],
        [tensor("x", TensorProto.BOOL, ["n"])],
        [tensor("copy", f32, [3]), tensor("same", TensorProto.BOOL, ["n"])],
        {"c": odd},
    )


if __name__ == "__main__":
    main()
