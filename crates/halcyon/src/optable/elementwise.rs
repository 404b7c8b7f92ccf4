//! Rows of scalar ops, casts and leaves (ops without operands).

use super::case::*;
use crate::ir::graph::{Graph, NodeId};
use crate::ir::ops::element_wise::{ROWS, Rule};
use crate::ir::shape::TensorType;
use crate::ir::{Op, ScalarOp};
use crate::{ConstData, DType, Result, Scalar};
use std::sync::Arc;

/// The rows of scalar ops, casts and leaves.
pub fn rows() -> Vec<Row> {
    let mut out: Vec<Row> = ROWS.iter().map(|r| scalar(r.op)).collect();
    out.extend(casts());
    out.extend(leaves());
    out
}

/// Operands of a scalar op with the given shapes.
fn operands(op: ScalarOp, dims: &[Vec<usize>], fill: impl Fn(usize) -> Fill) -> Vec<OperandSpec> {
    (0..op.arity())
        .map(|k| OperandSpec {
            dims: dims[k % dims.len()].clone(),
            dtype: (k == 0 && op.row().rule == Rule::Select).then_some(DType::Bool),
            fill: fill(k),
        })
        .collect()
}

fn scalar(op: ScalarOp) -> Row {
    let r = op.row();
    let dtypes: Vec<DType> = DType::native().filter(|d| op.takes(*d)).collect();
    let tol = match op {
        // It is unspecified which of two zeros results.
        ScalarOp::Relu | ScalarOp::Min | ScalarOp::Max => Tol::Equal,
        // For negative operands the result is a difference of nearly equal numbers, so the error is relative
        // to the operand.
        ScalarOp::Gelu | ScalarOp::GeluTanh => Tol::Sum(100),
        ScalarOp::Fma => Tol::Fused(r.ulps),
        _ if r.ulps == 0.0 => Tol::Exact,
        _ => Tol::Ulps(r.ulps),
    };
    let build = move |g: &mut Graph, x: &[NodeId]| g.scalar(op, x);
    let domain = |_: usize| Fill::Range(r.domain.0, r.domain.1);
    let one = |label: &str, dims: Vec<usize>| case(label, operands(op, &[dims], domain), build);
    let mut cases = vec![one("257", vec![257]), one("7x33", vec![7, 33])];
    if r.on.contains('f') {
        cases.push(case("special", operands(op, &[vec![311]], |_| Fill::Special), build));
    }
    // One dtype of each class, for shapes that compile separate programs.
    let few = |c: Case| c.only(ONE_PER_CLASS);
    cases.push(few(one("rank 0", vec![])));
    cases.push(few(one("one", vec![1])));
    cases.push(few(one("empty", vec![3, 0, 2])));
    if r.rule != Rule::Test {
        cases.push(one("gradient", vec![5]).only(&[DType::F32, DType::F64]).grad());
    }
    if op.arity() > 1 {
        let dims = [vec![3, 1, 5], vec![4, 1], vec![3, 4, 5]];
        cases.push(few(case("broadcast", operands(op, &dims, domain), build)).grad_if(r.rule != Rule::Test));
    }
    let speed = one("1 Mi elements", vec![1 << 20]);
    row(r.name, dtypes, tol, cases).bench(speed)
}

impl Case {
    fn grad_if(self, yes: bool) -> Case {
        if yes { self.grad() } else { self }
    }
}

fn casts() -> Vec<Row> {
    let mut out = vec![];
    for to in DType::native() {
        let build = move |g: &mut Graph, x: &[NodeId]| g.cast(x[0], to);
        // Values around the ends of every integer dtype, halves for rounding, and values that only floats
        // have.
        let ends = Fill::Values(vec![
            0.5,
            1.5,
            2.5,
            -0.5,
            -1.5,
            0.99,
            -0.99,
            126.5,
            127.0,
            128.0,
            -128.0,
            -129.0,
            255.0,
            256.0,
            300.0,
            32767.0,
            32768.0,
            -32769.0,
            65504.0,
            65535.0,
            65536.0,
            2147483520.0,
            2147483647.0,
            2147483648.0,
            -2147483904.0,
            4294967040.0,
            4294967296.0,
            9.2e18,
            9.3e18,
            -9.3e18,
            1.8e19,
            1.9e19,
            1e-7,
            3e-8,
            1e-40,
            1.0009765625,
            1.00048828125,
            2049.0,
            2051.0,
            257.0,
            259.0,
            16777217.0,
            16777219.0,
        ]);
        let from: Vec<DType> = DType::native().filter(|d| *d != to).collect();
        // Devices convert wide integers to 16-bit floats through f32, which may round twice.
        let half = matches!(to, DType::F16 | DType::BF16);
        let (twice, once): (Vec<DType>, Vec<DType>) =
            from.iter().partition(|d| half && d.is_int() && d.bits() >= 32);
        let cases = [
            case("ends", [x([45]).fill(ends)], build),
            case("special", [x([201]).fill(Fill::Special)], build),
            case("any", [x([7, 33])], build),
        ];
        let mut all: Vec<Case> = cases.iter().map(|c| c.clone().only(&once)).collect();
        if !twice.is_empty() {
            all.extend(cases.map(|c| c.only(&twice).tol(Tol::Ulps(1.0))));
        }
        let speed = case("1 Mi elements", [x([1 << 20])], build);
        out.push(row(format!("cast to {to}"), from, Tol::Exact, all).bench(speed));
    }
    let widen = |g: &mut Graph, x: &[NodeId]| {
        let y = g.cast(x[0], DType::F64)?;
        g.cast(y, DType::F32)
    };
    out.push(row("cast", vec![DType::F32], Tol::Exact, [case("there and back", [x([6])], widen).grad()]));
    for to in DType::native() {
        let from: Vec<DType> = DType::native().filter(|d| *d != to && d.bits() == to.bits()).collect();
        if from.is_empty() {
            continue;
        }
        let build = move |g: &mut Graph, x: &[NodeId]| g.bitcast(x[0], to);
        // A bool is stored as 0 or 1; other bytes are invalid.
        let fill =
            if to == DType::Bool { Fill::Values(vec![0.0, 1.0, 1.0]) } else { Fill::Range(-900.0, 900.0) };
        out.push(row(
            format!("bitcast to {to}"),
            from,
            Tol::Exact,
            [case("any", [x([257]).fill(fill)], build)],
        ));
    }
    out
}

fn leaves() -> Vec<Row> {
    fn like(g: &Graph, x: NodeId) -> DType {
        g.dtype(x)
    }
    let iota = |axis: usize| {
        // The operand only gives the dtype; it is not read, because adding 0·x would propagate NaN.
        move |g: &mut Graph, x: &[NodeId]| {
            let d = like(g, x[0]);
            g.iota(d, [3usize, 300, 2], axis)
        }
    };
    let constant = |g: &mut Graph, x: &[NodeId]| -> Result<NodeId> {
        let d = like(g, x[0]);
        let bytes: Vec<u8> =
            (0..40).flat_map(|i| Scalar::I(i * 7 - 50).to_bytes(d)[..d.size()].to_vec()).collect();
        let c = g.constant(ConstData::new(d, &[4, 10], Arc::new(bytes))?);
        let t = g.transpose(c, 0, 1)?;
        g.select_any(t)
    };
    vec![
        row(
            "iota",
            numbers(),
            Tol::Exact,
            [
                case("first", [x([1])], iota(0)),
                case("middle", [x([1])], iota(1)),
                case("last", [x([1])], iota(2)),
            ],
        ),
        row(
            "full",
            all(),
            Tol::Exact,
            [
                case("3", [x([1])], |g: &mut Graph, x: &[NodeId]| {
                    Ok(g.full(like(g, x[0]), [5usize, 7], 3.0))
                }),
                case("empty", [x([1])], |g: &mut Graph, x: &[NodeId]| {
                    Ok(g.full(like(g, x[0]), [5usize, 0], 3.0))
                }),
                case("rank 0", [x([1])], |g: &mut Graph, x: &[NodeId]| {
                    Ok(g.full(like(g, x[0]), Vec::<usize>::new(), -2.5))
                }),
            ],
        ),
        row("const", all(), Tol::Exact, [case("permuted", [x([1])], constant)]),
        row(
            "arg",
            vec![DType::F32],
            Tol::Exact,
            DType::native()
                .map(|d| {
                    let mut c = case(format!("of {d}"), [x([1])], |g: &mut Graph, x: &[NodeId]| {
                        g.push(Op::Expand, &[x[1]], Some(TensorType::new(g.dtype(x[1]), [3usize, 5])))
                    });
                    c.args = vec![d];
                    c
                })
                .collect::<Vec<_>>(),
        ),
        row(
            "input",
            all(),
            Tol::Exact,
            [
                case("as it is", [x([7, 3])], |_: &mut Graph, x: &[NodeId]| Ok(x[0])),
                case("rank 0", [x([])], |_: &mut Graph, x: &[NodeId]| Ok(x[0])),
                case("empty", [x([0])], |_: &mut Graph, x: &[NodeId]| Ok(x[0])),
            ],
        ),
    ]
}

trait SelectAny {
    /// Passes the value through an op, so that it is computed and not only passed on.
    fn select_any(&mut self, x: NodeId) -> Result<NodeId>;
}
impl SelectAny for Graph {
    fn select_any(&mut self, x: NodeId) -> Result<NodeId> {
        let s = self.shape(x).clone();
        let c = self.full(DType::Bool, s, true);
        self.select(c, x, x)
    }
}
