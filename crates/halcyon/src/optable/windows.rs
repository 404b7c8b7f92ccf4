//! Rows of convolution and pooling.

use super::case::*;
use crate::DType;
use crate::ir::Op;
use crate::ir::graph::{Graph, NodeId};
use crate::ir::ops::{Conv, Pool, PoolKind};

/// The rows of convolution and pooling.
pub fn rows() -> Vec<Row> {
    let mut out = vec![conv()];
    let avg = |p| PoolKind::Avg { count_include_pad: p };
    for (name, kind) in
        [("max_pool", PoolKind::Max), ("avg_pool", avg(false)), ("avg_pool, padding counts", avg(true))]
    {
        out.push(pool(name, kind));
    }
    out
}

fn conv() -> Row {
    let mut cases: Vec<Case> = vec![];
    let mut add = |label: &str, xd: &[usize], wd: &[usize], f: &dyn Fn(&mut Conv)| {
        let mut c = Conv::new(xd.len() - 2);
        f(&mut c);
        let k: usize = wd[1..].iter().product();
        let op = |d: &[usize]| OperandSpec { dims: d.to_vec(), dtype: None, fill: Fill::Range(-1.0, 1.0) };
        cases.push(case(label, [op(xd), op(wd)], move |g, x| g.conv(x[0], x[1], c.clone())).tol(Tol::Sum(k)));
        cases.len() - 1
    };
    let pad = |lo: i64, hi: i64| move |c: &mut Conv| c.pad.iter_mut().for_each(|p| *p = (lo, hi));
    let mut graded = vec![
        add("2-D", &[1, 2, 5, 4], &[3, 2, 3, 2], &|_| {}),
        add("2-D, stride 2, padding", &[2, 2, 5, 4], &[2, 2, 3, 3], &|c| {
            c.stride = [2, 1][..].into();
            c.pad = [(1, 0), (1, 2)][..].into();
        }),
        add("1-D, groups, dilation", &[1, 4, 9], &[4, 2, 3], &|c| {
            c.groups = 2;
            c.dilation = [2][..].into();
        }),
        add("negative padding", &[1, 2, 7, 6], &[2, 2, 2, 2], &pad(-1, 1)),
        add("transposed (input dilation)", &[1, 2, 3, 4], &[2, 2, 3, 3], &|c| {
            c.input_dilation = [2, 3][..].into();
            c.pad = [(2, 2), (1, 1)][..].into();
        }),
    ];
    graded.push(add("depthwise", &[1, 3, 5, 5], &[3, 1, 3, 3], &|c| c.groups = 3));
    add("1x1", &[2, 5, 7, 7], &[9, 5, 1, 1], &|_| {});
    add("1x1, stride 2", &[2, 5, 7, 7], &[9, 5, 1, 1], &|c| c.stride = [2, 2][..].into());
    add("3x3 same", &[1, 8, 17, 13], &[16, 8, 3, 3], &pad(1, 1));
    add("batch 3, 33 channels", &[3, 33, 9, 9], &[7, 33, 3, 3], &pad(1, 1));
    add("7x7, stride 2, padding 3", &[1, 3, 33, 33], &[8, 3, 7, 7], &|c| {
        c.stride = [2, 2][..].into();
        c.pad = [(3, 3), (3, 3)][..].into();
    });
    add("depthwise with multiplier", &[2, 4, 9, 7], &[8, 1, 3, 3], &|c| {
        c.groups = 4;
        c.pad = [(1, 1), (1, 1)][..].into();
    });
    add("groups of several", &[2, 6, 9, 7], &[9, 2, 3, 2], &|c| {
        c.groups = 3;
        c.stride = [1, 2][..].into();
    });
    add("1-D", &[2, 3, 257], &[5, 3, 7], &|c| c.pad = [(3, 3)][..].into());
    add("3-D", &[1, 2, 5, 6, 4], &[3, 2, 2, 3, 2], &|c| {
        c.stride = [1, 2, 1][..].into();
        c.pad = [(1, 0), (1, 1), (0, 1)][..].into();
    });
    add("dilation 2 and 3", &[1, 2, 11, 12], &[3, 2, 3, 3], &|c| c.dilation = [2, 3][..].into());
    add("window as large as the input", &[1, 2, 3, 3], &[4, 2, 3, 3], &|_| {});
    add("no batch", &[0, 2, 5, 5], &[3, 2, 3, 3], &|_| {});
    add("1-D transposed", &[2, 3, 9], &[4, 3, 4], &|c| {
        c.input_dilation = [2][..].into();
        c.pad = [(3, 2)][..].into();
    });
    for i in graded {
        cases[i].grad = true;
    }
    cases.push(
        case(
            "views",
            [x([5, 7, 2, 1]).range(-1.0, 1.0), x([3, 2, 3, 2]).range(-1.0, 1.0)],
            |g: &mut Graph, x: &[NodeId]| {
                let (a, w) = (g.permute(x[0], &[3, 2, 1, 0])?, g.flip(x[1], &[2, 3])?);
                g.conv(a, w, Conv::new(2))
            },
        )
        .tol(Tol::Sum(12)),
    );
    let speed = case("3x3, 64 to 64 channels, 56x56", [x([1, 64, 56, 56]), x([64, 64, 3, 3])], |g, x| {
        let mut c = Conv::new(2);
        c.pad.iter_mut().for_each(|p| *p = (1, 1));
        g.conv(x[0], x[1], c)
    });
    row("conv", floats(), Tol::Sum(1), cases).bench(speed)
}

fn pool(name: &str, kind: PoolKind) -> Row {
    let max = kind == PoolKind::Max;
    let make = |k: &[usize], s: &[usize], p: &[(usize, usize)], d: &[usize]| Pool {
        kind,
        kernel: k.into(),
        stride: s.into(),
        pad: p.into(),
        dilation: d.into(),
    };
    let shapes: Vec<(&str, Vec<usize>, Pool)> = vec![
        ("2x2", vec![1, 2, 4, 6], make(&[2, 2], &[2, 2], &[(0, 0); 2], &[1, 1])),
        ("3x3, stride 2, padding 1", vec![2, 3, 7, 9], make(&[3, 3], &[2, 2], &[(1, 1); 2], &[1, 1])),
        ("overlapping, uneven padding", vec![1, 2, 5, 7], make(&[3, 2], &[1, 1], &[(1, 0), (0, 1)], &[1, 1])),
        ("1-D", vec![2, 3, 33], make(&[5], &[3], &[(2, 2)], &[1])),
        ("3-D", vec![1, 2, 5, 4, 6], make(&[2, 3, 2], &[1, 1, 2], &[(0, 1), (1, 1), (0, 0)], &[1, 1, 1])),
        ("dilation", vec![1, 2, 9, 9], make(&[3, 2], &[1, 2], &[(1, 1), (0, 0)], &[2, 3])),
        ("whole", vec![2, 3, 5, 7], make(&[5, 7], &[1, 1], &[(0, 0); 2], &[1, 1])),
        ("no batch", vec![0, 3, 5, 7], make(&[2, 2], &[1, 1], &[(0, 0); 2], &[1, 1])),
    ];
    let mut cases = vec![];
    for (label, dims, p) in shapes {
        let operand = OperandSpec { dims, dtype: None, fill: Fill::Range(-3.0, 3.0) };
        let n: usize = p.kernel.iter().product();
        // It is unspecified whether 0 or -0 is the maximum, so the results are compared as numbers.
        let tol = if max { Tol::Equal } else { Tol::Sum(n) };
        let q = p.clone();
        cases.push(case(label, [operand.clone()], move |g, x| g.pool(x[0], q.clone())).tol(tol).grad());
        let q = p.clone();
        // The gradient as an op of its own. The upstream gradient is twice the result, so that it has the
        // right shape.
        cases.push(
            case(format!("gradient, {label}"), [operand.clone()], move |g: &mut Graph, x: &[NodeId]| {
                let y = g.pool(x[0], q.clone())?;
                let k = g.lit(y, 2.0);
                let dy = g.mul(y, k)?;
                g.push(Op::PoolGrad(q.clone()), &[x[0], y, dy], None)
            })
            .tol(Tol::Norm(8.0))
            .only(&[DType::F32, DType::F64, DType::F16, DType::BF16]),
        );
        if max {
            let q = p.clone();
            cases.push(
                case(format!("special, {label}"), [operand.fill(Fill::Special)], move |g, x| {
                    g.pool(x[0], q.clone())
                })
                .tol(tol),
            );
        }
    }
    let dtypes = if max { numbers() } else { floats() };
    let (dims, p) = (vec![1, 64, 56, 56], make(&[3, 3], &[2, 2], &[(1, 1); 2], &[1, 1]));
    let operand = OperandSpec { dims, dtype: None, fill: Fill::Range(-3.0, 3.0) };
    let speed = case("64 channels of 56x56, 3x3, stride 2", [operand], move |g, x| g.pool(x[0], p.clone()));
    row(name, dtypes, Tol::Exact, cases).bench(speed)
}
