//! Calls of the composite: packed and plain weights, the numbers of matrices, and what is declined.

use crate::cpu::library::testing::*;
use crate::cpu::library::{CpuKernel, Fault, Run, find};
use crate::cpu::memory::Ptr;
use crate::cpu::sys::Isa;
use crate::cpu::team::Team;
use halcyon_ir::blocks::BlockType;
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::target::{LibraryCall, LibraryKernel, Operand, Work};
use halcyon_ir::{DType, Graph, TensorType};
use std::sync::atomic::{AtomicU32, Ordering};

fn operand(dtype: DType, dims: &[usize]) -> Operand {
    Operand { dtype, view: View::dense(dims) }
}

/// The composite for these operands: activations, weights and perhaps numbers of matrices.
fn op(blocks: Option<BlockType>, ins: &[Operand]) -> Op {
    let mut g = Graph::new();
    let x: Vec<_> = ins.iter().map(|o| g.input("x", TensorType::new(o.dtype, &o.view.shape))).collect();
    let y = g.row_matmul(x[0], x[1], blocks, x.get(2).copied()).unwrap();
    g.node(y).op.clone()
}

fn at<T: Copy>(g: &Guarded<T>, write: bool) -> Ptr {
    Ptr { ptr: g.mut_ptr().cast(), bytes: size_of_val(g.slice()), read_only: !write }
}

/// Runs the kernel in poisoned memory. Returns the result and the fault word.
fn run(kernel: &CpuKernel, isa: Isa, ins: &[Ptr], results: usize) -> (Vec<f32>, u32) {
    let team = Team::new(2);
    let room = Guarded::new(&vec![255u8; kernel.packing().map_or(0, |p| p.bytes)], Side::End);
    let y = Guarded::new(&vec![f32::NAN; results], Side::End);
    let work = Guarded::new(&vec![255u8; kernel.workspace()], Side::Start);
    let mut bufs = ins.to_vec();
    if kernel.packing().is_some() {
        // SAFETY: both buffers are live, and nothing else uses them.
        unsafe { kernel.pack(&team, &bufs[1], &at(&room, true)) }.unwrap();
        bufs[1] = at(&room, false);
    }
    bufs.extend([at(&y, true), at(&work, true)]);
    let word = AtomicU32::new(0);
    // SAFETY: the buffers are live, and nothing else uses them.
    unsafe { kernel.run(&Run { bufs: &bufs, args: &[], team: &team, isa, fault: Fault::new(&word, 7) }) }
        .unwrap();
    (y.slice().to_vec(), word.load(Ordering::Relaxed))
}

#[test]
fn packed_and_plain_calls_agree_and_bad_numbers_are_faults() {
    let mut rng = Rng::new();
    let (m, n, k, matrices) = (6, 37, 512, 3);
    for blocks in [None, Some(BlockType::Q8_0), Some(BlockType::Q4_K)] {
        let bytes = blocks.map_or(4 * k, |b| b.bytes_of(k).unwrap());
        let w: Vec<u8> = match blocks {
            None => rng.vec(matrices * n * k).iter().flat_map(|v| v.to_le_bytes()).collect(),
            // Small bytes are small scales.
            Some(_) => (0..matrices * n * bytes).map(|_| rng.below(60) as u8).collect(),
        };
        let (x, w) = (Guarded::new(&rng.vec(m * k), Side::End), Guarded::new(&w, Side::End));
        let (dtype, width) = blocks.map_or((DType::F32, k), |b| (DType::U8, b.bytes_of(k).unwrap()));
        let ins =
            [operand(DType::F32, &[m, k]), operand(dtype, &[matrices, n, width]), operand(DType::I64, &[m])];
        let (op, out) = (op(blocks, &ins), [operand(DType::F32, &[m, n])]);
        let plain = LibraryCall::new(Work::Op(&op), &ins, &out);
        for isa in Isa::available() {
            for (numbers, near, fault) in [
                ([0i64, 2, 1, -1, 2, 0], [0, 2, 1, 2, 2, 0], 0),
                ([0, 3, 1, 0, -9, 1], [0, 2, 1, 0, 0, 1], 7),
            ] {
                let mut results = vec![];
                for numbers in [numbers, near] {
                    let which = Guarded::new(&numbers, Side::End);
                    let bufs = [at(&x, false), at(&w, false), at(&which, false)];
                    for constants in [&[][..], &[1]] {
                        let kernel = find(isa, 2, &LibraryCall { constants, ..plain }).unwrap();
                        assert_eq!(kernel.packing().is_some(), !constants.is_empty());
                        assert!(kernel.name().starts_with("cpu.linear."), "{}", kernel.name());
                        let (y, word) = run(&kernel, isa, &bufs, m * n);
                        assert_eq!(word, if numbers == near { 0 } else { fault });
                        assert!(y.iter().all(|y| y.is_finite()));
                        results.push(y);
                    }
                }
                assert!(results.iter().all(|y| *y == results[0]), "{blocks:?} on {isa:?}");
            }
        }
    }
}

#[test]
fn strided_weights_are_declined_and_offsets_are_not() {
    let mut rng = Rng::new();
    let (m, n, k) = (3, 20, 9);
    let (x, w) = (rng.vec(m * k), rng.vec(n * k + 5));
    let mut ins = [operand(DType::F32, &[m, k]), operand(DType::F32, &[n, k])];
    let (op, out) = (op(None, &ins), [operand(DType::F32, &[m, n])]);
    let product = |w: &[f32], ins: &[Operand], constants: &[usize]| {
        let call = LibraryCall { constants, ..LibraryCall::new(Work::Op(&op), ins, &out) };
        let kernel = find(Isa::best(), 2, &call).unwrap();
        let (x, w) = (Guarded::new(&x, Side::End), Guarded::new(w, Side::End));
        run(&kernel, Isa::best(), &[at(&x, false), at(&w, false)], m * n).0
    };
    let want = product(&w[5..], &ins, &[]);
    ins[1].view.offset = 5;
    assert_eq!(product(&w, &ins, &[]), want);
    assert_eq!(product(&w, &ins, &[1]), want);
    ins[1].view.strides[0] += 1;
    assert!(find(Isa::best(), 2, &LibraryCall::new(Work::Op(&op), &ins, &out)).is_err());
}

/// A composite of this name with another body may reach a device, for example from a graph in a file.
#[test]
fn calls_of_other_shapes_are_declined() {
    let f = |dims: &[usize]| operand(DType::F32, dims);
    let numbers = |n: usize| operand(DType::I64, &[n]);
    let good = [f(&[9, 32]), f(&[2, 5, 32]), numbers(9)];
    let (plain, chosen) = (op(None, &[f(&[9, 32]), f(&[5, 32])]), op(None, &good));
    let blocks = op(Some(BlockType::Q8_0), &[f(&[9, 32]), operand(DType::U8, &[5, 34])]);
    let made = |op: &Op, ins: &[Operand], out: &Operand| {
        find(Isa::best(), 2, &LibraryCall::new(Work::Op(op), ins, std::slice::from_ref(out))).is_ok()
    };
    assert!(made(&chosen, &good, &f(&[9, 5])));
    for (op, ins, out) in [
        // Rows of the weights that are shorter or longer than the activations'.
        (&plain, vec![f(&[1, 1024]), f(&[1, 1])], f(&[1, 1])),
        (&plain, vec![f(&[9, 32]), f(&[5, 33])], f(&[9, 5])),
        (&blocks, vec![f(&[9, 64]), operand(DType::U8, &[5, 34])], f(&[9, 5])),
        (&blocks, vec![f(&[9, 32]), operand(DType::U8, &[5, 35])], f(&[9, 5])),
        // A result that is too small, or of another type.
        (&plain, vec![f(&[1, 1]), f(&[1000, 1])], f(&[1, 1])),
        (&plain, vec![f(&[9, 32]), f(&[5, 32])], f(&[45])),
        (&plain, vec![f(&[9, 32]), f(&[5, 32])], operand(DType::F16, &[9, 5])),
        // Too few numbers of matrices, numbers that are no integers, and no axis of matrices.
        (&chosen, vec![f(&[9, 32]), f(&[2, 5, 32]), numbers(1)], f(&[9, 5])),
        (&chosen, vec![f(&[9, 32]), f(&[2, 5, 32]), f(&[9])], f(&[9, 5])),
        (&chosen, vec![f(&[9, 32]), f(&[5, 32]), numbers(9)], f(&[9, 5])),
        (&plain, vec![f(&[9, 32]), f(&[2, 5, 32])], f(&[9, 5])),
        // Activations of another rank or type.
        (&plain, vec![f(&[9, 1, 32]), f(&[5, 32])], f(&[9, 5])),
        (&plain, vec![operand(DType::F16, &[9, 32]), f(&[5, 32])], f(&[9, 5])),
    ] {
        assert!(!made(op, &ins, &out), "{ins:?} {out:?}");
    }
}
