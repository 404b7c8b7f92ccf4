//! Products of activations and weights on matrix units.

use super::harness::*;
use super::linear::{blocks, pitched};
use crate::tensor::with_matrix_units;
use halcyon_ir::blocks::BlockType;
use halcyon_ir::kernel::lower::lower_op;
use halcyon_ir::layout::View;
use halcyon_ir::ops::RowMatmul;
use halcyon_ir::render::{Language, MATRIX_CUDA, MATRIX_HIP, render};
use halcyon_ir::target::{Caps, Operand};
use halcyon_ir::{DType, Graph, Op, TensorType};
use halcyon_test_host::drawn;

/// Devices with matrix units for bf16, with subgroups of 32 and of 64 work-items, and one with little
/// workgroup memory. A few compute units let products take each tile.
fn units() -> Vec<(Caps, Language)> {
    let cuda = with_matrix_units(&MATRIX_CUDA, 32);
    let small = Caps { workgroup_memory: 38 << 10, ..cuda.clone() };
    vec![
        (Caps { workgroup_memory: 64 << 10, ..with_matrix_units(&MATRIX_HIP, 64) }, Language::Hip),
        (small, Language::Cuda),
        (with_matrix_units(&MATRIX_HIP, 32), Language::Hip),
        (cuda, Language::Cuda),
    ]
}

fn call(inputs: &[Input], options: RowMatmul) -> (Op, Operand) {
    let mut g = Graph::new();
    let x: Vec<_> = inputs
        .iter()
        .map(|i| g.input("x", TensorType::new(i.operand.dtype, &i.operand.view.shape)))
        .collect();
    let y = g.row_matmul(x[0], x[1], options, None).unwrap();
    let shape = g.shape(y).known().unwrap();
    (g.node(y).op.clone(), Operand { dtype: DType::F32, view: View::dense(&shape) })
}

/// The result on a device with matrix units, computed by the kernel for them.
fn product(inputs: &[Input], options: RowMatmul, (caps, language): &(Caps, Language)) -> Vec<u8> {
    let (op, out) = call(inputs, options);
    let operands: Vec<Operand> = inputs.iter().map(|i| i.operand.clone()).collect();
    let low = lower_op(&op, &operands, std::slice::from_ref(&out), false, caps).unwrap();
    assert_eq!(low.steps[0].0.name, "row_product_matrix");
    render(&low.steps[0].0, *language).unwrap();
    run(&low, inputs, &out, caps.subgroup.unwrap(), 5)
}

/// Compares a product on all devices with the reference. `tol` is in epsilons, relative to the largest
/// result.
fn check(inputs: &[Input], options: RowMatmul, tol: f64, what: &str) {
    let (_, ty, want) = reference(inputs, |g, x| g.row_matmul(x[0], x[1], options, None));
    for device in units() {
        let got = product(inputs, options, &device);
        compare(ty.dtype, &got, &want, tol, &format!("{what} on {:?}", device.0.subgroup));
    }
}

const SHAPES: [[usize; 2]; 6] = [[1, 20], [5, 16], [17, 37], [33, 9], [70, 66], [150, 70]];

/// One part of bf16 rounds both operands to 8 bits. With two parts, exchanged weights or scales would be
/// seen.
#[test]
fn blocks_on_matrix_units() {
    if halcyon_test_host::left_out("blocks_on_matrix_units") {
        return;
    }
    let mut rng = Rng::new(21);
    let types = BlockType::ALL;
    let one = drawn("blocks_on_matrix_units", SHAPES.len());
    for (n, ty) in types.iter().copied().enumerate() {
        for (i, [m, columns]) in SHAPES.into_iter().enumerate() {
            if one.is_some_and(|one| i != (one + n) % SHAPES.len()) {
                continue;
            }
            let k = ty.row().elements * [1, 3, 2][(n + i) % 3];
            let (gap, offset) = [(0, 0), (3, 5)][i % 2];
            let x = pitched(&mut rng, DType::F32, m, k, k + gap, offset);
            let w = blocks(&mut rng, ty, &[columns], k, offset, gap);
            for (fine, tol) in [(false, 1e5), (true, 500.0)] {
                let options = RowMatmul { blocks: Some(ty), fine };
                let inputs = [&x, &w].map(|i| Input { operand: i.operand.clone(), data: i.data.clone() });
                check(&inputs, options, tol, &format!("{m}x{columns}x{k}, {ty}, fine {fine}"));
            }
        }
    }
}

#[test]
fn floats_on_matrix_units() {
    let mut rng = Rng::new(22);
    for d in [DType::F16, DType::BF16] {
        for (i, [m, n]) in SHAPES.into_iter().enumerate() {
            let k = [1, 40, 333, 264, 520, 77][i];
            let (pitch, offset) = [(k, 0), (k + 3, 1)][i % 2];
            let x = pitched(&mut rng, DType::F32, m, k, pitch, offset);
            let w = pitched(&mut rng, d, n, k, pitch, offset);
            check(&[x, w], RowMatmul::default(), 60.0, &format!("{m}x{n}x{k}, {d}"));
        }
    }
}

/// The bits of a row do not depend on the other rows or on their number, although the tile does.
#[test]
fn products_on_matrix_units_are_batch_invariant() {
    if halcyon_test_host::left_out("products_on_matrix_units_are_batch_invariant") {
        return;
    }
    let mut rng = Rng::new(23);
    let types = [Some(BlockType::Q4_K), Some(BlockType::Q6_K), Some(BlockType::Q8_0), None];
    let one = drawn("products_on_matrix_units_are_batch_invariant", types.len());
    for (_, ty) in types.into_iter().enumerate().filter(|(i, _)| one.is_none_or(|one| one == *i)) {
        let (m, columns, k) = (140, 20, 2816);
        let x = Input::dense(&mut rng, DType::F32, &[m, k]);
        let w = match ty {
            Some(ty) => blocks(&mut rng, ty, &[columns], k, 0, 0),
            None => Input::dense(&mut rng, DType::F16, &[columns, k]),
        };
        for device in units() {
            for fine in [false, true] {
                let options = RowMatmul { blocks: ty, fine };
                let part = |first: usize, rows: usize| {
                    let view = View { offset: (first * k) as isize, ..View::dense(&[rows, k]) };
                    let x = Input { operand: Operand { dtype: DType::F32, view }, data: x.data.clone() };
                    let w = Input { operand: w.operand.clone(), data: w.data.clone() };
                    product(&[x, w], options, &device)
                };
                let all = part(0, m);
                for (first, rows) in [(0, 1), (139, 1), (3, 2), (5, 9), (40, 20), (70, 60)] {
                    let bytes = columns * 4;
                    let same = part(first, rows) == all[first * bytes..(first + rows) * bytes];
                    assert!(same, "{ty:?}, fine {fine}, rows {first} to {}", first + rows);
                }
            }
        }
    }
}

/// Products that these kernels do not compute: a matrix for each row, and weights in f32.
#[test]
fn other_products_do_not_use_matrix_units() {
    let (caps, _) = &units()[3];
    let mut rng = Rng::new(24);
    let x = Input::dense(&mut rng, DType::F32, &[20, 64]);
    let w = Input::dense(&mut rng, DType::F32, &[30, 64]);
    let (op, out) = call(&[x, w], RowMatmul::default());
    let operands = [[20, 64], [30, 64]].map(|s| Operand { dtype: DType::F32, view: View::dense(&s) });
    let low = lower_op(&op, &operands, &[out], false, caps).unwrap();
    assert_eq!(low.steps[0].0.name, "row_product");
}
