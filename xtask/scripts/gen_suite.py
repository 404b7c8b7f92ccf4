#!/usr/bin/env python3
"""Writes the ONNX backend test suite as folders of files.

Needs numpy, onnx, pillow.   Usage: gen_suite.py OUT
Writes OUT/{node,simple,pytorch-operator,pytorch-converted}/CASE/{model.onnx, tolerance.json, test_data_set_K/{input,output}_N.pb}.

The node cases are Python functions of the onnx package, whose results this program stores. The other cases are files of the package.
"""
import json
import pathlib
import shutil
import sys

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test import loader
from onnx.backend.test.case import node

# Kind of a graph's input or output -> the function that turns its value into a message.
STORES = {
    "sequence_type": numpy_helper.from_list,
    "optional_type": numpy_helper.from_optional,
    "map_type": numpy_helper.from_dict,
}


def store(value, info, path):
    if not isinstance(value, onnx.TensorProto):
        value = STORES.get(info.type.WhichOneof("value"), numpy_helper.from_array)(value, info.name)
    path.write_bytes(value.SerializeToString())


def main(out):
    for kind in ("simple", "pytorch-operator", "pytorch-converted"):
        shutil.copytree(pathlib.Path(loader.DATA_DIR) / kind, out / kind, dirs_exist_ok=True)
    shutil.rmtree(out / "node", ignore_errors=True)
    with np.errstate(all="ignore"):  # the generators overflow and divide by zero on purpose
        cases = [c for c in node.collect_testcases(None) if c.model is not None and c.data_sets]
    for case in cases:
        folder = out / "node" / case.name
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(case.model.SerializeToString())
        (folder / "tolerance.json").write_text(json.dumps({"rtol": case.rtol, "atol": case.atol}))
        graph = case.model.graph
        for k, (inputs, outputs) in enumerate(case.data_sets):
            data = folder / f"test_data_set_{k}"
            data.mkdir()
            for name, values, infos in (("input", inputs, graph.input), ("output", outputs, graph.output)):
                for i, (value, info) in enumerate(zip(values, infos)):
                    store(value, info, data / f"{name}_{i}.pb")
    for kind in sorted(p for p in out.iterdir() if p.is_dir()):
        print(kind.name, sum(1 for _ in kind.iterdir()), "cases")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
