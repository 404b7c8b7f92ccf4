//! Rows of the op table for views, and for ops that read their operands through views.

use super::case::*;
use crate::ir::composite::CompositeKind;
use crate::ir::graph::{Graph, NodeId};
use crate::ir::ops::{Op, ReduceKind};
use crate::{DType, Dim, Result, Shape};

/// A strided slice with known sizes.
pub fn slice(g: &mut Graph, x: NodeId, start: &[usize], step: &[i64], len: &[usize]) -> Result<NodeId> {
    let d = |v: &[usize]| v.iter().map(|n| Dim::from(*n)).collect::<Vec<_>>();
    g.slice(x, &d(start), step, &d(len))
}

fn expand<const N: usize>(g: &mut Graph, x: NodeId, to: [usize; N]) -> Result<NodeId> {
    g.expand(x, &Shape::from(to))
}

/// A name, and a function that builds a `[4, 6]` view of a `[6, 8]` operand.
type ProbeSpec = (&'static str, fn(&mut Graph, NodeId) -> Result<NodeId>);
/// Views of every kind.
pub const VIEWS: &[ProbeSpec] = &[
    ("permuted", |g, x| {
        let s = slice(g, x, &[0, 0], &[1, 1], &[6, 4])?;
        g.permute(s, &[1, 0])
    }),
    ("stepped", |g, x| slice(g, x, &[1, 0], &[1, 1], &[4, 6])),
    ("step 2 and back", |g, x| {
        let s = slice(g, x, &[0, 7], &[1, -1], &[6, 8])?;
        let p = g.pad(s, &[0, 2], &[2, 2], 1.0)?;
        slice(g, p, &[0, 0], &[2, 2], &[4, 6])
    }),
    ("backwards", |g, x| slice(g, x, &[5, 7], &[-1, -1], &[4, 6])),
    ("expanded row", |g, x| {
        let s = slice(g, x, &[2, 1], &[1, 1], &[1, 6])?;
        expand(g, s, [4, 6])
    }),
    ("expanded column", |g, x| {
        let s = slice(g, x, &[1, 3], &[1, 1], &[4, 1])?;
        expand(g, s, [4, 6])
    }),
    ("padded", |g, x| {
        let s = slice(g, x, &[1, 1], &[2, 3], &[2, 3])?;
        g.pad(s, &[1, 0], &[1, 3], 2.0)
    }),
    ("reshaped", |g, x| {
        let s = slice(g, x, &[0, 2], &[1, 1], &[6, 4])?;
        g.reshape(s, [4usize, 6])
    }),
];

/// The rows of views, and of ops that read views.
pub fn rows() -> Vec<Row> {
    let mut out = views();
    out.extend(readers());
    out
}

/// The rows of views, padding and concatenation, and of recomputation and checkpoints.
fn views() -> Vec<Row> {
    vec![
        row(
            "reshape",
            all(),
            Tol::Exact,
            [
                case("merge", [x([3, 5, 7])], |g, x| g.reshape(x[0], [15usize, 7])).grad(),
                case("of a permuted", [x([3, 5, 7])], |g, x| {
                    let p = g.permute(x[0], &[2, 0, 1])?;
                    g.reshape(p, [21usize, 5])
                }),
                case("to rank 0", [x([1, 1])], |g, x| g.reshape(x[0], Shape::scalar())),
                case("empty", [x([0, 4])], |g, x| g.reshape(x[0], [2usize, 0])),
            ],
        )
        .bench(case("1 Mi elements", [x([1024, 1024])], |g, x| g.reshape(x[0], [1usize << 20]))),
        row(
            "recompute",
            all(),
            Tol::Exact,
            [
                case("of an input", [x([3, 5])], |g, x| g.push(Op::Recompute, &[x[0]], None)).grad(),
                case("of a permuted", [x([3, 5])], |g, x| {
                    let p = g.permute(x[0], &[1, 0])?;
                    g.push(Op::Recompute, &[p], None)
                }),
            ],
        ),
        row(
            CompositeKind::Checkpoint,
            floats(),
            Tol::Ulps(8.0),
            [case("two ops", [x([3, 5])], |g, x| {
                g.checkpoint(&[x[0]], |g, x| {
                    let y = g.tanh(x[0])?;
                    g.mul(y, x[0])
                })
            })
            .grad()],
        ),
        row(
            "permute",
            all(),
            Tol::Exact,
            [
                case("3-D", [x([3, 5, 7])], |g, x| g.permute(x[0], &[2, 0, 1])).grad(),
                case("4-D", [x([2, 3, 5, 7])], |g, x| g.permute(x[0], &[3, 1, 0, 2])),
                case("257", [x([257, 33])], |g, x| g.transpose(x[0], 0, 1)),
                case("empty", [x([3, 0])], |g, x| g.transpose(x[0], 0, 1)),
            ],
        )
        .bench(case("1024x1024, transposed", [x([1024, 1024])], |g, x| g.transpose(x[0], 0, 1))),
        row(
            "expand",
            all(),
            Tol::Exact,
            [
                case("middle", [x([3, 1, 5])], |g, x| expand(g, x[0], [3, 4, 5])).grad(),
                case("new axes", [x([5])], |g, x| expand(g, x[0], [2, 3, 5])),
                case("from rank 0", [x([])], |g, x| expand(g, x[0], [33])),
                case("to nothing", [x([1, 4])], |g, x| expand(g, x[0], [0, 4])),
            ],
        )
        .bench(case("1024 times 1024", [x([1, 1024])], |g, x| expand(g, x[0], [1024, 1024]))),
        row(
            "slice",
            all(),
            Tol::Exact,
            [
                case("part", [x([7, 9])], |g, x| slice(g, x[0], &[2, 1], &[1, 1], &[4, 5])).grad(),
                case("steps", [x([7, 9])], |g, x| slice(g, x[0], &[6, 0], &[-2, 3], &[4, 3])).grad(),
                case("flip", [x([7, 9])], |g, x| g.flip(x[0], &[0, 1])),
                case("nothing", [x([7, 9])], |g, x| slice(g, x[0], &[2, 1], &[1, 1], &[0, 5])),
                case("narrow", [x([7, 9])], |g, x| g.narrow(x[0], 1, 8usize, 1usize)),
            ],
        )
        .bench(case("1024x1024, backwards", [x([1024, 1024])], |g, x| g.flip(x[0], &[0, 1]))),
        row(
            "pad",
            all(),
            Tol::Exact,
            [
                case("both sides", [x([3, 5])], |g, x| g.pad(x[0], &[1, 0], &[2, 3], 1.0)).grad(),
                case("1-D", [x([33])], |g, x| g.pad(x[0], &[3], &[4], 0.0)),
                case("rank 0", [x([])], |g, x| g.pad(x[0], &[], &[], 1.0)),
                case("of nothing", [x([0, 2])], |g, x| g.pad(x[0], &[2, 0], &[1, 1], 1.0)),
                case("twice, two values", [x([3, 5])], |g, x| {
                    let p = g.pad(x[0], &[1, 1], &[1, 1], 1.0)?;
                    g.pad(p, &[0, 2], &[2, 0], 0.0)
                }),
                case("minus infinity", [x([3, 5])], |g, x| g.pad(x[0], &[1, 1], &[1, 1], f64::NEG_INFINITY)),
            ],
        )
        .bench(case("1024x1024", [x([1024, 1024])], |g, x| g.pad(x[0], &[3, 5], &[5, 3], 1.0))),
        row(
            "concat",
            all(),
            Tol::Exact,
            [
                case("last", [x([3, 5]), x([3, 2])], |g, x| g.concat(x, 1)).grad(),
                case("first, an empty part", [x([3, 5]), x([0, 5]), x([2, 5])], |g, x| g.concat(x, 0)),
                case("only empty parts", [x([0, 5]), x([0, 5])], |g, x| g.concat(x, 0)),
                case("one operand twice", [x([3, 5])], |g, x| g.concat(&[x[0], x[0]], 1)),
                case("views", [x([5, 3]), x([3, 5])], |g, x| {
                    let (t, f) = (g.transpose(x[0], 0, 1)?, g.flip(x[1], &[1])?);
                    g.concat(&[t, f], 0)
                }),
                case("many", (0..40).map(|i| super::case::x([1 + i % 3, 2])).collect::<Vec<_>>(), |g, x| {
                    g.concat(x, 0)
                })
                .only(ONE_PER_CLASS),
            ],
        )
        .bench(case("2 of 1024x512", [x([1024, 512]), x([1024, 512])], |g, x| g.concat(x, 1))),
    ]
}

/// The rows of ops that read views.
fn readers() -> Vec<Row> {
    let any = [DType::F32, DType::F16, DType::I32, DType::U8, DType::I64];
    let mut add = vec![];
    let mut select = vec![];
    let mut reduce = vec![];
    let mut matmul = vec![];
    let mut gather = vec![];
    let mut softmax = vec![];
    for (name, look) in VIEWS {
        add.push(
            case(*name, [x([6, 8]), x([4, 6])], move |g, x| {
                let v = look(g, x[0])?;
                g.add(v, x[1])
            })
            .grad(),
        );
        select.push(
            case(*name, [x([6, 8]), x([6, 8]), x([4, 6])], move |g, x| {
                let (a, b) = (look(g, x[0])?, look(g, x[1])?);
                let c = g.lt(a, b)?;
                g.select(c, b, x[2])
            })
            .only(&any[..3]),
        );
        for axis in [0, 1] {
            reduce.push(
                case(format!("{name}, axis {axis}"), [x([6, 8])], move |g, x| {
                    let v = look(g, x[0])?;
                    g.reduce(ReduceKind::Sum, v, &[axis], false)
                })
                .tol(Tol::Sum(6)),
            );
        }
        matmul.push(
            case(*name, [x([6, 8]), x([6, 5])], move |g, x| {
                let v = look(g, x[0])?;
                g.matmul(v, x[1])
            })
            .tol(Tol::Sum(6))
            .grad(),
        );
        matmul.push(
            case(format!("{name}, right"), [x([3, 4]), x([6, 8])], move |g, x| {
                let v = look(g, x[1])?;
                g.matmul(x[0], v)
            })
            .tol(Tol::Sum(4)),
        );
        gather.push(case(*name, [x([6, 8]), ix([2, 3], -4, 4)], move |g, x| {
            let v = look(g, x[0])?;
            g.gather(v, x[1], 0)
        }));
        softmax.push(case(*name, [x([6, 8])], move |g, x| {
            let v = look(g, x[0])?;
            g.softmax(v, 1)
        }));
    }
    // `x[1]` has one element. Its expansion is an operand of `lt` and of both branches of `select`.
    select.push(
        case("one value twice", [x([33]), x([1])], |g, x| {
            let c = g.lt(x[0], x[1])?;
            g.select(c, x[1], x[1])
        })
        .only(&any[..3]),
    );
    vec![
        row("add of views", any.to_vec(), Tol::Ulps(1.0), add),
        row("select of views", any.to_vec(), Tol::Exact, select),
        row("reduce_sum of views", any.to_vec(), Tol::Sum(6), reduce),
        row("matmul of views", any.to_vec(), Tol::Sum(6), matmul),
        row("gather of views", any.to_vec(), Tol::Exact, gather),
        row("softmax of views", vec![DType::F32], Tol::Norm(16.0), softmax),
    ]
}
