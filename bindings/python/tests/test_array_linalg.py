"""Linear algebra: what generated cases cannot compare, because factors are not unique, and gradients."""

import halcyon
import halcyon.array as xp
import numpy as np
import pytest
from halcyon.array import linalg

RNG = np.random.default_rng(20)


def draw(*shape):
    return RNG.normal(size=shape)


def definite(*shape):
    a = draw(*shape)
    return a @ np.swapaxes(a, -1, -2) + 2 * np.eye(shape[-1])


def close(a, b, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 5), (1, 1), (2, 4, 3), (2, 3, 2, 4), (0, 3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_factors_multiply_to_the_matrix(shape, dtype):
    a = draw(*shape).astype(dtype)
    x = xp.asarray(a)
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    m, n = shape[-2:]
    for full in (False, True):
        u, s, vh = linalg.svd(x, full_matrices=full)
        k = min(m, n)
        close(u[..., :k] * s[..., None, :] @ vh[..., :k, :], a, tolerance)
        close(
            xp.matrix_transpose(u) @ u,
            np.broadcast_to(np.eye(u.shape[-1]), (*shape[:-2], *u.shape[-1:] * 2)),
            tolerance,
        )
        close(
            vh @ xp.matrix_transpose(vh),
            np.broadcast_to(np.eye(vh.shape[-2]), (*shape[:-2], *vh.shape[-2:-1] * 2)),
            tolerance,
        )
        q, r = linalg.qr(x, mode="complete" if full else "reduced")
        close(q @ r, a, tolerance)
        close(
            xp.matrix_transpose(q) @ q,
            np.broadcast_to(np.eye(q.shape[-1]), (*shape[:-2], *q.shape[-1:] * 2)),
            tolerance,
        )
        close(xp.tril(r, k=-1), np.zeros(r.shape), tolerance)
        assert (u.shape[-1], vh.shape[-2]) == ((m, n) if full else (k, k)) and q.shape[-1] == (
            m if full else k
        )
    assert np.all(np.diff(np.asarray(s), axis=-1) <= 0)
    assert {u.dtype, s.dtype, q.dtype} == {x.dtype}


def test_eigenvalues_and_eigenvectors():
    a = draw(2, 4, 4)
    a = a + np.swapaxes(a, -1, -2)
    w, v = linalg.eigh(xp.asarray(a))
    close(v * w[..., None, :] @ xp.matrix_transpose(v), a)
    close(w, np.linalg.eigvalsh(a))
    # The upper triangle is not read.
    close(linalg.eigvalsh(xp.asarray(np.tril(a))), np.linalg.eigvalsh(a))
    b = definite(3, 3)
    close(linalg.cholesky(xp.asarray(np.tril(b))), np.linalg.cholesky(b))


def test_matrices_without_rank():
    a = draw(4, 2) @ draw(2, 4)
    assert int(linalg.matrix_rank(xp.asarray(a))) == 2
    assert int(linalg.matrix_rank(xp.asarray(a), rtol=10.0)) == 0
    assert linalg.matrix_rank(xp.zeros((3, 2, 2))).tolist() == [0, 0, 0]
    close(linalg.pinv(xp.asarray(a)), np.linalg.pinv(a, rcond=1e-12))
    close(
        linalg.pinv(xp.asarray(a), rtol=xp.asarray(1e-12, dtype=xp.float64)), np.linalg.pinv(a, rcond=1e-12)
    )
    close(linalg.det(xp.asarray(a)), 0.0)
    sign, log = linalg.slogdet(xp.zeros((2, 2)))
    assert float(sign) == 0.0 and float(log) == -np.inf


def test_matrices_without_elements():
    empty = xp.zeros((0, 0), dtype=xp.float64)
    assert float(linalg.det(empty)) == 1.0 and [float(v) for v in linalg.slogdet(empty)] == [1.0, 0.0]
    assert linalg.inv(empty).shape == linalg.cholesky(empty).shape == (0, 0)
    assert linalg.eigh(empty)[1].shape == (0, 0) and linalg.solve(
        empty, xp.zeros((0, 2), dtype=xp.float64)
    ).shape == (0, 2)
    u, s, vh = linalg.svd(xp.zeros((3, 0)))
    assert u.tolist() == np.eye(3).tolist() and s.shape == (0,) and vh.shape == (0, 0)
    assert linalg.pinv(xp.zeros((3, 0))).shape == (0, 3)


def test_what_cannot_be_decomposed_is_a_typed_error():
    singular = linalg.inv(xp.asarray([[1.0, 2.0], [2.0, 4.0]]))
    with pytest.raises(halcyon.LinAlgError, match="singular"):
        singular.tolist()
    with pytest.raises(halcyon.LinAlgError, match="positive definite"):
        linalg.cholesky(xp.asarray([[1.0, 2.0], [2.0, 1.0]])).tolist()
    for f in (linalg.svdvals, linalg.eigvalsh):
        with pytest.raises(halcyon.LinAlgError, match="NaN"):
            f(xp.asarray([[1.0, float("nan")], [float("nan"), 1.0]])).tolist()
    with pytest.raises(halcyon.LinAlgError, match="square"):
        linalg.det(xp.zeros((2, 3)))
    with pytest.raises(TypeError, match="float32 and float64"):
        linalg.inv(xp.ones((2, 2), dtype=xp.float16))
    assert issubclass(halcyon.LinAlgError, ValueError)


def test_linear_algebra_inside_of_a_compiled_function():
    a, b = definite(3, 3), draw(3)
    f = xp.compile(lambda m, v: (linalg.solve(m, v), linalg.svdvals(m)))
    for scale in (1.0, 2.0):
        solved, values = f(xp.asarray(a * scale), xp.asarray(b))
        close(solved, np.linalg.solve(a * scale, b))
        close(values, np.linalg.svd(a * scale)[1])


def numeric_gradient(f, a, step=1e-6):
    out = np.zeros_like(a)
    for i in np.ndindex(a.shape):
        low, high = a.copy(), a.copy()
        low[i] -= step
        high[i] += step
        out[i] = (float(f(xp.asarray(high))) - float(f(xp.asarray(low)))) / (2 * step)
    return out


def weighted(parts, weights):
    total = 0.0
    for p, w in zip(parts, weights, strict=True):
        total = xp.sum(p * xp.asarray(w)) + total
    return total


def symmetric(a):
    return (a + np.swapaxes(a, -1, -2)) / 2


CASES = {
    "inv": (definite(2, 3, 3), lambda x: [linalg.inv(x)]),
    "det": (definite(2, 3, 3), lambda x: [linalg.det(x)]),
    "slogdet": (definite(3, 3), lambda x: [linalg.slogdet(x)[1]]),
    "solve": (definite(3, 3), lambda x: [linalg.solve(x, x @ x + 1.0)]),
    "qr": (draw(4, 3), lambda x: list(linalg.qr(x))),
    "svd_tall": (draw(4, 3), lambda x: list(linalg.svd(x, full_matrices=False))),
    "svd_wide": (draw(2, 3, 4), lambda x: list(linalg.svd(x, full_matrices=False))),
    "svdvals": (draw(4, 3), lambda x: [linalg.svdvals(x)]),
    "pinv": (draw(4, 3), lambda x: [linalg.pinv(x)]),
    "pinv_wide": (draw(2, 3, 4), lambda x: [linalg.pinv(x, rtol=xp.asarray([1e-9, 1e-8]))]),
    "pinv_equal": (np.eye(3), lambda x: [linalg.pinv(x)]),
    "det_singular": (draw(2, 3, 2) @ draw(2, 2, 3), lambda x: [linalg.det(x)]),
    "det_rank_1": (draw(3, 1) @ draw(1, 3), lambda x: [linalg.det(x)]),
    "det_1": (np.zeros((1, 1)), lambda x: [linalg.det(x)]),
    "det_twice": (definite(3, 3), lambda x: [xp.grad(lambda y: linalg.det(y @ y))(x)]),
    "pinv_twice": (draw(3, 2), lambda x: [xp.grad(lambda y: xp.sum(linalg.pinv(y) ** 2))(x)]),
    "norm_nuc": (draw(3, 3), lambda x: [linalg.matrix_norm(x, ord="nuc")]),
    "vector_norm": (draw(3, 3), lambda x: [linalg.vector_norm(x, ord=3)]),
}
SYMMETRIC = {
    "cholesky": (definite(3, 3), lambda x: [linalg.cholesky(x)]),
    "eigh": (symmetric(draw(2, 4, 4)), lambda x: list(linalg.eigh(x))),
    "eigvalsh": (symmetric(draw(4, 4)), lambda x: [linalg.eigvalsh(x)]),
}


@pytest.mark.parametrize("name", [*CASES, *SYMMETRIC])
def test_gradients(name):
    a, f = CASES[name] if name in CASES else SYMMETRIC[name]
    weights = [draw(*p.shape) for p in f(xp.asarray(a))]

    def loss(x):
        if name in SYMMETRIC:
            # The functions read one triangle; as functions of both, their gradient is symmetric.
            x = (x + xp.matrix_transpose(x)) * 0.5
        return weighted(f(x), weights)

    got = xp.grad(loss)(xp.asarray(a))
    close(got, numeric_gradient(loss, a), 1e-5)


def test_gradients_of_equal_values():
    eye = xp.eye(3, dtype=xp.float64)
    for f in (lambda x: linalg.eigh(x)[0], lambda x: linalg.svd(x, full_matrices=False)[1], linalg.svdvals):
        close(xp.grad(lambda x, f=f: xp.sum(f(x)))(eye), np.eye(3))
    # A singular value of 0, and vectors that are read.
    flat = xp.asarray([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=xp.float64)
    for x in (flat, xp.matrix_transpose(flat), eye):
        parts = xp.grad(lambda x: weighted(linalg.svd(x, full_matrices=False), [1.0, 1.0, 1.0]))(x)
        assert xp.all(xp.isfinite(parts))
    second = xp.grad(lambda x: xp.sum(xp.grad(lambda y: xp.sum(linalg.eigh(y)[0] ** 2))(x)))(eye)
    assert xp.all(xp.isfinite(second))
    close(
        xp.grad(linalg.det)(xp.asarray([[1.0, 2.0], [2.0, 4.0]], dtype=xp.float64)),
        [[4.0, -2.0], [-2.0, 1.0]],
    )


def test_a_gradient_that_does_not_exist_is_an_error():
    with pytest.raises(NotImplementedError, match="gradient"):
        xp.grad(lambda x: xp.sum(linalg.svd(x)[0]))(xp.asarray(draw(4, 3)))


def test_cross_products_broadcast():
    a, b = draw(2, 1, 3), draw(4, 3)
    close(linalg.cross(xp.asarray(a), xp.asarray(b)), np.cross(a, b))
    close(linalg.cross(xp.asarray(a.T), xp.asarray(a.T), axis=0), np.zeros((3, 1, 2)))
