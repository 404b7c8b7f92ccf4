#!/usr/bin/env python3
"""Conformance cases of `ai.onnx.ml` and of strings: random models of one operator each, with onnxruntime's results.

Needs numpy, onnx, onnxruntime.   Usage: gen_ml_cases.py OUT
Writes OUT/CASE/{model.onnx, tolerance.json, test_data_set_0/{input,output}_N.pb}, as in the ONNX backend test suite.

Cases in which onnxruntime violates the specification are left out. onnxruntime
- skips LOGISTIC, SOFTMAX and SOFTMAX_ZERO if there is one score,
- uses the labels 0 and 1 for two classes that both get votes,
- leaves results unwritten (PROBIT of one score for two classes),
- drops the score if there are two base values but votes for the second class only,
- exchanges SOFTMAX and LOGISTIC in TreeEnsemble,
- never finds NaN in LabelEncoder 2,
- splits an empty string into no parts,
- ignores classes without votes whose score of 0 is the best.
"""
import json
import pathlib
import shutil
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

SEED = 3
ML = "ai.onnx.ml"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
# onnxruntime subtracts nearly equal numbers in its PROBIT, which loses digits.
LOOSE = {"rtol": 2e-3, "atol": 2e-3}
POSTS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]
onnxruntime.set_default_logger_severity(4)


class Cases:
    def __init__(self, out):
        self.out, self.rng, self.names = out, np.random.default_rng(SEED), set()

    def case(self, name, op, inputs, outputs, domain=ML, ml=3, opset=21, tolerance=TOLERANCE, initializers=(), **attributes):
        """Writes a case with one node on `inputs` (arrays). `outputs` are element types, or full types of
        sequences. `initializers` names inputs that are stored in the model."""
        assert name not in self.names, name
        self.names.add(name)
        names = [f"x{i}" for i in range(len(inputs))]
        node = helper.make_node(op, names, [f"y{i}" for i in range(len(outputs))], "the_node", domain=domain, **attributes)
        infos = [helper.make_tensor_value_info(n, kind(x), x.shape) for n, x in zip(names, inputs)]
        results = [
            helper.make_tensor_value_info(f"y{i}", t, None) if isinstance(t, int) else helper.make_value_info(f"y{i}", t)
            for i, t in enumerate(outputs)
        ]
        stored = [tensor(x, n) for n, x in zip(names, inputs) if n in initializers]
        graph = helper.make_graph([node], name, [i for i in infos if i.name not in initializers], results, stored)
        sets = [helper.make_opsetid("", opset), helper.make_opsetid(ML, ml)]
        model = helper.make_model(graph, opset_imports=sets, ir_version=10)
        data = model.SerializeToString()
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        fed = [(n, x) for n, x in zip(names, inputs) if n not in initializers]
        got = session.run(None, dict(fed))
        folder = self.out / name
        (folder / "test_data_set_0").mkdir(parents=True)
        (folder / "model.onnx").write_bytes(data)
        (folder / "tolerance.json").write_text(json.dumps(tolerance))
        for side, values in (("input", [x for _, x in fed]), ("output", got)):
            for i, value in enumerate(values):
                value = sequence(value) if isinstance(value, list) and isinstance(value[0], dict) else tensor(value)
                (folder / "test_data_set_0" / f"{side}_{i}.pb").write_bytes(value.SerializeToString())

    def matrix(self, n, f, dtype=np.float32):
        if np.issubdtype(dtype, np.integer):
            return self.rng.integers(-4, 5, (n, f)).astype(dtype)
        return self.rng.standard_normal((n, f)).astype(dtype)


def kind(x):
    return TensorProto.STRING if x.dtype.kind in "OU" else helper.np_dtype_to_tensor_dtype(x.dtype)


def tensor(x, name=""):
    x = np.asarray(x)
    if x.dtype.kind in "OU":
        return helper.make_tensor(name, TensorProto.STRING, x.shape, [str(s).encode() for s in x.ravel()])
    return numpy_helper.from_array(x, name)


def sequence(maps):
    out = onnx.SequenceProto(elem_type=onnx.SequenceProto.MAP)
    for m in maps:
        values = tensor(np.array(list(m.values()), np.float32))
        item = out.map_values.add()
        if isinstance(next(iter(m)), str):
            item.key_type = TensorProto.STRING
            item.string_keys.extend(k.encode() for k in m)
        else:
            item.key_type = TensorProto.INT64
            item.keys.extend(m)
        item.values.elem_type = onnx.SequenceProto.TENSOR
        item.values.tensor_values.append(values)
    return out


def strings(*v):
    return np.array(v, dtype=object)


# Features.


def features(c):
    for dtype in (np.float32, np.float64, np.int64, np.int32):
        x, name = c.matrix(5, 3, dtype), np.dtype(dtype).name
        v = [float(v) for v in c.rng.standard_normal(3)]
        c.case(f"scaler_{name}", "Scaler", [x], [TensorProto.FLOAT], ml=1, offset=v, scale=v[::-1])
        for norm in ("MAX", "L1", "L2"):
            y = np.abs(x) + 1 if norm == "MAX" else x
            c.case(f"normalizer_{norm}_{name}", "Normalizer", [y], [TensorProto.FLOAT], ml=1, norm=norm)
        index = c.rng.integers(0, 3, 4)
        c.case(f"array_feature_extractor_{name}", "ArrayFeatureExtractor", [x, index], [kind(x)], ml=1)
        if dtype in (np.float32, np.int64):
            fill = {"imputed_value_floats": v, "replaced_value_float": 0.0} if dtype == np.float32 else {}
            fill = fill or {"imputed_value_int64s": [7, 8, 9], "replaced_value_int64": 0}
            x[1, 1] = x[4, 0] = 0
            c.case(f"imputer_{name}", "Imputer", [x], [kind(x)], ml=1, **fill)
            one = {k: [w[0]] if isinstance(w, list) else w for k, w in fill.items()}
            c.case(f"imputer_one_{name}", "Imputer", [x], [kind(x)], ml=1, **one)
    c.case("scaler_one", "Scaler", [c.matrix(4, 2)], [TensorProto.FLOAT], ml=1, offset=[1.5], scale=[-0.5])
    c.case("scaler_vector", "Scaler", [c.matrix(1, 3)[0]], [TensorProto.FLOAT], ml=1, offset=[1.0, 2, 3], scale=[2.0, 3, 4])
    x = c.matrix(5, 4)
    x[2] = 0
    x[3, 1] = np.nan
    for norm in ("L1", "L2"):
        c.case(f"normalizer_{norm}_zero_row", "Normalizer", [x[:3]], [TensorProto.FLOAT], ml=1, norm=norm)
    c.case("normalizer_vector", "Normalizer", [x[0]], [TensorProto.FLOAT], ml=1, norm="L2")
    c.case("binarizer", "Binarizer", [x[:3]], [TensorProto.FLOAT], ml=1, threshold=0.25)
    c.case("binarizer_default", "Binarizer", [x[:3]], [TensorProto.FLOAT], ml=1)
    nan = {"imputed_value_floats": [1.0, 2, 3, 4], "replaced_value_float": float("nan")}
    c.case("imputer_nan", "Imputer", [x], [TensorProto.FLOAT], ml=1, **nan)
    c.case("array_feature_extractor_vector", "ArrayFeatureExtractor", [x[0], np.array([3, 0, 3])], [TensorProto.FLOAT], ml=1)
    c.case("array_feature_extractor_matrix_index", "ArrayFeatureExtractor", [x, np.array([[1, 2]])], [TensorProto.FLOAT], ml=1)
    deep = c.rng.standard_normal((2, 3, 4)).astype(np.float32)
    c.case("array_feature_extractor_deep", "ArrayFeatureExtractor", [deep, np.array([2, 2, 1])], [TensorProto.FLOAT], ml=1)
    words = np.array([["a", "b", "c"], ["d", "e", "é"]], dtype=object)
    c.case("array_feature_extractor_strings", "ArrayFeatureExtractor", [words, np.array([2, 0])], [TensorProto.STRING], ml=1)
    parts = [c.matrix(3, 2), c.matrix(3, 3), c.matrix(3, 1)]
    c.case("feature_vectorizer", "FeatureVectorizer", parts, [TensorProto.FLOAT], ml=1, inputdimensions=[2, 3, 1])
    c.case("feature_vectorizer_cut_and_fill", "FeatureVectorizer", parts, [TensorProto.FLOAT], ml=1, inputdimensions=[1, 4, 1])
    whole = [c.matrix(3, 2, np.int64), c.matrix(3, 3, np.int64)]
    c.case("feature_vectorizer_int64", "FeatureVectorizer", whole, [TensorProto.FLOAT], ml=1, inputdimensions=[2, 3])
    for dtype in (np.int64, np.float32, np.float64):
        x = c.rng.integers(0, 6, (2, 3)).astype(dtype)
        c.case(f"one_hot_encoder_{x.dtype}", "OneHotEncoder", [x], [TensorProto.FLOAT], ml=1, cats_int64s=[5, 1, 3, 0])
    c.case("one_hot_encoder_vector", "OneHotEncoder", [np.array([1, 3, 1])], [TensorProto.FLOAT], ml=1, cats_int64s=[3, 1], zeros=0)
    x = strings("a", "é", "z", "")
    c.case("one_hot_encoder_strings", "OneHotEncoder", [x], [TensorProto.FLOAT], ml=1, cats_strings=["é", "a", "b"])


# Labels.


def labels(c):
    columns = {
        "int64": ([3, -1, 7, 2**40], np.array([[7, 3, 5], [-1, 2**40, 0]])),
        "float": ([0.5, -2.0, float("nan"), float("inf")], np.array([[0.5, np.nan, 1], [np.inf, -2, 0]], np.float32)),
        "string": (["a", "", "é", "long key"], np.array([["é", "a", "b"], ["", "long key", "long"]], dtype=object)),
    }
    name = {"int64": "int64s", "float": "floats", "string": "strings"}
    default = {"int64": 99, "float": -7.5, "string": "none"}
    code = {"int64": TensorProto.INT64, "float": TensorProto.FLOAT, "string": TensorProto.STRING}
    for k, (keys, full) in columns.items():
        for v, (values, _) in columns.items():
            values = values[::-1]
            for ml in (2, 4):
                if ml == 2 and k == v:
                    continue
                # In version 2, onnxruntime does not find NaN.
                x = np.where(np.isnan(full), np.float32(2), full) if k == "float" and ml == 2 else full
                given = {f"keys_{name[k]}": keys, f"values_{name[v]}": values}
                c.case(f"label_encoder_{ml}_{k}_{v}", "LabelEncoder", [x], [code[v]], ml=ml, **given)
                given[f"default_{v}"] = default[v]
                c.case(f"label_encoder_{ml}_{k}_{v}_default", "LabelEncoder", [x], [code[v]], ml=ml, **given)
    many = c.rng.permutation(1000)[:300]
    x = c.rng.integers(-5, 1005, (20, 30))
    given = dict(keys_int64s=many.tolist(), values_floats=c.rng.standard_normal(300).tolist())
    c.case("label_encoder_many", "LabelEncoder", [x], [TensorProto.FLOAT], ml=2, **given)
    c.case("label_encoder_one", "LabelEncoder", [x], [TensorProto.INT64], ml=2, keys_int64s=[7], values_int64s=[1])
    for k, v in ((np.float64, np.float64), (np.float64, np.int64), (np.int64, np.float64)):
        keys, values = np.array([4, 2, 9], k), np.array([10, 20, 30], v)
        given = {n: tensor(t, n) for n, t in (("keys_tensor", keys), ("values_tensor", values))}
        given["default_tensor"] = tensor(np.array([5], v), "default_tensor")
        x = np.array([2, 9, 1, 4], k)
        c.case(f"label_encoder_tensor_{keys.dtype}_{values.dtype}", "LabelEncoder", [x], [kind(values)], ml=4, **given)
    words = strings("b", "a", "zz", "")
    c.case("label_encoder_1_string_int64", "LabelEncoder", [words], [TensorProto.INT64], ml=1, classes_strings=["a", "b", "c"])
    x = np.array([2, 0, 5, -1])
    c.case("label_encoder_1_int64_string", "LabelEncoder", [x], [TensorProto.STRING], ml=1, classes_strings=["a", "b", "c"])
    cats = {"cats_strings": ["a", "b", ""], "cats_int64s": [5, 2, 9]}
    c.case("category_mapper_string_int64", "CategoryMapper", [words], [TensorProto.INT64], ml=1, default_int64=-3, **cats)
    x = np.array([[9, 2], [1, 5]])
    c.case("category_mapper_int64_string", "CategoryMapper", [x], [TensorProto.STRING], ml=1, default_string="?", **cats)


# Linear models and support vectors.


def both(c, name, op, inputs, classes, ints="classlabels_ints", **given):
    """Writes one case with integer labels and one with string labels."""
    numbers = [int(v) for v in c.rng.permutation(100)[:classes]]
    c.case(f"{name}_ints", op, inputs, [TensorProto.INT64, TensorProto.FLOAT], **{ints: numbers}, **given)
    words = [f"class {v}" for v in numbers]
    c.case(f"{name}_strings", op, inputs, [TensorProto.STRING, TensorProto.FLOAT], classlabels_strings=words, **given)


def linear(c):
    for dtype in (np.float32, np.float64, np.int64, np.int32):
        x, name = c.matrix(6, 4, dtype), np.dtype(dtype).name
        w, v = c.rng.standard_normal(12).tolist(), c.rng.standard_normal(3).tolist()
        if dtype == np.float32:
            for post in POSTS:
                given = dict(coefficients=w, intercepts=v, targets=3, post_transform=post)
                c.case(f"linear_regressor_{post}", "LinearRegressor", [x], [TensorProto.FLOAT], ml=1, **given)
            c.case("linear_regressor_one", "LinearRegressor", [x], [TensorProto.FLOAT], ml=1, coefficients=w[:4], targets=1)
        for post in POSTS if dtype == np.float32 else ["NONE"]:
            given = dict(ml=1, coefficients=w, intercepts=v, post_transform=post)
            both(c, f"linear_classifier_{name}_{post}", "LinearClassifier", [x], 3, **given)
            if post != "SOFTMAX_ZERO":
                given = dict(ml=1, coefficients=w[:4], intercepts=v[:1], post_transform=post)
                both(c, f"linear_classifier_one_score_{name}_{post}", "LinearClassifier", [x], 2, **given)
    x = c.matrix(6, 2)
    given = dict(coefficients=[0.05, 0.02, -0.03, 0.04, 0.01, -0.02], intercepts=[0.2, 0.7, 0.85], targets=3)
    c.case("linear_regressor_PROBIT", "LinearRegressor", [x], [TensorProto.FLOAT], ml=1, tolerance=LOOSE, post_transform="PROBIT", **given)


def vectors(c):
    for kernel in ("LINEAR", "POLY", "RBF", "SIGMOID"):
        x = c.matrix(7, 3)
        given = dict(ml=1, kernel_type=kernel, kernel_params=[0.4, 0.3, 3.0])
        sv, w = c.rng.standard_normal(15).tolist(), c.rng.standard_normal(5).tolist()
        machine = dict(support_vectors=sv, coefficients=w, n_supports=5, rho=[0.2])
        c.case(f"svm_regressor_{kernel}", "SVMRegressor", [x], [TensorProto.FLOAT], **machine, **given)
        c.case(f"svm_regressor_one_class_{kernel}", "SVMRegressor", [x], [TensorProto.FLOAT], one_class=1, **machine, **given)
        for classes, counts in ((2, [3, 2]), (3, [2, 3, 1]), (5, [1, 2, 3, 2, 4])):
            n, pairs = sum(counts), classes * (classes - 1) // 2
            machine = dict(vectors_per_class=counts, support_vectors=c.rng.standard_normal(3 * n).tolist())
            machine |= dict(coefficients=c.rng.standard_normal((classes - 1) * n).tolist(), rho=c.rng.standard_normal(pairs).tolist())
            for post in POSTS if kernel == "RBF" else ["NONE"]:
                given["post_transform"] = post
                both(c, f"svm_classifier_{kernel}_{classes}_{post}", "SVMClassifier", [x], classes, **machine, **given)
            chances = dict(prob_a=(-1 - c.rng.random(pairs)).tolist(), prob_b=c.rng.standard_normal(pairs).tolist())
            given["post_transform"] = "NONE"
            both(c, f"svm_classifier_{kernel}_{classes}_probabilities", "SVMClassifier", [x], classes, **chances, **machine, **given)
    x = c.matrix(6, 4)
    c.case("svm_regressor_linear", "SVMRegressor", [x], [TensorProto.FLOAT], ml=1, coefficients=[1.0, -2, 0.5, 3], rho=[0.5], n_supports=0, kernel_params=[0.0] * 3)
    for classes in (2, 3):
        for sign, w in (("mixed", c.rng.standard_normal(4 * classes)), ("positive", c.rng.random(4 * classes))):
            given = dict(ml=1, coefficients=w.tolist(), rho=[0.1], kernel_type="LINEAR", kernel_params=[0.0] * 3)
            both(c, f"svm_classifier_linear_{classes}_{sign}", "SVMClassifier", [x], classes, **given)
    for dtype in (np.float64, np.int64, np.int32):
        given = dict(ml=1, coefficients=c.rng.standard_normal(12).tolist(), rho=[0.1], kernel_type="LINEAR", kernel_params=[0.0] * 3)
        both(c, f"svm_classifier_{np.dtype(dtype)}", "SVMClassifier", [c.matrix(6, 4, dtype)], 3, **given)


# Trees.


MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]


class Tree:
    """A random tree: nodes as (mode, feature, split, missing, true child, false child), leaves as None, the root first."""

    def __init__(self, rng, depth, features, modes, grid):
        self.nodes = []
        self.grow(rng, depth, features, modes, grid)

    def grow(self, rng, depth, features, modes, grid):
        at = len(self.nodes)
        self.nodes.append(None)
        if depth > 0 and (at == 0 or rng.random() < 0.8):
            mode = modes[rng.integers(len(modes))]
            # Splits on the grid of the data also test the case of equality.
            split = float(rng.integers(-4, 5)) if grid else float(np.float32(rng.standard_normal()))
            children = [self.grow(rng, depth - 1, features, modes, grid) for _ in range(2)]
            # For "not equal", onnxruntime sends NaN to the true branch, even if the attribute says otherwise.
            missing = 1 if mode == "BRANCH_NEQ" else int(rng.integers(2))
            self.nodes[at] = (mode, int(rng.integers(features)), split, missing, *children)
        return at


def old_form(trees, missing=True):
    """The nodes_ attributes of versions before 5, and the leaves as (tree, node)."""
    out = {f"nodes_{k}": [] for k in ("treeids", "nodeids", "modes", "featureids", "values", "truenodeids", "falsenodeids")}
    tracks, leaves = [], []
    for t, tree in enumerate(trees):
        for i, node in enumerate(tree.nodes):
            if node is None:
                leaves.append((t, i))
            mode, feature, split, track, yes, no = node or ("LEAF", 0, 0.0, 0, 0, 0)
            for key, v in zip(out, (t, i, mode, feature, split, yes, no)):
                out[key].append(v)
            tracks.append(track)
    if missing:
        out["nodes_missing_value_tracks_true"] = tracks
    return out, leaves


def with_nan(c, x, share=0.2):
    x = x.copy()
    if np.issubdtype(x.dtype, np.floating):
        x[c.rng.random(x.shape) < share] = np.nan
    return x


def votes(c, leaves, targets, per_leaf, low=-1.0):
    """Targets and weights of each leaf."""
    out = {k: [] for k in ("treeids", "nodeids", "ids", "weights")}
    for tree, node in leaves:
        for target in c.rng.permutation(targets)[: min(per_leaf, targets)]:
            for key, v in zip(out, (tree, node, int(target), float(np.float32(c.rng.uniform(low, 1.0))))):
                out[key].append(v)
    return out


def forests(c):
    def forest(trees, depth, modes=MODES, grid=False):
        return [Tree(c.rng, depth, 4, modes, grid) for _ in range(trees)]

    F = TensorProto.FLOAT
    for name, modes, grid in [(m, [m], True) for m in MODES] + [("mixed", MODES, True), ("real", ["BRANCH_LEQ"], False)]:
        nodes, leaves = old_form(forest(6, 4, modes, grid))
        given = nodes | {f"target_{k}": v for k, v in votes(c, leaves, 1, 1).items()}
        x = with_nan(c, c.matrix(12, 4, np.int64).astype(np.float32) if grid else c.matrix(12, 4))
        c.case(f"tree_regressor_{name}", "TreeEnsembleRegressor", [x], [F], n_targets=1, **given)
    nodes, leaves = old_form(forest(4, 4, MODES[:4], True))
    given = nodes | {f"target_{k}": v for k, v in votes(c, leaves, 2, 1).items()}
    c.case("tree_regressor_float64", "TreeEnsembleRegressor", [c.matrix(9, 4, np.float64)], [F], n_targets=2, **given)
    for aggregate in ("SUM", "AVERAGE", "MIN", "MAX"):
        for targets, per_leaf in ((1, 1), (3, 3), (5, 2)):
            nodes, leaves = old_form(forest(5, 3))
            given = nodes | {f"target_{k}": v for k, v in votes(c, leaves, targets, per_leaf).items()}
            for post in POSTS if targets == 3 else ["NONE"]:
                more = dict(n_targets=targets, aggregate_function=aggregate, post_transform=post)
                if per_leaf == targets:
                    more["base_values"] = c.rng.standard_normal(targets).tolist()
                c.case(f"tree_regressor_{aggregate}_{targets}_{post}", "TreeEnsembleRegressor", [c.matrix(8, 4)], [F], **more, **given)
    # As after boosting, each tree serves one target, and the targets have different numbers of trees.
    trees = forest(7, 3)
    nodes, leaves = old_form(trees, missing=False)
    weights = votes(c, leaves, 1, 1)
    weights["ids"] = [[0, 1, 2, 0, 1, 0, 0][t] for t, _ in leaves]
    for aggregate in ("SUM", "AVERAGE", "MIN", "MAX"):
        given = dict(n_targets=3, aggregate_function=aggregate) | {f"target_{k}": v for k, v in weights.items()}
        c.case(f"tree_regressor_boosted_{aggregate}", "TreeEnsembleRegressor", [c.matrix(8, 4)], [F], **given, **nodes)
    wide = {k: v for k, v in nodes.items() if k != "nodes_values"} | {f"target_{k}": v for k, v in weights.items() if k != "weights"}
    wide["nodes_values_as_tensor"] = tensor(np.array(nodes["nodes_values"], np.float64))
    wide["target_weights_as_tensor"] = tensor(np.array(weights["weights"], np.float64))
    c.case("tree_regressor_as_tensor", "TreeEnsembleRegressor", [c.matrix(8, 4, np.float64)], [F], n_targets=3, **wide)
    # A tree that is a leaf, and deep trees.
    nodes, leaves = old_form([Tree(c.rng, 0, 4, MODES, False)] + forest(2, 9, ["BRANCH_LEQ"]))
    given = nodes | {f"target_{k}": v for k, v in votes(c, leaves, 1, 1).items()}
    c.case("tree_regressor_uneven", "TreeEnsembleRegressor", [c.matrix(16, 4)], [F], n_targets=1, **given)

    for classes in (3, 5):
        nodes, leaves = old_form(forest(6, 3))
        given = nodes | {f"class_{k}": v for k, v in votes(c, leaves, classes, classes).items()}
        for post in POSTS:
            for base in ({}, {"base_values": c.rng.standard_normal(classes).tolist()}):
                name = f"tree_classifier_{classes}_{post}{'_base' if base else ''}"
                both(c, name, "TreeEnsembleClassifier", [c.matrix(9, 4)], classes, "classlabels_int64s", post_transform=post, **base, **given)
    for sign, low in (("mixed", -1.0), ("positive", 0.0)):
        nodes, leaves = old_form(forest(1 if sign == "positive" else 4, 3))
        given = nodes | {f"class_{k}": v for k, v in votes(c, leaves, 1, 1, low).items()}
        for post in POSTS:
            for base in ({}, {"base_values": [0.25]}):
                name = f"tree_classifier_one_score_{sign}_{post}{'_base' if base else ''}"
                both(c, name, "TreeEnsembleClassifier", [c.matrix(9, 4)], 2, "classlabels_int64s", post_transform=post, **base, **given)
        given["class_ids"] = [1] * len(given["class_ids"])
        both(c, f"tree_classifier_second_{sign}", "TreeEnsembleClassifier", [c.matrix(9, 4)], 2, "classlabels_int64s", **given)
    for dtype in (np.float64, np.int64, np.int32):
        nodes, leaves = old_form(forest(4, 3, MODES[:4], True))
        given = nodes | {f"class_{k}": v for k, v in votes(c, leaves, 3, 3).items()}
        both(c, f"tree_classifier_{np.dtype(dtype)}", "TreeEnsembleClassifier", [c.matrix(9, 4, dtype)], 3, "classlabels_int64s", **given)

    for dtype in (np.float32, np.float64):
        for aggregate in range(4):
            for targets in (1, 3):
                given = new_form(c, [Tree(c.rng, 4, 4, MODES + ["BRANCH_MEMBER"], True) for _ in range(5)], targets, dtype)
                x = with_nan(c, c.matrix(12, 4, np.int64).astype(dtype))
                given |= dict(n_targets=targets, aggregate_function=aggregate)
                for post in [0, 3] if targets == 3 and aggregate == 1 else [0]:
                    name = f"tree_ensemble_{np.dtype(dtype)}_{aggregate}_{targets}_{post}"
                    c.case(name, "TreeEnsemble", [x], [kind(x)], ml=5, opset=21, post_transform=post, **given)


def new_form(c, trees, targets, dtype):
    """The attributes of version 5."""
    keys = ("modes", "featureids", "splits", "missing_value_tracks_true", "truenodeids", "falsenodeids", "trueleafs", "falseleafs")
    out = {f"nodes_{k}": [] for k in keys}
    weights, ids, members, roots = [], [], [], []
    modes = MODES + ["BRANCH_MEMBER"]
    for tree in trees:
        base = len(out["nodes_modes"])
        place, branches = {}, [i for i, n in enumerate(tree.nodes) if n]
        place = {i: base + k for k, i in enumerate(branches)}
        for i, node in enumerate(tree.nodes):
            if not node:
                place[i] = len(weights)
                weights.append(c.rng.uniform(-1, 1))
                ids.append(int(c.rng.integers(targets)))
        roots.append(base)
        for i in branches:
            mode, feature, split, missing, yes, no = tree.nodes[i]
            leaf = [int(not tree.nodes[k]) for k in (yes, no)]
            row = (modes.index(mode), feature, split, missing, place[yes], place[no], *leaf)
            for key, v in zip(out, row):
                out[key].append(v)
            if mode == "BRANCH_MEMBER":
                members += [*(float(v) for v in c.rng.permutation(9)[: c.rng.integers(1, 6)] - 4), float("nan")]
    out["nodes_modes"] = tensor(np.array(out["nodes_modes"], np.uint8))
    out["nodes_splits"] = tensor(np.array(out["nodes_splits"], dtype))
    out |= dict(tree_roots=roots, leaf_targetids=ids, leaf_weights=tensor(np.array(weights, dtype)))
    if members:
        out["membership_values"] = tensor(np.array(members, dtype))
    return out


# Maps and strings.


def maps(c):
    x = c.matrix(3, 2)
    of = lambda key: helper.make_sequence_type_proto(helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, [])))
    c.case("zip_map_ints", "ZipMap", [x], [of(TensorProto.INT64)], ml=1, classlabels_int64s=[4, 9])
    c.case("zip_map_strings", "ZipMap", [x], [of(TensorProto.STRING)], ml=1, classlabels_strings=["a", "b"])


def texts(c):
    def plain(name, op, inputs, outputs, **given):
        c.case(name, op, inputs, outputs, domain="", **given)

    S, I, B = TensorProto.STRING, TensorProto.INT64, TensorProto.BOOL
    x = np.array([["b", "a", ""], ["é", "a", "long string"]], dtype=object)
    y = np.array([["q"], ["r"]], dtype=object)
    plain("text_identity", "Identity", [x], [S])
    plain("text_reshape", "Reshape", [x, np.array([3, -1])], [S])
    plain("text_gather", "Gather", [x, np.array([[2, 0]])], [S], axis=1)
    plain("text_concat", "Concat", [x, y], [S], axis=1)
    plain("text_where", "Where", [np.array([[True, False, True]]), x, y], [S])
    plain("text_unsqueeze", "Unsqueeze", [x, np.array([0])], [S], initializers=["x1"])
    plain("text_squeeze", "Squeeze", [x[None], np.array([0])], [S])
    plain("text_transpose", "Transpose", [x], [S])
    plain("text_slice", "Slice", [x, np.array([1]), np.array([-1]), np.array([1])], [S])
    plain("text_split", "Split", [x, np.array([1, 2])], [S, S], axis=1)
    plain("text_expand", "Expand", [y, np.array([2, 3])], [S])
    plain("text_tile", "Tile", [x, np.array([1, 2])], [S])
    plain("text_flatten", "Flatten", [x], [S], axis=0)
    plain("text_shape", "Shape", [x], [I])
    plain("text_size", "Size", [x], [I])
    plain("text_equal", "Equal", [x, np.array(["a"], dtype=object)], [B])
    plain("text_stored", "Concat", [x, y], [S], axis=1, initializers=["x1"])
    words = strings("monday", "Tuesday", "MONDAY", "é", "École")
    for action in ("NONE", "LOWER", "UPPER"):
        for sensitive in (0, 1):
            given = dict(case_change_action=action, is_case_sensitive=sensitive, stopwords=["monday", "É"], locale="C.UTF-8")
            ascii_only = {**given, "stopwords": ["monday"]}
            plain(f"text_normalize_{action}_{sensitive}", "StringNormalizer", [words[:3]], [S], opset=10, **ascii_only)
            plain(f"text_normalize_matrix_{action}_{sensitive}", "StringNormalizer", [words[None, :3]], [S], opset=10, **ascii_only)
    plain("text_normalize_empty", "StringNormalizer", [words[:1]], [S], opset=10, stopwords=["monday"], is_case_sensitive=1)
    lines = np.array([["a,b,,c", "d"], [",", "no delimiter"]], dtype=object)
    for most in (None, 0, 1, 2):
        more = {} if most is None else {"maxsplit": most}
        plain(f"text_split_comma_{most}", "StringSplit", [lines], [S, I], delimiter=",", **more)
    plain("text_split_space", "StringSplit", [strings(" a  b ", "c", "", "d e f")], [S, I])
    plain("text_string_concat", "StringConcat", [x, y], [S])
    mails = strings("a@b.org", "a@b", "a @b.org", "", "x.y@c.d.net\n", "٣@b.org")
    plain("text_regex_mail", "RegexFullMatch", [mails], [B], pattern=r"[\w.]+@[\w.]+\.(org|net)")
    plain("text_regex_digit", "RegexFullMatch", [strings("12", "٣", "1\n", "x12")], [B], pattern=r"\d+")
    plain("text_regex_any", "RegexFullMatch", [strings("é", "ab", "\n", "")], [B], pattern=".")
    numbers = strings("1.5", "-2", "1e-3", "NaN", "INF", "-inf", " 7 ")
    plain("text_to_float", "Cast", [numbers], [TensorProto.FLOAT], to=TensorProto.FLOAT)
    plain("text_to_double", "Cast", [numbers], [TensorProto.DOUBLE], to=TensorProto.DOUBLE)
    plain("text_to_int64", "Cast", [strings("12", "-9223372036854775808", "3.9")], [I], to=I)
    plain("text_of_int64", "Cast", [np.array([5, -7, 2**62])], [S], to=S)
    plain("text_of_float", "Cast", [np.array([0.1, -2.5, 1 / 3, 123.456], np.float32)], [S], to=S)
    given = dict(max_gram_length=2, min_gram_length=1, max_skip_count=1, mode="TF", ngram_counts=[0, 2], ngram_indexes=[0, 1, 2, 3])
    pool = ["a", "b", "a", "b", "b", "c"]
    sentence = strings("a", "b", "b", "c", "a", "x", "b")
    plain("text_tfidf", "TfIdfVectorizer", [sentence], [TensorProto.FLOAT], opset=9, pool_strings=pool, **given)


def main(out):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    c = Cases(out)
    for part in (features, labels, linear, vectors, forests, maps, texts):
        part(c)
    print(f"ml: {len(c.names)} cases")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
