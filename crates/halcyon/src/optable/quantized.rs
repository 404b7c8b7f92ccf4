//! Rows of quantisation: conversions to and from 8-bit integers, and products with weights of 4 bits.

use super::case::*;
use crate::DType;
use crate::ir::composite::CompositeKind;
use crate::ir::graph::{Graph, NodeId};

fn f32s() -> Vec<DType> {
    vec![DType::F32]
}

/// Scales of 0.25 to 4: powers of two, with which every quotient is exact.
fn scales<const N: usize>(dims: [usize; N]) -> OperandSpec {
    x(dims).fill(Fill::Values(vec![0.25, 1.0, 0.5, 4.0, 2.0])).of(DType::F32)
}

/// The rows of quantisation.
pub fn rows() -> Vec<Row> {
    vec![quantize(), dequantize(), quantized_matmul()]
}

fn quantize() -> Row {
    let to = |d: DType, axis: Option<usize>| {
        move |g: &mut Graph, x: &[NodeId]| g.quantize(x[0], x[1], x.get(2).copied(), d, axis)
    };
    let wide = || x([5, 33]).range(-300.0, 300.0);
    row(
        CompositeKind::Quantize,
        f32s(),
        Tol::Exact,
        [
            case("i8", [wide(), scales([])], to(DType::I8, None)),
            case(
                "u8 with a zero point",
                [wide(), scales([]), x([]).of(DType::U8).fill(Fill::Values(vec![128.0]))],
                to(DType::U8, None),
            ),
            case("i8 by columns", [wide(), scales([33])], to(DType::I8, Some(1))),
            case("i8 by rows", [wide(), scales([5, 1])], to(DType::I8, None)),
            case("special", [x([40]).fill(Fill::Special), scales([])], to(DType::U8, None)),
        ],
    )
    .bench(case("4096x1024 to u8", [x([4096, 1024]), scales([])], to(DType::U8, None)))
}

fn dequantize() -> Row {
    let from = |axis: Option<usize>| {
        move |g: &mut Graph, x: &[NodeId]| g.dequantize(x[0], x[1], x.get(2).copied(), axis)
    };
    let codes = |d: DType| x([5, 33]).of(d);
    let zero = |d: DType| x([]).of(d).fill(Fill::Values(vec![100.0]));
    row(
        CompositeKind::Dequantize,
        f32s(),
        Tol::Exact,
        [
            case("i8", [codes(DType::I8), scales([])], from(None)),
            case("u8 with a zero point", [codes(DType::U8), scales([]), zero(DType::U8)], from(None)),
            case("i8 by columns", [codes(DType::I8), scales([33])], from(Some(1))),
        ],
    )
    .bench(case("4096x1024 of i8", [x([4096, 1024]).of(DType::I8), scales([])], from(None)))
}

fn quantized_matmul() -> Row {
    let product = |g: &mut Graph, x: &[NodeId]| g.quantized_matmul(x[0], x[1], x[2], x.get(3).copied());
    let codes = |n: usize, k: usize| x([n, k / 2]).of(DType::U8).fill(Fill::Bits);
    let part = |n: usize, k: usize| x([n, k / 32]).range(-0.5, 0.5);
    row(
        CompositeKind::QuantizedMatmul,
        f32s(),
        // The product subtracts the middle of the range from the codes, so terms of both signs cancel even if
        // the operands are magnitudes. Therefore the result on magnitudes gives no bound.
        Tol::Norm(32.0),
        [
            case("one row", [x([1, 64]), codes(9, 64), part(9, 64)], product),
            case("with a minimum", [x([3, 64]), codes(9, 64), part(9, 64), part(9, 64)], product),
            case("more rows than fit registers", [x([2, 17, 32]), codes(20, 32), part(20, 32)], product),
        ],
    )
    .bench(case("1x2048x2048", [x([1, 2048]), codes(2048, 2048), part(2048, 2048)], product))
}
