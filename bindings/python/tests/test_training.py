"""Training steps against the optimizers' formulas, checkpoints, and files of weights."""

from __future__ import annotations

import gc
import math
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import halcyon
import numpy as np
import pytest
from halcyon import array as ha
from halcyon import training

CPU = "cpu"


def loss(params, x, y):
    return ha.mean((x @ params["w"] + params["b"] - y) ** 2)


def start(seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        "w": ha.asarray(rng.standard_normal((4, 2)), dtype=ha.float32, device=CPU),
        "b": ha.zeros(2, dtype=ha.float32, device=CPU),
    }


def batches(n: int, seed: int = 1):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        x = rng.standard_normal((8, 4)).astype(np.float32)
        yield x, (x[:, :2] * 2 + 1).astype(np.float32)


def gradients(w, b, x, y):
    """The loss and its gradients, in f64."""
    d = x @ w + b - y
    return (d**2).mean(), 2 * x.T @ d / d.size, 2 * d.sum(0) / d.size


def close(params, w, b, limit=1e-5):
    return (
        np.abs(np.asarray(params["w"]) - w).max() < limit
        and np.abs(np.asarray(params["b"]) - b).max() < limit
    )


def test_sgd_with_momentum_follows_its_formula():
    params = start()
    step = training.TrainStep(loss, params, "sgd", lr=0.05, momentum=0.9, weight_decay=0.01)
    w, b = (np.asarray(params[k]).astype(np.float64) for k in "wb")
    momenta = [np.zeros_like(w), np.zeros_like(b)]
    for x, y in batches(10):
        want, *grads = gradients(w, b, x, y)
        assert abs(float(step(x, y)) - want) < 1e-5 * max(1, want)
        for value, m, g in zip((w, b), momenta, grads, strict=True):
            m *= 0.9
            m += g + 0.01 * value
            value -= 0.05 * m
    assert close(step.params, w, b) and step.steps == 10
    assert set(step.state()) == {"w.momentum_buffer", "b.momentum_buffer"}


def test_adamw_with_a_schedule_and_clipping_follows_its_formula():
    params = start()
    schedule = {"kind": "cosine", "steps": 20, "least": 0.001}
    step = training.TrainStep(loss, params, "adamw", lr=0.1, schedule=schedule, clip_norm=0.5)
    w, b = (np.asarray(params[k]).astype(np.float64) for k in "wb")
    m, v = [np.zeros_like(w), np.zeros_like(b)], [np.zeros_like(w), np.zeros_like(b)]
    for k, (x, y) in enumerate(batches(10)):
        rate = 0.001 + (0.1 - 0.001) * (1 + math.cos(math.pi * k / 20)) / 2
        assert abs(step.learning_rate("w") - rate) < 1e-12
        step(x, y)
        _, *grads = gradients(w, b, x, y)
        norm = math.sqrt(sum((g**2).sum() for g in grads))
        for value, m1, v1, g in zip((w, b), m, v, grads, strict=True):
            g = g * min(1, 0.5 / norm)
            value *= 1 - rate * 0.01
            m1 += (g - m1) * 0.1
            v1 += (g * g - v1) * 0.001
            value -= rate * (m1 / (1 - 0.9 ** (k + 1))) / (np.sqrt(v1 / (1 - 0.999 ** (k + 1))) + 1e-8)
    assert close(step.params, w, b, 1e-4)


@pytest.mark.parametrize("rule", ["adam", "adagrad", "rmsprop", "adafactor", "lion"])
def test_every_rule_lowers_the_loss(rule):
    step = training.TrainStep(loss, start(), rule, lr=0.05)
    values = [float(step(x, y)) for x, y in batches(40)]
    assert sum(values[-5:]) < sum(values[:5])


def test_gradients_are_accumulated_and_averages_are_kept():
    pairs = list(batches(6))
    joined = [[np.concatenate(both) for both in zip(*pairs[i : i + 2], strict=True)] for i in (0, 2, 4)]
    whole = training.TrainStep(loss, start(), "sgd", lr=0.1)
    half = training.TrainStep(loss, start(), "sgd", lr=0.1, accumulate=2, ema=0.5)
    seen = [np.asarray(start()["w"])]
    for x, y in joined:
        whole(x, y)
        seen.append(np.asarray(whole.params["w"]))
    for x, y in pairs:
        half(x, y)
    assert half.steps == whole.steps == 3
    assert close(half.params, *(np.asarray(whole.params[k]) for k in "wb"))
    average = seen[0]
    for value in seen[1:]:
        average = 0.5 * average + 0.5 * value
    assert np.abs(np.asarray(half.averages["w"]) - average).max() < 1e-5
    with pytest.raises(halcyon.ArgumentError, match="ema"):
        _ = whole.averages


def test_trees_of_parameters_and_further_results():
    def net(params, x):
        for w in params["layers"]:
            x = ha.tanh(x @ w)
        out = x * params["scale"]
        return ha.mean(out**2), out

    params = {
        "layers": (ha.ones((3, 3), device=CPU), ha.ones((3, 2), device=CPU)),
        "scale": ha.ones(2, device=CPU),
    }
    step = training.TrainStep(net, params, "sgd", lr=0.1)
    value, out = step(ha.ones((4, 3), device=CPU))
    assert out.shape == (4, 2) and abs(float(value) - float(ha.mean(out**2))) < 1e-6
    assert isinstance(step.params["layers"], tuple) and step.params["layers"][1].shape == (3, 2)
    assert float(step.params["scale"][0]) < 1


def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    make = lambda: training.TrainStep(loss, start(), "adamw", lr=0.01, ema=0.9)  # noqa: E731
    first = make()
    pairs = list(batches(12))
    for x, y in pairs[:6]:
        first(x, y)
    place = first.save(tmp_path / "run", epoch=2, metrics={"accuracy": 0.5})
    assert place.name == "step-000006" and training.latest_checkpoint(tmp_path / "run") == place
    second = make()
    record = second.load(place)
    assert (record["epoch"], record["metrics"]) == (2, {"accuracy": 0.5})
    for x, y in pairs[6:]:
        assert float(first(x, y)) == float(second(x, y))
    for k in "wb":
        assert np.array_equal(np.asarray(first.params[k]), np.asarray(second.params[k]))
        assert np.array_equal(np.asarray(first.averages[k]), np.asarray(second.averages[k]))
    for _ in range(3):
        first(*pairs[0])
        first.save(tmp_path / "run", keep=2)
    assert [p.name for p in training.checkpoints(tmp_path / "run")] == ["step-000014", "step-000015"]
    other = training.TrainStep(loss, start(), "sgd", lr=0.01)
    before = np.asarray(other.params["w"])
    with pytest.raises(halcyon.HalcyonError, match="adam"):
        other.load(training.latest_checkpoint(tmp_path / "run"))
    assert np.array_equal(np.asarray(other.params["w"]), before)
    with pytest.raises(halcyon.HalcyonError, match="nowhere"):
        other.load(tmp_path / "nowhere")


def test_weights_are_written_and_read(tmp_path):
    tree = {"a": ha.arange(6, dtype=ha.int64, device=CPU), "b": [ha.ones((2, 3), device=CPU) * 0.5]}
    size = training.save_weights(tmp_path / "w.safetensors", tree, {"by": "test"})
    assert size == (tmp_path / "w.safetensors").stat().st_size
    read = training.load_weights(tmp_path / "w.safetensors", CPU)
    assert list(read) == ["a", "b.0"] and read["a"].dtype == ha.int64
    assert np.asarray(read["a"]).tolist() == list(range(6)) and np.asarray(read["b.0"]).sum() == 3
    step = training.TrainStep(loss, start(), "sgd", lr=0.1)
    step.params = {k: ha.zeros_like(v) for k, v in start().items()}
    assert float(ha.sum(ha.abs(step.params["w"]))) == 0


def test_errors_are_the_callers_own_and_change_nothing():
    def broken(params, x):
        raise KeyError("my own")

    step = training.TrainStep(broken, start(), "sgd", lr=0.1)
    with pytest.raises(KeyError, match="my own"):
        step(np.ones((2, 4), np.float32))
    step = training.TrainStep(loss, start(), "sgd", lr=0.1)
    before = np.asarray(step.params["w"])
    with pytest.raises(halcyon.ShapeError, match=r"\[8, 5\]"):
        step(np.ones((8, 5), np.float32), np.ones((8, 2), np.float32))
    assert np.array_equal(np.asarray(step.params["w"]), before) and step.steps == 0
    step(*next(batches(1)))
    for wrong, error, names in [
        (lambda: training.TrainStep(loss, start(), "adamx"), halcyon.ArgumentError, "adamx"),
        (lambda: training.TrainStep(loss, start(), "sgd", beta1=0.1), TypeError, "beta1"),
        (lambda: training.TrainStep(loss, start(), "sgd", lr="fast"), TypeError, "lr"),
        (lambda: training.TrainStep(loss, {}, "sgd"), halcyon.ArgumentError, "no parameters"),
        (lambda: training.TrainStep(loss, {"w": 3}, "sgd"), halcyon.DTypeError, "int"),
        (lambda: training.TrainStep(loss, {"w": ha.arange(3)}, "sgd"), halcyon.DTypeError, "int64"),
        (
            lambda: training.TrainStep(loss, start(), "sgd", schedule={"kind": "x"}),
            halcyon.ArgumentError,
            "x",
        ),
        (lambda: training.TrainStep(loss, start(), "sgd", accumulate=0), halcyon.ArgumentError, "accumulate"),
    ]:
        with pytest.raises(error, match=names):
            wrong()


def test_names_with_dots_and_weights_of_files(tmp_path):
    nested = {"l": [ha.ones(2, dtype=ha.float32), ha.zeros(3, dtype=ha.float32)]}
    training.save_weights(tmp_path / "a.safetensors", nested)
    flat = training.load_weights(tmp_path / "a.safetensors", ha.ones(1).device)
    assert sorted(flat) == ["l.0", "l.1"]
    training.save_weights(tmp_path / "b.safetensors", flat)
    assert sorted(training.load_weights(tmp_path / "b.safetensors")) == ["l.0", "l.1"]
    step = training.TrainStep(lambda p: ha.sum(p["l.0"] ** 2) + ha.sum(p["l.1"]), flat, "sgd", lr=0.25)
    assert float(step()) == 2 and step.params["l.0"].tolist() == [0.5, 0.5]
    # The weights of a file replace the parameters of any structure with the same paths.
    step = training.TrainStep(lambda p: ha.sum(p["l"][0] ** 2) + ha.sum(p["l"][1]), nested, "sgd", lr=0.25)
    step.params = {"l.0": ha.full(2, 3.0), "l.1": flat["l.1"]}
    assert step.params["l"][0].tolist() == [3, 3]
    with pytest.raises(halcyon.ArgumentError, match=r"l\.0"):
        training.save_weights(tmp_path / "c.safetensors", {**nested, "l.0": ha.ones(1)})


def test_parameters_are_replaced_together_or_not_at_all():
    step = training.TrainStep(loss, start(), "sgd", lr=0.1)
    before = np.asarray(step.params["b"])
    for wrong, error in [
        (ha.ones((4, 3), dtype=ha.float32), halcyon.ShapeError),
        (ha.ones((4, 2), dtype=ha.float64), halcyon.DTypeError),
    ]:
        with pytest.raises(error, match="w"):
            step.params = {"b": ha.ones(2, dtype=ha.float32), "w": wrong}
        assert np.array_equal(np.asarray(step.params["b"]), before)


def test_named_tuples_stay_named():
    class Pair(NamedTuple):
        w: Any
        b: Any

    first = start()
    step = training.TrainStep(
        lambda p, x, y: loss({"w": p.w, "b": p.b}, x, y), Pair(first["w"], first["b"]), "sgd", lr=0.1
    )
    step(*next(batches(1)))
    assert isinstance(step.params, Pair)


@pytest.mark.parametrize("draw", ["normal", "uniform", "half", "double", "randint", "permutation"])
def test_draws_in_a_loss_follow_the_seed_and_the_step(draw):
    def noise(n):
        return {
            "normal": lambda: ha.random.normal((n,)),
            "uniform": lambda: ha.random.uniform((n,)),
            "half": lambda: ha.astype(ha.random.uniform((n,), dtype=ha.float16), ha.float32),
            "double": lambda: ha.astype(ha.random.uniform((n,), dtype=ha.float64), ha.float32),
            "randint": lambda: ha.astype(ha.random.randint(0, 1000, (n,)), ha.float32),
            "permutation": lambda: ha.astype(ha.random.permutation(n), ha.float32),
        }[draw]()

    def drawn(seed, steps=3):
        def both(params):
            first, second = noise(64), noise(64)
            return ha.sum(params["a"]) + 0.0 * ha.sum(first), first, second

        step = training.TrainStep(both, {"a": ha.ones(1, dtype=ha.float32)}, "sgd", lr=0.0, seed=seed)
        return [np.asarray(x) for _ in range(steps) for x in step()[1:]]

    one, same, other = drawn(1), drawn(1), drawn(2)
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    # Every draw of every step and seed has numbers of its own.
    assert len({a.tobytes() for a in one + other}) == 12
    if draw == "permutation":
        assert all(sorted(a.tolist()) == list(range(64)) for a in one)
    elif draw == "normal":
        assert abs(np.mean(one)) < 0.3 and 0.7 < np.std(one) < 1.3
    elif draw != "randint":
        assert 0 <= np.min(one) < 0.1 and 0.9 < np.max(one) < 1 and 0.4 < np.mean(one) < 0.6


def test_threads_get_their_own_exceptions():
    def broken(params, x):
        raise KeyError(x.shape[0])

    step = training.TrainStep(broken, {"w": ha.ones(2, dtype=ha.float32)}, "sgd", lr=0.1)

    def own(n):
        for _ in range(50):
            with pytest.raises(KeyError) as e:
                step(np.ones(n, np.float32))
            assert e.value.args == (n,)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(own, range(1, 5)))


def test_a_loss_cannot_use_its_own_step():
    for use in (
        lambda step: step.steps,
        lambda step: step.params,
        lambda step: step.learning_rate("w"),
        lambda step: step(*next(batches(1))),
    ):
        steps = []

        def own(params, x, y, use=use, steps=steps):
            use(steps[0])
            return loss(params, x, y)

        made = training.TrainStep(own, start(), "sgd", lr=0.1)
        steps.append(made)
        with pytest.raises(halcyon.ArgumentError, match="loss function uses the training step"):
            made(*next(batches(1)))
        assert made.steps == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_step_that_its_loss_refers_to_is_freed():
    class Trainer:
        def __init__(self):
            self.step = training.TrainStep(self.loss, start(), "sgd", lr=0.1)

        def loss(self, params, x, y):
            return loss(params, x, y)

    def threads():
        return len(list(Path("/proc/self/task").iterdir()))

    Trainer().step(*next(batches(1)))
    gc.collect()
    before = threads()
    for _ in range(20):
        trainer = Trainer()
        trainer.step(*next(batches(1)))
        gone = weakref.ref(trainer)
        del trainer
        gc.collect()
        assert gone() is None
    # The threads end by themselves.
    end = time.monotonic() + 20
    while threads() > before + 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert threads() <= before + 2


def test_threads_may_share_a_step():
    step = training.TrainStep(loss, start(), "sgd", lr=0.001)
    with ThreadPoolExecutor(4) as pool:
        values = list(pool.map(lambda pair: float(step(*pair)), batches(40)))
    assert step.steps == 40 and all(map(math.isfinite, values))
