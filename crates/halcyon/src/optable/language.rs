//! Rows of language models: weights in blocks, products with weights stored by rows, and attention over a
//! cache.

use super::case::*;
use crate::DType;
use crate::ir::blocks::BlockType;
use crate::ir::composite::CompositeKind;
use crate::ir::graph::{Graph, NodeId};
use crate::ir::ops::{CacheOperands, CachedAttention, RowMatmul};

fn f32s() -> Vec<DType> {
    vec![DType::F32]
}

/// Weights `dims` whose last axis holds `k` elements in blocks.
fn blocks<const N: usize>(t: BlockType, mut dims: [usize; N]) -> OperandSpec {
    let k = dims[N - 1];
    dims[N - 1] = t.bytes_of(k).unwrap_or(0);
    x(dims).of(DType::U8).fill(Fill::Blocks(t))
}

/// The rows of language models.
pub fn rows() -> Vec<Row> {
    vec![decode_blocks(), linear(), cached_attention()]
}

fn decode_blocks() -> Row {
    let cases = BlockType::ALL.iter().map(|&t| {
        let decode = move |g: &mut Graph, x: &[NodeId]| g.decode_blocks(x[0], t);
        case(t.name(), [blocks(t, [3, 5, 2 * t.row().elements])], decode)
    });
    let t = BlockType::Q4_K;
    row("decode_blocks", f32s(), Tol::Norm(4.0), cases.collect::<Vec<_>>()).bench(case(
        "2048x2048 of q4_k",
        [blocks(t, [2048, 2048])],
        move |g: &mut Graph, x: &[NodeId]| g.decode_blocks(x[0], t),
    ))
}

/// Rounding the activations of 32 weights to 8 bits changes them by at most 1/254 of their largest magnitude.
/// For random signs the standard deviation of an error of a sum is about 0.3 % of the largest of few results.
/// The tolerance is ten deviations, 3 %, because the table compares hundreds of thousands of results.
const BYTES: Tol = Tol::Norm(250_000.0);

/// The same for 15 bits, which makes errors 128 times smaller. These cases find exchanged weights and scales.
const FINE: Tol = Tol::Norm(250_000.0 / 128.0 + 64.0);

fn linear() -> Row {
    let product = |t: Option<BlockType>| {
        move |g: &mut Graph, x: &[NodeId]| g.row_matmul(x[0], x[1], t, x.get(2).copied())
    };
    let fine = |t: BlockType| {
        let options = RowMatmul { blocks: Some(t), fine: true };
        move |g: &mut Graph, x: &[NodeId]| g.row_matmul(x[0], x[1], options, None)
    };
    let mut cases = vec![];
    for m in [1, 3, 33] {
        for d in [DType::F32, DType::F16, DType::BF16] {
            let w = x([21, 70]).of(d);
            cases.push(case(format!("{m} rows, {d}"), [x([m, 70]), w], product(None)));
        }
    }
    let which = |m: usize| x([m]).of(DType::I32).fill(Fill::Index(0, 5));
    cases.push(case("experts in f32", [x([9, 40]), x([5, 18, 40]), which(9)], product(None)));
    for &t in BlockType::ALL {
        let k = 2 * t.row().elements;
        for m in [1, 5, 40] {
            let w = blocks(t, [35, k]);
            cases.push(case(format!("{m} rows, {t}"), [x([m, k]), w], product(Some(t))).tol(BYTES));
        }
        let w = blocks(t, [35, k]);
        cases.push(case(format!("7 rows, {t}, fine"), [x([7, k]), w], fine(t)).tol(FINE));
        let (w, rows) = (blocks(t, [5, 19, k]), x([6, k]));
        cases.push(case(format!("experts, {t}"), [rows, w, which(6)], product(Some(t))).tol(BYTES));
    }
    let t = BlockType::Q4_K;
    row(CompositeKind::RowMatmul, f32s(), Tol::Norm(64.0), cases).bench(case(
        "1x2048x2048, q4_k",
        [x([1, 2048]), blocks(t, [2048, 2048])],
        product(Some(t)),
    ))
}

/// The sizes of a case of attention.
struct Sizes {
    rows: usize,
    heads: usize,
    shared: usize,
    page: usize,
    key: usize,
    value: usize,
}

fn cached(
    name: &str,
    s: Sizes,
    // Types of keys and of values; u8 are blocks.
    kept: [DType; 2],
    options: CachedAttention,
    positions: &[i64],
    sinks: bool,
) -> Case {
    let pages = 7;
    let ints = |v: Vec<f64>, n: usize| x([n]).of(DType::I32).fill(Fill::Values(v));
    let table = x([2, 3]).of(DType::I32).fill(Fill::Values(vec![4.0, 1.0, 6.0, 2.0, 5.0, 3.0]));
    let sequence = ints((0..s.rows).map(|i| (i % 2) as f64).collect(), s.rows);
    let position = ints(positions.iter().map(|p| *p as f64).collect(), s.rows);
    let cache = |d: DType, size: usize| {
        let dims = [pages, s.shared, s.page, size];
        if d == DType::U8 { blocks(BlockType::Q8_0, dims) } else { x(dims).of(d) }
    };
    let (keys, values) = (cache(kept[0], s.key), cache(kept[1], s.value));
    let mut ins = vec![x([s.rows, s.heads, s.key]), keys, values, table, sequence, position];
    if sinks {
        ins.push(x([s.heads]));
    }
    case(name, ins, move |g: &mut Graph, x: &[NodeId]| {
        let cache = CacheOperands {
            keys: x[1],
            values: x[2],
            table: x[3],
            sequence: x[4],
            position: x[5],
            sinks: x.get(6).copied(),
        };
        g.cached_attention(x[0], cache, options)
    })
}

fn cached_attention() -> Row {
    use DType::{BF16, F16, F32, U8};
    let plain = CachedAttention { scale: 0.3, softcap: None, window: None };
    let s = |rows, heads, shared| Sizes { rows, heads, shared, page: 4, key: 12, value: 12 };
    let all = CachedAttention { softcap: Some(5.0), window: Some(4), ..plain };
    let other = Sizes { rows: 3, heads: 3, shared: 1, page: 4, key: 20, value: 7 };
    // Numbers in these blocks are up to 16.
    let small = CachedAttention { scale: 0.01, ..plain };
    let b = |rows, heads, shared| Sizes { key: 64, value: 32, ..s(rows, heads, shared) };
    let each = CachedAttention { scale: 0.01, ..all };
    row(
        CompositeKind::CachedAttention,
        f32s(),
        Tol::Norm(64.0),
        [
            cached("one row", s(1, 2, 2), [F32, F32], plain, &[7], false),
            cached("rows of two sequences", s(5, 4, 2), [F32, F32], plain, &[0, 11, 3, 5, 10], false),
            cached("f16", s(3, 4, 1), [F16, F16], plain, &[9, 2, 4], false),
            cached("bf16 with unused rows", s(4, 2, 1), [BF16, BF16], plain, &[9, -1, 0, -1], false),
            cached("window, cap and sinks", s(6, 6, 3), [F32, F32], all, &[0, 1, 5, 11, 8, 4], true),
            cached("other sizes of values", other, [F32, F32], plain, &[3, 11, 6], false),
            cached("one row, blocks", b(1, 6, 2), [U8, U8], small, &[11], false),
            cached("rows, blocks", b(5, 4, 2), [U8, U8], small, &[0, 11, 3, -1, 10], false),
            cached("window, cap and sinks, blocks", b(4, 3, 3), [U8, U8], each, &[0, 11, 7, 2], true),
            cached("keys in blocks, values in f16", b(3, 4, 1), [U8, F16], small, &[9, 2, 4], false),
            cached("keys in f32, values in blocks", b(3, 2, 2), [F32, U8], plain, &[11, 0, 5], false),
        ],
    )
}
