//! Rows of reductions, products, index ops, sorts, scans and composites.

use super::case::*;
use super::user::{PlusOne, SquareShift};
use super::views::VIEWS;
use crate::DType;
use crate::ir::composite::CompositeKind;
use crate::ir::graph::{Graph, NodeId};
use crate::ir::ops::{ReduceKind, ScatterKind};
use std::sync::Arc;

const BIG: &[DType] = &[DType::F32, DType::I32, DType::F16];

/// The rows of structured ops and composites.
pub fn rows() -> Vec<Row> {
    let mut out = vec![];
    for kind in [ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min] {
        out.push(reduce(kind));
    }
    for max in [true, false] {
        out.push(argreduce(max));
    }
    out.push(matmul());
    out.extend(gathers());
    for kind in [ScatterKind::Set, ScatterKind::Add, ScatterKind::Mul, ScatterKind::Max, ScatterKind::Min] {
        out.extend(scatters(kind));
    }
    out.push(update_slice());
    out.push(slice_at());
    out.push(class_index());
    out.push(argsort());
    for kind in [ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min] {
        out.push(scan(kind));
    }
    out.extend(composites());
    out.push(custom());
    out
}

fn reduce(kind: ReduceKind) -> Row {
    let product = kind == ReduceKind::Prod;
    let extreme = matches!(kind, ReduceKind::Max | ReduceKind::Min);
    // Products must stay within the dtype's range.
    let operand = |dims: &[usize]| OperandSpec {
        dims: dims.to_vec(),
        dtype: None,
        fill: if product { Fill::Range(0.8, 1.25) } else { Fill::Range(-3.0, 3.0) },
    };
    let mut cases = vec![];
    let mut add = |label: &str, dims: &[usize], axes: &'static [usize], keep: bool| {
        let n: usize = axes.iter().map(|a| dims[*a]).product();
        let c = case(label, [operand(dims)], move |g, x| g.reduce(kind, x[0], axes, keep));
        cases.push(if extreme { c } else { c.tol(Tol::Sum(n)) });
        cases.len() - 1
    };
    let mut graded = vec![];
    add("all of 257", &[257], &[0], false);
    graded.push(add("first", &[3, 5, 7], &[0], false));
    graded.push(add("middle, kept", &[3, 5, 7], &[1], true));
    graded.push(add("last", &[3, 5, 7], &[2], false));
    graded.push(add("all", &[3, 5, 7], &[0, 1, 2], false));
    add("outer two", &[3, 5, 7], &[0, 1], true);
    add("first and last", &[3, 5, 7], &[0, 2], false);
    add("rows of 257", &[33, 257], &[1], false);
    add("columns of 257", &[257, 33], &[0], false);
    add("over size 1", &[4, 1, 3], &[1], false);
    add("of nothing", &[0], &[0], false);
    add("over nothing", &[3, 0, 5], &[1], false);
    add("nothing left", &[2, 0], &[0], true);
    let big = if product {
        vec![]
    } else {
        vec![
            add("70001", &[70_001], &[0], false),
            // GPUs compute this reduction in several parts.
            add("69632", &[69_632], &[0], false),
            add("2 rows of 70001", &[2, 70_001], &[1], false),
            add("70001 rows", &[70_001, 2], &[0], false),
        ]
    };
    for i in big {
        cases[i].only = BIG.to_vec();
    }
    for i in graded {
        cases[i].grad = true;
    }
    if !product {
        let c = case(
            "special",
            [operand(&[40, 7]).fill(if extreme { Fill::Special } else { Fill::NonFinite })],
            move |g, x| g.reduce(kind, x[0], &[1], false),
        );
        cases.push(if extreme { c } else { c.tol(Tol::Sum(7)) });
    }
    let dtypes = if extreme { all() } else { numbers() };
    let speed =
        case("rows of 1024x1024", [operand(&[1024, 1024])], move |g, x| g.reduce(kind, x[0], &[1], false));
    row(format!("reduce_{}", kind.name()), dtypes, if extreme { Tol::Equal } else { Tol::Sum(1) }, cases)
        .bench(speed)
}

fn argreduce(max: bool) -> Row {
    let of = |axis: usize, keep: bool, last: bool| {
        move |g: &mut Graph, x: &[NodeId]| g.argreduce(max, x[0], axis, keep, last)
    };
    row(
        if max { "argmax" } else { "argmin" },
        all(),
        Tol::Exact,
        [
            case("257", [x([257])], of(0, false, false)),
            case("first axis", [x([33, 5, 3])], of(0, false, false)),
            case("middle, kept", [x([3, 33, 5])], of(1, true, false)),
            case("ties, first", [x([5, 33]).fill(Fill::Ties)], of(1, false, false)),
            case("ties, last", [x([5, 33]).fill(Fill::Ties)], of(1, false, true)),
            case("special", [x([40, 7]).fill(Fill::Special)], of(1, false, false)),
            case("special, last", [x([40, 7]).fill(Fill::Special)], of(1, true, true)),
            case("one", [x([4, 1])], of(1, false, false)),
            case("no rows", [x([0, 5])], of(1, false, false)),
            case("70001", [x([2, 70_001])], of(1, false, false)).only(BIG),
        ],
    )
    .bench(case("rows of 1024x1024", [x([1024, 1024])], of(1, false, false)))
}

fn matmul() -> Row {
    let mut cases = vec![];
    let mut add = |a: &[usize], b: &[usize]| {
        let k = *a.last().unwrap_or(&1);
        let op = |d: &[usize]| OperandSpec { dims: d.to_vec(), dtype: None, fill: Fill::Range(-2.0, 2.0) };
        cases.push(
            case(format!("{a:?} x {b:?}"), [op(a), op(b)], |g, x| g.matmul(x[0], x[1])).tol(Tol::Sum(k)),
        );
        cases.len() - 1
    };
    let graded = [add(&[3, 5], &[5, 4]), add(&[2, 1, 3, 4], &[3, 4, 2]), add(&[4], &[4, 3])];
    add(&[7, 33], &[33, 5]);
    add(&[1, 257], &[257, 1]);
    add(&[1, 257], &[257, 33]);
    add(&[33, 257], &[257, 1]);
    add(&[257, 1], &[1, 33]);
    add(&[2, 3, 5, 7], &[2, 3, 7, 4]);
    add(&[2, 1, 5, 7], &[3, 7, 4]);
    add(&[3, 5, 7], &[7, 4]);
    add(&[5, 7], &[3, 7, 4]);
    add(&[7, 33], &[33]);
    add(&[33], &[33]);
    add(&[1, 1], &[1, 1]);
    add(&[0, 3], &[3, 2]);
    add(&[3, 0], &[0, 2]);
    add(&[0, 3, 4], &[0, 4, 2]);
    add(&[3, 1000], &[1000, 2]);
    let big = [
        add(&[64, 64], &[64, 64]),
        add(&[130, 71], &[71, 93]),
        add(&[2, 65, 130], &[130, 33]),
        add(&[257, 257], &[257, 65]),
    ];
    for i in big {
        cases[i].only = vec![DType::F32, DType::BF16, DType::F16, DType::I8, DType::F64];
    }
    for i in graded {
        cases[i].grad = true;
    }
    let op = |n: usize, m: usize| x([n, m]);
    for (label, which) in [("left transposed", 0), ("right transposed", 1), ("both transposed", 2)] {
        let (a, b) = if which == 1 {
            (op(33, 20), op(35, 20))
        } else if which == 0 {
            (op(20, 33), op(20, 35))
        } else {
            (op(20, 33), op(35, 20))
        };
        cases.push(
            case(label, [a, b], move |g, x| {
                let a = if which != 1 { g.transpose(x[0], 0, 1)? } else { x[0] };
                let b = if which != 0 { g.transpose(x[1], 0, 1)? } else { x[1] };
                g.matmul(a, b)
            })
            .tol(Tol::Sum(20)),
        );
    }
    cases.push(
        case("special", [x([9, 5]).fill(Fill::NonFinite), x([5, 6])], |g, x| g.matmul(x[0], x[1]))
            .tol(Tol::Sum(5))
            .only(&[DType::F32, DType::F64]),
    );
    let speed = case("512x512 x 512x512", [x([512, 512]), x([512, 512])], |g, x| g.matmul(x[0], x[1]));
    row("matmul", numbers(), Tol::Sum(1), cases).bench(speed)
}

fn gathers() -> Vec<Row> {
    vec![
        row(
            "gather",
            all(),
            Tol::Exact,
            [
                case("rows", [x([7, 5]), ix([4], -7, 7)], |g, x| g.gather(x[0], x[1], 0)).grad(),
                case("columns, 2-D index", [x([5, 7, 3]), ix([2, 4], -7, 7)], |g, x| g.gather(x[0], x[1], 1))
                    .grad(),
                case("rank 0 index", [x([7, 5]), ix([], -7, 7)], |g, x| g.gather(x[0], x[1], 0)),
                case("last axis, i32", [x([3, 33]), ix([9], -33, 33).of(DType::I32)], |g, x| {
                    g.gather(x[0], x[1], 1)
                }),
                case("u8 index", [x([200, 3]), ix([9], 0, 200).of(DType::U8)], |g, x| {
                    g.gather(x[0], x[1], 0)
                })
                .only(ONE_PER_CLASS),
                case("no index", [x([7, 5]), ix([0], 0, 1)], |g, x| g.gather(x[0], x[1], 0)),
                case("from 1-D", [x([257]), ix([33], -257, 257)], |g, x| g.gather(x[0], x[1], 0)),
            ],
        )
        .bench(case("8192 rows of 128", [x([8192, 128]), ix([8192], 0, 8192)], |g, x| {
            g.gather(x[0], x[1], 0)
        })),
        row(
            "gather_elements",
            all(),
            Tol::Exact,
            [
                case("first", [x([7, 5]), ix([4, 5], -7, 7)], |g, x| g.gather_elements(x[0], x[1], 0)).grad(),
                case("last, fewer rows", [x([7, 5]), ix([3, 9], -5, 5)], |g, x| {
                    g.gather_elements(x[0], x[1], 1)
                })
                .grad(),
                case("middle", [x([3, 5, 7]), ix([3, 2, 7], -5, 5).of(DType::I32)], |g, x| {
                    g.gather_elements(x[0], x[1], 1)
                }),
                case("no index", [x([7, 5]), ix([0, 5], 0, 1)], |g, x| g.gather_elements(x[0], x[1], 0)),
            ],
        )
        .bench(case("1024x512", [x([1024, 512]), ix([1024, 512], 0, 512)], |g, x| {
            g.gather_elements(x[0], x[1], 1)
        })),
    ]
}

fn scatters(kind: ScatterKind) -> Vec<Row> {
    let name = format!("{kind:?}").to_lowercase();
    let (dtypes, tol) = match kind {
        ScatterKind::Set => (all(), Tol::Exact),
        ScatterKind::Add | ScatterKind::Mul => (numbers(), Tol::Each(6)),
        ScatterKind::Max | ScatterKind::Min => (numbers(), Tol::Exact),
    };
    let graded = |c: Case| {
        if matches!(kind, ScatterKind::Set | ScatterKind::Add) { c.grad() } else { c }
    };
    let elements = move |axis: usize| {
        move |g: &mut Graph, x: &[NodeId]| g.scatter_elements(x[0], x[1], x[2], axis, kind)
    };
    let rows_ =
        move |axis: usize| move |g: &mut Graph, x: &[NodeId]| g.scatter_rows(x[0], x[1], x[2], axis, kind);
    let small = |dims: OperandSpec| {
        if kind == ScatterKind::Mul { dims.range(0.5, 1.5) } else { dims }
    };
    let x2 = |a: usize, b: usize| small(x([a, b]));
    // Indices without duplicates, for the gradient of `Set`: duplicates have no well-defined derivative.
    let once = ix([3], 0, 1).fill(Fill::Values(vec![4.0, -7.0, 2.0]));
    let each = ix([3, 2], 0, 1).fill(Fill::Values(vec![4.0, 1.0, -7.0, 2.0, 2.0, -1.0]));
    vec![
        row(
            format!("scatter_elements {name}"),
            dtypes.clone(),
            tol,
            [
                case("duplicates, first axis", [x2(7, 5), ix([12, 5], -7, 7), x2(12, 5)], elements(0)),
                case("last axis", [x2(7, 5), ix([3, 9], -5, 5), x2(3, 9)], elements(1)),
                case("i32 index", [x2(7, 5), ix([7, 2], -5, 5).of(DType::I32), x2(7, 2)], elements(1))
                    .only(ONE_PER_CLASS),
                case("no updates", [x2(7, 5), ix([0, 5], 0, 1), x2(0, 5)], elements(0)),
                case("one place", [x([1]), ix([40], 0, 1), small(x([40]))], elements(0))
                    .tol(if matches!(tol, Tol::Each(_)) { Tol::Each(40) } else { tol }),
                graded(
                    case("each once", [x2(7, 3), each, x2(3, 2)], elements(0))
                        .only(&[DType::F32, DType::F64]),
                ),
            ],
        )
        .bench(case("512x512", [x2(512, 512), ix([512, 512], 0, 512), x2(512, 512)], elements(1))),
        row(
            format!("scatter_rows {name}"),
            dtypes,
            tol,
            [
                case("duplicates", [x2(7, 5), ix([12], -7, 7), x2(12, 5)], rows_(0)),
                case(
                    "second axis, 2-D index",
                    [small(x([2, 7, 3])), ix([2, 4], -7, 7), small(x([2, 2, 4, 3]))],
                    rows_(1),
                ),
                case("rank 0 index", [x2(7, 5), ix([], -7, 7), small(x([5]))], rows_(0)),
                case("no updates", [x2(7, 5), ix([0], 0, 1), x2(0, 5)], rows_(0)),
                graded(
                    case("each once", [x2(7, 2), once, x2(3, 2)], rows_(0)).only(&[DType::F32, DType::F64]),
                ),
            ],
        )
        .bench(case(
            "4096 rows of 128",
            [x2(4096, 128), ix([4096], 0, 4096), x2(4096, 128)],
            rows_(0),
        )),
    ]
}

fn update_slice() -> Row {
    let at = |p: f64| ix([], 0, 1).fill(Fill::Values(vec![p]));
    let on = |axis: usize| move |g: &mut Graph, x: &[NodeId]| g.update_slice(x[0], x[1], x[2], axis);
    row(
        "update_slice",
        all(),
        Tol::Exact,
        [
            case("start", [x([7, 5]), x([2, 5]), at(0.0)], on(0)).grad(),
            case("end", [x([7, 5]), x([2, 5]), at(5.0)], on(0)).grad(),
            case("middle, last axis, i32", [x([7, 5]), x([7, 2]), at(1.0).of(DType::I32)], on(1)),
            case("whole", [x([7, 5]), x([7, 5]), at(0.0)], on(0)),
            case("nothing", [x([7, 5]), x([0, 5]), at(3.0)], on(0)),
            case("middle of 3-D", [x([2, 7, 3]), x([2, 1, 3]), at(4.0)], on(1)),
            case("of scratch", [x([7, 5]), x([2, 5]), at(3.0)], |g: &mut Graph, x: &[NodeId]| {
                let c = g.eq(x[0], x[0])?;
                let b = g.select(c, x[0], x[0])?;
                g.update_slice(b, x[1], x[2], 0)
            }),
            case("of a view", [x([5, 7]), x([2, 5]), at(3.0)], |g: &mut Graph, x: &[NodeId]| {
                let t = g.transpose(x[0], 0, 1)?;
                g.update_slice(t, x[1], x[2], 0)
            }),
        ],
    )
    .bench(case("64 rows of 4096x256", [x([4096, 256]), x([64, 256]), at(1000.0)], on(0)))
}

fn argsort() -> Row {
    let of = |axis: usize, down: bool| move |g: &mut Graph, x: &[NodeId]| g.argsort(x[0], axis, down);
    row(
        "argsort",
        all(),
        Tol::Exact,
        [
            case("257", [x([257])], of(0, false)).slow(),
            case("ties", [x([5, 33]).fill(Fill::Ties)], of(1, false)),
            case("ties, descending", [x([5, 33]).fill(Fill::Ties)], of(1, true)),
            case("first axis", [x([33, 5])], of(0, true)),
            case("special", [x([9, 40]).fill(Fill::Special)], of(1, false)).slow(),
            case("special, descending", [x([9, 40]).fill(Fill::Special)], of(1, true)).slow(),
            case("one", [x([4, 1])], of(1, false)),
            case("nothing", [x([4, 0])], of(1, false)),
            case("5000", [x([5000])], of(0, false)).only(BIG),
        ],
    )
    .bench(case("rows of 64x1024", [x([64, 1024])], of(1, false)))
}

fn scan(kind: ReduceKind) -> Row {
    let product = kind == ReduceKind::Prod;
    let exact = matches!(kind, ReduceKind::Max | ReduceKind::Min);
    let of = |axis: usize, exclusive: bool, reverse: bool| {
        move |g: &mut Graph, x: &[NodeId]| g.scan(kind, x[0], axis, exclusive, reverse)
    };
    let y = |i: OperandSpec| if product { i.range(0.8, 1.25) } else { i };
    let long = if product { 33 } else { 257 };
    // For zeros of both signs, it is unspecified which sign the extreme has.
    let sum = |n: usize| if exact { Tol::Equal } else { Tol::Sum(n) };
    let mut cases = vec![
        case("long", [y(x([long]))], of(0, false, false)).tol(sum(long)),
        case("exclusive", [y(x([3, 7, 5]))], of(1, true, false)).tol(sum(7)),
        case("reverse", [y(x([3, 7, 5]))], of(2, false, true)).tol(sum(5)),
        case("exclusive, reverse", [y(x([33, 5]))], of(0, true, true)).tol(sum(33)),
        case("one", [y(x([4, 1]))], of(1, true, false)).tol(sum(1)),
        case("nothing", [y(x([4, 0]))], of(1, false, false)).tol(sum(1)),
    ];
    if !product {
        cases.push(
            case("70001", [x([70_001])], of(0, false, false))
                .tol(sum(70_001))
                .only(&[DType::F32, DType::I32]),
        );
        cases.push(
            case("special", [x([9, 20]).fill(Fill::NonFinite)], of(1, false, false))
                .tol(sum(20))
                .only(&[DType::F32, DType::F64]),
        );
    }
    if kind == ReduceKind::Sum {
        cases.iter_mut().skip(1).take(3).for_each(|c| c.grad = true);
    }
    let speed = case("rows of 1024x1024", [y(x([1024, 1024]))], of(1, false, false));
    row(format!("scan_{}", kind.name()), numbers(), sum(1), cases).bench(speed)
}

fn composites() -> Vec<Row> {
    let mut out = softmaxes();
    out.push(mean());
    out.extend(norms());
    out.extend([attention(), attention_grad(), layer_norm_grad(), leaky_relu(), cross_entropy()]);
    out
}

fn softmaxes() -> Vec<Row> {
    let wide = |i: OperandSpec| i.range(-30.0, 30.0);
    vec![
        row(
            CompositeKind::Softmax,
            floats(),
            Tol::Norm(16.0),
            [
                case("last", [x([5, 33])], |g: &mut Graph, x: &[NodeId]| g.softmax(x[0], 1)).grad(),
                case("first", [x([7, 5])], |g: &mut Graph, x: &[NodeId]| g.softmax(x[0], 0)).grad(),
                case("one row of 257", [wide(x([257]))], |g: &mut Graph, x: &[NodeId]| g.softmax(x[0], 0)),
                case(
                    "minus infinity",
                    [x([2, 4]).fill(Fill::Values(vec![0.0, f64::NEG_INFINITY, 1.0, 2.0]))],
                    |g: &mut Graph, x: &[NodeId]| g.softmax(x[0], 1),
                ),
                case("no rows", [x([0, 4])], |g: &mut Graph, x: &[NodeId]| g.softmax(x[0], 1)),
                case("size 1", [x([4, 1])], |g: &mut Graph, x: &[NodeId]| g.softmax(x[0], 1)),
                case("middle of 3-D", [x([3, 7, 5])], |g: &mut Graph, x: &[NodeId]| g.softmax(x[0], 1)),
            ],
        )
        .bench(case("rows of 1024x1024", [x([1024, 1024])], |g: &mut Graph, x: &[NodeId]| {
            g.softmax(x[0], 1)
        })),
        row(
            CompositeKind::LogSoftmax,
            floats(),
            Tol::Norm(16.0),
            [
                case("last", [x([5, 33])], |g: &mut Graph, x: &[NodeId]| g.log_softmax(x[0], 1)).grad(),
                case("first", [x([7, 5])], |g: &mut Graph, x: &[NodeId]| g.log_softmax(x[0], 0)),
                case("wide", [wide(x([3, 257]))], |g: &mut Graph, x: &[NodeId]| g.log_softmax(x[0], 1)),
            ],
        )
        .bench(case("rows of 1024x1024", [x([1024, 1024])], |g: &mut Graph, x: &[NodeId]| {
            g.log_softmax(x[0], 1)
        })),
    ]
}

fn mean() -> Row {
    row(
        "mean",
        floats(),
        Tol::Sum(105),
        [
            case("last", [x([5, 33])], |g: &mut Graph, x: &[NodeId]| g.mean(x[0], &[1], false)).grad(),
            case("all", [x([3, 5, 7])], |g: &mut Graph, x: &[NodeId]| g.mean(x[0], &[0, 1, 2], true)),
        ],
    )
    .bench(case("rows of 1024x1024", [x([1024, 1024])], |g: &mut Graph, x: &[NodeId]| {
        g.mean(x[0], &[1], false)
    }))
}

fn norms() -> Vec<Row> {
    let norm = |g: &mut Graph, x: &[NodeId]| g.layer_norm(x[0], x[1], Some(x[2]), 1, 1e-5);
    vec![
        row(
            CompositeKind::LayerNorm,
            floats(),
            Tol::Norm(16.0),
            [
                case("rows of 33", [x([5, 33]), x([33]), x([33])], norm).grad(),
                case("rows of 257", [x([3, 257]), x([257]), x([257])], norm),
                case("two axes", [x([3, 4, 5]), x([4, 5]), x([4, 5])], norm),
                case("without bias", [x([3, 7]), x([7])], |g: &mut Graph, x: &[NodeId]| {
                    g.layer_norm(x[0], x[1], None, 1, 1e-5)
                })
                .grad(),
                case("no rows", [x([0, 7]), x([7]), x([7])], norm),
            ],
        )
        .bench(case("rows of 1024x1024", [x([1024, 1024]), x([1024]), x([1024])], norm)),
        row(
            CompositeKind::RmsNorm,
            floats(),
            Tol::Norm(16.0),
            [
                case("rows of 33", [x([5, 33]), x([33])], |g: &mut Graph, x: &[NodeId]| {
                    g.rms_norm(x[0], x[1], 1e-5)
                })
                .grad(),
                case("3-D", [x([2, 3, 64]), x([64])], |g: &mut Graph, x: &[NodeId]| {
                    g.rms_norm(x[0], x[1], 1e-5)
                }),
            ],
        )
        .bench(case(
            "rows of 1024x1024",
            [x([1024, 1024]), x([1024])],
            |g: &mut Graph, x: &[NodeId]| g.rms_norm(x[0], x[1], 1e-5),
        )),
        row(
            CompositeKind::BatchNorm,
            floats(),
            Tol::Norm(24.0),
            [
                case(
                    "2-D",
                    [x([3, 4, 5, 2]), x([4]), x([4]), x([4]), x([4]).range(0.5, 2.0)],
                    |g: &mut Graph, x: &[NodeId]| g.batch_norm(x[0], x[1], x[2], x[3], x[4], 1e-5),
                )
                .grad(),
                case(
                    "no spatial axes",
                    [x([7, 3]), x([3]), x([3]), x([3]), x([3]).range(0.5, 2.0)],
                    |g: &mut Graph, x: &[NodeId]| g.batch_norm(x[0], x[1], x[2], x[3], x[4], 1e-5),
                ),
            ],
        )
        .bench(case(
            "64 channels of 56x56",
            [x([1, 64, 56, 56]), x([64]), x([64]), x([64]), x([64]).range(0.5, 2.0)],
            |g: &mut Graph, x: &[NodeId]| g.batch_norm(x[0], x[1], x[2], x[3], x[4], 1e-5),
        )),
    ]
}

fn layer_norm_grad() -> Row {
    let of =
        |axis: usize| move |g: &mut Graph, x: &[NodeId]| g.layer_norm_grad([x[0], x[1], x[2]], axis, 1e-3);
    row(
        CompositeKind::LayerNormGrad,
        vec![DType::F32, DType::F64],
        Tol::Norm(64.0),
        [
            case("rows", [x([5, 7]), x([7]), x([5, 7])], of(1)),
            case("two axes", [x([3, 4, 6]), x([4, 6]), x([3, 4, 6])], of(1)),
            case("many rows", [x([150, 33]), x([33]), x([150, 33])], of(1)),
            case("gradient", [x([3, 4]), x([4]), x([3, 4])], of(1)).grad(),
        ],
    )
    .bench(case("4096 rows of 384", [x([4096, 384]), x([384]), x([4096, 384])], of(1)))
}

fn attention_grad() -> Row {
    let of = |causal: bool, mask: bool| {
        move |g: &mut Graph, x: &[NodeId]| {
            g.attention_grad([x[0], x[1], x[2], x[3]], mask.then(|| x[4]), causal, 0.35)
        }
    };
    let q = |d: [usize; 4]| x(d).range(-1.0, 1.0);
    row(
        CompositeKind::AttentionGrad,
        floats(),
        Tol::Norm(64.0),
        [
            case(
                "plain",
                [q([2, 3, 5, 8]), q([2, 3, 7, 8]), q([2, 3, 7, 6]), q([2, 3, 5, 6])],
                of(false, false),
            ),
            case(
                "causal",
                [q([1, 2, 9, 8]), q([1, 2, 13, 8]), q([1, 2, 13, 8]), q([1, 2, 9, 8])],
                of(true, false),
            ),
            case(
                "several blocks of queries",
                [q([1, 2, 150, 12]), q([1, 2, 160, 12]), q([1, 2, 160, 12]), q([1, 2, 150, 12])],
                of(true, false),
            ),
            case(
                "mask",
                [q([2, 2, 4, 8]), q([2, 2, 6, 8]), q([2, 2, 6, 8]), q([2, 2, 4, 8]), q([2, 1, 1, 6])],
                of(false, true),
            )
            .only(&[DType::F32, DType::F64])
            .grad(),
        ],
    )
    .bench(case(
        "6 heads, 256 queries and keys, causal",
        [q([4, 6, 256, 64]), q([4, 6, 256, 64]), q([4, 6, 256, 64]), q([4, 6, 256, 64])],
        of(true, false),
    ))
}

fn attention() -> Row {
    let attention = |causal: bool, mask: bool| {
        move |g: &mut Graph, x: &[NodeId]| g.attention(x[0], x[1], x[2], mask.then(|| x[3]), causal, 0.35)
    };
    let q = |d: [usize; 4]| x(d).range(-1.0, 1.0);
    row(
        CompositeKind::Attention,
        floats(),
        Tol::Norm(32.0),
        [
            case("plain", [q([2, 3, 5, 8]), q([2, 3, 7, 8]), q([2, 3, 7, 8])], attention(false, false)),
            case(
                "causal, shared heads",
                [q([1, 4, 5, 8]), q([1, 2, 9, 8]), q([1, 2, 9, 8])],
                attention(true, false),
            ),
            case(
                "mask",
                [q([2, 2, 4, 8]), q([2, 2, 6, 8]), q([2, 2, 6, 8]), q([2, 1, 1, 6])],
                attention(false, true),
            ),
            case(
                "one query",
                [q([1, 2, 1, 16]), q([1, 2, 33, 16]), q([1, 2, 33, 16])],
                attention(true, false),
            ),
            // Few queries with many keys, which GPUs read in several parts.
            case(
                "one query of 517 keys",
                [q([1, 4, 1, 16]), q([1, 1, 517, 16]), q([1, 1, 517, 16])],
                attention(false, false),
            ),
            case(
                "three queries of 300 keys",
                [q([1, 2, 3, 20]), q([1, 1, 300, 20]), q([1, 1, 300, 20]), q([1, 2, 1, 300])],
                attention(true, true),
            ),
            case(
                "prompt",
                [q([1, 4, 20, 24]), q([1, 2, 40, 24]), q([1, 2, 40, 24]), q([1, 1, 20, 40])],
                attention(true, true),
            ),
            // For the first queries, the mask of all keys is the dtype's lowest number. Adding a score to
            // this number does not change it, so all keys have equal weight. f16 is excluded, because there
            // adding a score can change the number, depending on the order of rounding.
            case(
                "prompt, lowest numbers",
                [q([1, 2, 20, 16]), q([1, 2, 40, 16]), q([1, 2, 40, 16])],
                |g: &mut Graph, x: &[NodeId]| {
                    let lowest = match g.dtype(x[0]) {
                        DType::BF16 => -f64::from(half::bf16::MAX),
                        DType::F32 => -f64::from(f32::MAX),
                        _ => f64::MIN,
                    };
                    let row = g.iota(DType::I32, [20usize, 40], 0)?;
                    let two = g.lit(row, 2);
                    let hidden = g.lt(row, two)?;
                    let low = g.lit(x[0], lowest);
                    let none = g.lit(x[0], 0.0);
                    let mask = g.select(hidden, low, none)?;
                    g.attention(x[0], x[1], x[2], Some(mask), false, 0.25)
                },
            )
            .only(&[DType::F32, DType::BF16, DType::F64]),
            case("no keys", [q([1, 2, 3, 8]), q([1, 1, 0, 8]), q([1, 1, 0, 8])], attention(false, false)),
            case("gradient", [q([1, 2, 3, 4]), q([1, 1, 3, 4]), q([1, 1, 3, 4])], attention(true, false))
                .only(&[DType::F32, DType::F64])
                .grad(),
            case(
                "gradient, as many key heads",
                [q([1, 2, 3, 4]), q([1, 2, 4, 4]), q([1, 2, 4, 5])],
                attention(true, false),
            )
            .only(&[DType::F32, DType::F64])
            .grad(),
        ],
    )
    .bench(case(
        "8 heads of 256x64",
        [q([1, 8, 256, 64]), q([1, 8, 256, 64]), q([1, 8, 256, 64])],
        attention(false, false),
    ))
}

fn leaky_relu() -> Row {
    row(
        "leaky_relu",
        floats(),
        Tol::Ulps(2.0),
        [
            case("257", [x([257])], |g: &mut Graph, x: &[NodeId]| g.leaky_relu(x[0], 0.1)),
            case("5", [x([5])], |g: &mut Graph, x: &[NodeId]| g.leaky_relu(x[0], 0.1)).grad(),
        ],
    )
    .bench(case("1 Mi elements", [x([1 << 20])], |g: &mut Graph, x: &[NodeId]| g.leaky_relu(x[0], 0.1)))
}

fn cross_entropy() -> Row {
    let labels = |n: usize, c: i64| ix([n], 0, c);
    row(
        "cross_entropy",
        floats(),
        Tol::Norm(16.0),
        [
            case("7 of 5", [x([7, 5]), labels(7, 5)], |g: &mut Graph, x: &[NodeId]| {
                g.cross_entropy(x[0], x[1], Some(-100))
            })
            .grad(),
            case("images", [x([2, 5, 3, 2]), ix([2, 3, 2], 0, 5).of(DType::U8)], |g, x| {
                g.cross_entropy(x[0], x[1], None)
            })
            .grad(),
            case("of class 1 nothing counts", [x([9, 3]), labels(9, 3)], |g, x| {
                g.cross_entropy(x[0], x[1], Some(1))
            })
            .grad(),
        ],
    )
    .bench(case("1024 of 1024", [x([1024, 1024]), labels(1024, 1024)], |g: &mut Graph, x: &[NodeId]| {
        g.cross_entropy(x[0], x[1], Some(-100))
    }))
}

fn slice_at() -> Row {
    row(
        CompositeKind::SliceAt,
        all(),
        Tol::Exact,
        [
            case("rows", [x([9, 5]), ix([], 0, 5)], |g, x| g.slice_at(x[0], x[1], 0, 4)).grad(),
            case("a column, i32", [x([3, 7, 2]), ix([], 0, 7).of(DType::I32)], |g, x| {
                g.slice_at(x[0], x[1], 1, 1)
            })
            .grad(),
            case("nothing", [x([3, 5]), ix([], 0, 3)], |g, x| g.slice_at(x[0], x[1], 0, 0)),
        ],
    )
    .bench(case("1024 of 8192 rows of 128", [x([8192, 128]), ix([], 0, 7168)], |g, x| {
        g.slice_at(x[0], x[1], 0, 1024)
    }))
}

fn class_index() -> Row {
    row(
        "class_index",
        vec![DType::I64, DType::I32, DType::U8, DType::U64, DType::I16],
        Tol::Exact,
        [
            case("7 of 5", [ix([7], 0, 5)], |g, x| g.class_index(x[0], 5, None)),
            case("one is skipped", [ix([3, 40], 0, 10)], |g, x| g.class_index(x[0], 9, Some(9))),
            case("a class is skipped", [ix([3, 40], 0, 10)], |g, x| g.class_index(x[0], 10, Some(4))),
            case("a view", [ix([6, 8], 0, 5)], |g, x| {
                let v = g.transpose(x[0], 0, 1)?;
                g.class_index(v, 5, None)
            }),
            case("no labels", [ix([0], 0, 1)], |g, x| g.class_index(x[0], 5, None)),
        ],
    )
}

fn custom() -> Row {
    // `tests/shared/custom.rs` has more tests of custom ops.
    let (_, look) = VIEWS[0];
    // With a shift of 0 the result is rounded once, with or without a fused multiply-add.
    let swirl = || Arc::new(SquareShift { shift: 0.0 });
    row(
        "custom",
        vec![DType::F32, DType::F64, DType::I32],
        Tol::Ulps(4.0),
        [
            case("on the host", [x([33])], |g: &mut Graph, x: &[NodeId]| g.custom(Arc::new(PlusOne), x))
                .only(&[DType::F64, DType::I32]),
            case("on the host, rank 0", [x([])], |g: &mut Graph, x: &[NodeId]| {
                g.custom(Arc::new(PlusOne), x)
            }),
            case("with a kernel", [x([257])], move |g: &mut Graph, x: &[NodeId]| g.custom(swirl(), x))
                .tol(Tol::Equal)
                .only(&[DType::F32]),
            case("with a kernel, of a view", [x([6, 8])], move |g: &mut Graph, x: &[NodeId]| {
                let v = look(g, x[0])?;
                g.custom(swirl(), &[v])
            })
            .tol(Tol::Equal)
            .only(&[DType::F32]),
        ],
    )
}
