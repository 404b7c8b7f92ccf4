//! Rows of the small types (packed integers and small floats), which passes store in carriers. `halcyon-ir`
//! tests the conversions on every bit pattern. These rows test that the conversions work on a device, with so
//! few cases that not every pair of dtypes needs a program.

use super::case::*;
use crate::ir::Rounding;
use crate::ir::graph::{Graph, NodeId};
use crate::ir::ops::ReduceKind;
use crate::ir::shape::Shape;
use crate::{ConstData, DType, Result};
use std::sync::Arc;

fn small() -> Vec<DType> {
    DType::all().filter(|d| !d.is_native()).collect()
}

fn bits<const N: usize>(dims: [usize; N]) -> OperandSpec {
    x(dims).fill(Fill::Bits)
}

/// The rows of small types.
pub fn rows() -> Vec<Row> {
    let from = [DType::F32, DType::F32, DType::F64, DType::F16, DType::I32, DType::U64];
    let near = Fill::Values(vec![
        0.0, -0.0, 0.25, 0.75, 1.0, 1.5, 2.5, 5.0, 6.5, -0.3, -9.0, 15.0, 17.0, 240.0, 248.0, 256.0, 448.0,
        463.0, 464.0, 466.0, 57344.0, 61440.0, 61441.0, 1e6, -1e6, 1e-3, 0.00097, 0.0146, 0.0155, 1.5e-5,
        7.7e-6, 1e-9, 1e30, 3e38, -1e30,
    ]);
    let to = small().into_iter().enumerate().flat_map(|(k, to)| {
        let near = near.clone();
        let build = move |g: &mut Graph, x: &[NodeId]| g.cast(x[0], to);
        // Casts to every small type from f32 and from a second dtype. The dtypes in `from` take turns.
        [DType::F32, from[k % from.len()]].into_iter().map(move |d| {
            [
                case(format!("{to} of {d}"), [x([35]).of(d).fill(near.clone())], build),
                case(format!("{to} of any {d}"), [bits([301]).of(d)], build),
            ]
        })
    });
    let constant = |g: &mut Graph, x: &[NodeId]| -> Result<NodeId> {
        let d = g.dtype(x[0]);
        // Too large to be unpacked when the plan is made, and of odd length.
        let bytes: Vec<u8> = (0..d.bytes(70_001)).map(|i| (i * 37 + i / 256) as u8).collect();
        let c = g.constant(ConstData::new(d, &[70_001], Arc::new(bytes))?);
        let c = g.narrow(c, 0, 69_001, 1000)?;
        g.cast(c, DType::F32)
    };
    let moved = |g: &mut Graph, x: &[NodeId]| -> Result<NodeId> {
        let t = g.transpose(x[0], 0, 1)?;
        let y = g.concat(&[t, x[1]], 1)?;
        let y = g.pad(y, &[1, 0], &[0, 1], 1.0)?;
        let y = g.flip(y, &[0])?;
        let c = g.full(DType::I32, Shape::scalar(), 2i64);
        let part = g.narrow(y, 0, 3, 2)?;
        g.update_slice(y, part, c, 0)
    };
    let rounded =
        |rounding, saturate| move |g: &mut Graph, x: &[NodeId]| g.cast_e8m0(x[0], rounding, saturate);
    vec![
        row("cast to a small type", vec![DType::F32], Tol::Exact, to.flatten().collect::<Vec<_>>()),
        row(
            "cast of a small type",
            small(),
            Tol::Exact,
            [DType::F32, DType::I8].map(|to| {
                case(format!("to {to}"), [bits([7, 43])], move |g: &mut Graph, x: &[NodeId]| g.cast(x[0], to))
            }),
        ),
        row("small types move", small(), Tol::Exact, [case("odd", [bits([3, 5]), bits([5, 2])], moved)]),
        row("small constants", small(), Tol::Exact, [case("large", [x([1])], constant)]),
        row(
            "small sums",
            small(),
            Tol::Exact,
            [
                case("add", [bits([7, 9]), bits([7, 9])], |g: &mut Graph, x: &[NodeId]| g.add(x[0], x[1])),
                case("max", [bits([7, 9])], |g: &mut Graph, x: &[NodeId]| {
                    g.reduce(ReduceKind::Max, x[0], &[1], false)
                })
                // The order of the comparisons determines which of two zeros is the maximum.
                .tol(Tol::Equal),
                case("of bits", [bits([33])], |g: &mut Graph, x: &[NodeId]| {
                    let d = g.dtype(x[0]);
                    let other = |o: &DType| o.bits() == d.bits() && *o != d && *o != DType::Bool;
                    let via = DType::all().find(other).unwrap_or(d);
                    let y = g.bitcast(x[0], via)?;
                    g.bitcast(y, d)
                }),
            ],
        ),
        row(
            "saturating cast",
            vec![DType::F32],
            Tol::Exact,
            [DType::I4, DType::F8E4M3FN, DType::F8E5M2].map(|to| {
                case(format!("to {to}"), [bits([301])], move |g: &mut Graph, x: &[NodeId]| {
                    g.cast_saturating(x[0], to)
                })
            }),
        ),
        row(
            "cast to a power of two",
            vec![DType::F32, DType::I64],
            Tol::Exact,
            [
                case("up", [bits([301])], rounded(Rounding::Up, true)),
                case("down", [bits([301])], rounded(Rounding::Down, true)),
                case("nearest", [bits([301])], rounded(Rounding::Nearest, false)),
            ],
        ),
    ]
}
