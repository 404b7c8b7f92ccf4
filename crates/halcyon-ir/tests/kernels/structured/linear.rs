//! Blocks of weights, and products with weights that are stored by rows.

use super::harness::*;
use halcyon_ir::blocks::BlockType;
use halcyon_ir::kernel::lower::lower_op;
use halcyon_ir::layout::View;
use halcyon_ir::target::{Caps, Declined, Operand};
use halcyon_ir::{DType, Graph, Op, Scalar, TensorType};

fn lower(
    op: &Op,
    x: &[Operand],
    y: &[Operand],
    c: &Caps,
) -> Result<halcyon_ir::kernel::lower::Lowered, Declined> {
    lower_op(op, x, y, false, c)
}

/// Random blocks, whose scales are small numbers. The operand starts at byte `offset`, and `gap` bytes follow
/// each row.
pub(super) fn blocks(
    rng: &mut Rng,
    ty: BlockType,
    lead: &[usize],
    k: usize,
    offset: usize,
    gap: usize,
) -> Input {
    let row = ty.row();
    let bytes = ty.bytes_of(k).unwrap();
    let shape = [lead, &[bytes]].concat();
    let mut strides = vec![1isize; shape.len()];
    for i in (0..lead.len()).rev() {
        strides[i] = strides[i + 1] * if i + 1 == lead.len() { bytes + gap } else { lead[i + 1] } as isize;
    }
    let halves: &[usize] = match ty {
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::MXFP4 => &[],
        _ => &[0],
    };
    let rows: usize = lead.iter().product();
    let mut data = vec![];
    data.resize_with(offset + rows * (bytes + gap), || rng.bits() as u8);
    for r in 0..rows {
        for at in (0..bytes).step_by(row.bytes).map(|i| offset + r * (bytes + gap) + i) {
            for h in halves {
                // Some scales are subnormal.
                let v = [0.03, -0.01, 1e-5, 0.002][(rng.bits() % 4) as usize];
                data[at + h..at + h + 2].copy_from_slice(&Scalar::F(v).to_bytes(DType::F16)[..2]);
            }
            if halves.is_empty() {
                data[at] = [0, 1, 120, 126][(rng.bits() % 4) as usize];
            }
        }
    }
    let view = View { offset: offset as isize, strides: strides.into(), ..View::dense(&shape) };
    Input { operand: Operand { dtype: DType::U8, view }, data }
}

fn small() -> Caps {
    Caps { max_workgroup: 32, workgroup_memory: 1024, ..Caps::generous() }
}

fn all_devices() -> Vec<Caps> {
    [devices(), vec![small()]].concat()
}

#[test]
fn blocks_are_decoded() {
    let mut rng = Rng::new(3);
    for ty in BlockType::ALL.iter().copied() {
        for (offset, gap) in [(0, 0), (3, 5), (32, 2)] {
            let x = blocks(&mut rng, ty, &[2, 3], 512, offset, gap);
            check_on(&devices()[..2], lower, &[x], 2.0, |g, x| g.decode_blocks(x[0], ty));
        }
    }
}

/// A matrix of `rows` by `k` whose rows are `pitch` elements apart.
pub(super) fn pitched(rng: &mut Rng, d: DType, rows: usize, k: usize, pitch: usize, offset: usize) -> Input {
    let view = View::dense(&[rows + 1, pitch]).slice(&[0, 0], &[1, 1], &[rows, k]);
    let view = View { offset: offset as isize, ..view };
    let mut x = Input::random(rng, d, view);
    x.data.extend(vec![0; 16]);
    x
}

#[test]
fn products_with_blocks() {
    if halcyon_test_host::left_out("products_with_blocks") {
        return;
    }
    let mut rng = Rng::new(5);
    for (n, ty) in BlockType::ALL.iter().copied().enumerate() {
        let k = ty.row().elements * [1, 3, 11][n % 3];
        for (m, columns) in [(1, 7), (3, 5), (11, 9)] {
            for (offset, gap) in [(0, 0), (3, 5)] {
                let x = pitched(&mut rng, DType::F32, m, k, k + gap, offset);
                let w = blocks(&mut rng, ty, &[columns], k, offset, gap);
                check_on(&all_devices(), lower, &[x, w], 20.0, |g, x| {
                    g.row_matmul(x[0], x[1], Some(ty), None)
                });
            }
        }
    }
}

#[test]
fn products_with_floats() {
    let mut rng = Rng::new(6);
    for d in [DType::F32, DType::F16, DType::BF16] {
        for (m, n, k) in [(1, 5, 1), (2, 9, 40), (5, 3, 333), (9, 17, 264)] {
            for (pitch, offset) in [(k, 0), (k + 3, 1)] {
                let x = pitched(&mut rng, DType::F32, m, k, pitch, offset);
                let w = pitched(&mut rng, d, n, k, pitch, offset);
                let names = check_on(&all_devices(), lower, &[x, w], 40.0, |g, x| {
                    g.row_matmul(x[0], x[1], None, None)
                });
                assert!(names.iter().all(|n| n == "row_product"));
            }
        }
    }
}

#[test]
fn rows_choose_their_matrix() {
    let mut rng = Rng::new(7);
    for which in [[0.0, 2.0, 1.0, 2.0], [-1.0, 0.0, 3.0, 1.0], [-4.0, 0.0, 0.0, 1.0]] {
        let (k, ty) = (256, BlockType::Q4_K);
        let x = Input::dense(&mut rng, DType::F32, &[4, k]);
        let mut i = Input::dense(&mut rng, DType::I32, &[4]);
        which.iter().enumerate().for_each(|(j, v)| i.set(j, *v));
        let w = blocks(&mut rng, ty, &[3, 5], k, 0, 0);
        let bad = which.iter().any(|v| !(-3.0..3.0).contains(v));
        if !bad {
            check_on(&all_devices(), lower, &[x, w, i], 20.0, |g, x| {
                g.row_matmul(x[0], x[1], Some(ty), Some(x[2]))
            });
            continue;
        }
        let inputs = [x, w, i];
        let (op, out) = call(&inputs, Some(ty));
        let operands: Vec<Operand> = inputs.iter().map(|i| i.operand.clone()).collect();
        for caps in all_devices() {
            let low = lower(&op, &operands, std::slice::from_ref(&out), &caps).unwrap();
            assert!(run_with_fault(&low, &inputs, &out, 32, 1).1);
        }
    }
}

/// The composite of a call, and its result.
fn call(inputs: &[Input], ty: Option<BlockType>) -> (Op, Operand) {
    let mut g = Graph::new();
    let x: Vec<_> = inputs
        .iter()
        .map(|i| g.input("x", TensorType::new(i.operand.dtype, &i.operand.view.shape)))
        .collect();
    let y = g.row_matmul(x[0], x[1], ty, x.get(2).copied()).unwrap();
    let shape = g.shape(y).known().unwrap();
    (g.node(y).op.clone(), Operand { dtype: DType::F32, view: View::dense(&shape) })
}

/// The bits of a row do not depend on the other rows, on their number or on how the operands are aligned.
#[test]
fn products_are_batch_invariant() {
    let mut rng = Rng::new(8);
    let types = BlockType::ALL.iter().copied().map(Some).chain([None]);
    for (n, ty) in types.enumerate() {
        let (m, columns, k) = (13, 6, if ty.is_some() { 512 } else { 200 });
        let d = [DType::F32, DType::F16, DType::BF16][n % 3];
        let x = Input::dense(&mut rng, DType::F32, &[m, k]);
        let w = match ty {
            Some(ty) => blocks(&mut rng, ty, &[columns], k, 0, 0),
            None => Input::dense(&mut rng, d, &[columns, k]),
        };
        for caps in all_devices() {
            let product = |x: &Input, w: &Input| {
                let copy = |i: &Input| Input { operand: i.operand.clone(), data: i.data.clone() };
                let inputs = [copy(x), copy(w)];
                let (op, out) = call(&inputs, ty);
                let operands: Vec<Operand> = inputs.iter().map(|i| i.operand.clone()).collect();
                let low = lower(&op, &operands, std::slice::from_ref(&out), &caps).unwrap();
                run(&low, &inputs, &out, 32, 3)
            };
            let all = product(&x, &w);
            for (first, rows) in [(0, 1), (12, 1), (3, 2), (5, 4), (4, 9)] {
                let view = View { offset: (first * k) as isize, ..View::dense(&[rows, k]) };
                let part = Input { operand: Operand { dtype: DType::F32, view }, data: x.data.clone() };
                let bytes = columns * 4;
                assert!(
                    product(&part, &w) == all[first * bytes..(first + rows) * bytes],
                    "{ty:?} {first} {rows}"
                );
            }
            let moved = |i: &Input| {
                let mut v = i.operand.view.clone();
                v.offset += 1;
                let mut data = vec![0; i.operand.dtype.size()];
                data.extend(&i.data);
                Input { operand: Operand { dtype: i.operand.dtype, view: v }, data }
            };
            assert!(product(&moved(&x), &moved(&w)) == all, "{ty:?}");
        }
    }
}
