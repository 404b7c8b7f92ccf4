//! Calls of the composite: strides, and what is declined.

use super::tests::Case;
use crate::cpu::library::testing::*;
use crate::cpu::library::{CpuKernel, Fault, Run, find};
use crate::cpu::memory::Ptr;
use crate::cpu::sys::Isa;
use crate::cpu::team::Team;
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::target::{LibraryCall, Operand, Work};
use halcyon_ir::{DType, Graph, TensorType};
use std::sync::atomic::{AtomicU32, Ordering};

/// The operands and the result of a case.
fn operands(case: &Case) -> (Vec<Operand>, Operand) {
    let s = &case.s;
    let (f, i) = (
        |dims: &[usize]| Operand { dtype: DType::F32, view: View::dense(dims) },
        |n: usize| Operand { dtype: DType::I32, view: View::dense(&[n]) },
    );
    let c = &s.scan;
    let (channels, inner) = (c.channels().unwrap(), c.inner().unwrap());
    let (size, chunks) = (channels + c.extras(), s.depth * s.width);
    let mut all = vec![
        f(&[s.rows, size]),
        f(&[s.slots * c.ring, size]),
        f(&[s.matrices, inner * c.key]),
        f(&[s.kernel, channels]),
        f(&[c.heads]),
        f(&[c.heads]),
        i(s.width),
        i(chunks * (s.chunk + s.kernel - 1)),
        f(&[chunks, s.chunk]),
        f(&[s.depth, s.width]),
        i(s.width),
        i(s.kept),
        i(s.rows),
    ];
    all.extend((!c.delta).then(|| f(&[c.heads, 1])));
    all.extend(c.bias.then(|| f(&[channels])));
    (all, f(&[s.rows * inner + s.kept * inner * c.key]))
}

/// The composite for these operands. A kernel does not depend on the body, which has the result's type here.
fn op(case: &Case, ins: &[Operand], out: &Operand) -> Op {
    let mut g = Graph::new();
    let x: Vec<_> = ins.iter().map(|o| g.input("x", TensorType::new(o.dtype, &o.view.shape))).collect();
    let (dtype, dims) = (out.dtype, out.view.shape.to_vec());
    let y =
        g.composite(CompositeKind::ChunkScan, case.s.scan.attrs(), &x, |g, _| Ok(g.full(dtype, dims, 0.0)));
    g.node(y.unwrap()).op.clone()
}

fn find_for(case: &Case, ins: &[Operand], out: &Operand) -> Result<CpuKernel, String> {
    let op = op(case, ins, out);
    let call = LibraryCall::new(Work::Op(&op), ins, std::slice::from_ref(out));
    find(Isa::best(), 2, &call).map_err(|d| format!("{d:?}"))
}

fn at<T: Copy>(g: &Guarded<T>, write: bool) -> Ptr {
    Ptr { ptr: g.mut_ptr().cast(), bytes: size_of_val(g.slice()), read_only: !write }
}

fn run(kernel: &CpuKernel, case: &Case, results: usize) -> Vec<f32> {
    let team = Team::new(2);
    let f = |x: &[f32]| Guarded::new(x, Side::End);
    let i = |x: &[i32]| Guarded::new(x, Side::End);
    let c = case;
    let front = [f(&c.input), f(&c.ring), f(&c.matrices), f(&c.taps), f(&c.rate), f(&c.step_bias)];
    let ints = [i(&c.sequences), i(&c.window), i(&c.start), i(&c.kept), i(&c.back)];
    let (valid, full, y) = (f(&c.valid), f(&c.full), f(&vec![f32::NAN; results]));
    let rest: Vec<_> = [&c.skip, &c.bias].into_iter().filter(|x| !x.is_empty()).map(|x| f(x)).collect();
    let mut bufs: Vec<Ptr> = front.iter().map(|g| at(g, false)).collect();
    bufs.extend([at(&ints[0], false), at(&ints[1], false), at(&valid, false), at(&full, false)]);
    bufs.extend(ints[2..].iter().map(|g| at(g, false)));
    bufs.extend(rest.iter().map(|g| at(g, false)));
    bufs.push(at(&y, true));
    let word = AtomicU32::new(0);
    let isa = Isa::best();
    // SAFETY: the buffers are live, and nothing else uses them.
    unsafe { kernel.run(&Run { bufs: &bufs, args: &[], team: &team, isa, fault: Fault::new(&word, 7) }) }
        .unwrap();
    assert_eq!(word.load(Ordering::Relaxed), 0);
    y.slice().to_vec()
}

#[test]
fn rows_of_the_input_may_have_gaps_and_an_offset() {
    let mut rng = Rng::new();
    for delta in [false, true] {
        let mut case = Case::new(&mut rng, delta);
        let (mut ins, out) = operands(&case);
        let results = out.view.numel();
        let kernel = find_for(&case, &ins, &out).unwrap();
        let want = run(&kernel, &case, results);
        assert!(want.iter().all(|y| y.is_finite()));
        let (size, gap) = (ins[0].view.shape[1], 3);
        let mut wide = vec![f32::NAN; 2];
        for row in case.input.chunks_exact(size) {
            wide.extend_from_slice(row);
            wide.extend([f32::NAN; 3]);
        }
        case.input = wide;
        ins[0].view.offset = 2;
        ins[0].view.strides[0] = (size + gap) as isize;
        let kernel = find_for(&case, &ins, &out).unwrap();
        assert_eq!(run(&kernel, &case, results), want);
        // All other operands are dense.
        ins[2].view.strides[0] += 1;
        ins[2].view.shape[0] = ins[2].view.shape[0].max(2);
        let declined = find_for(&case, &ins, &out);
        assert!(declined.is_err());
    }
}

/// A composite of this name with another body may reach a device, for example from a graph in a file.
#[test]
fn calls_of_other_shapes_are_declined() {
    let mut rng = Rng::new();
    for delta in [false, true] {
        let case = Case::new(&mut rng, delta);
        let (ins, out) = operands(&case);
        assert!(find_for(&case, &ins, &out).is_ok());
        for i in 0..ins.len() {
            for axis in 0..ins[i].view.rank() {
                let mut other = ins.clone();
                let mut dims = other[i].view.shape.to_vec();
                dims[axis] += 1;
                other[i].view = View::dense(&dims);
                // The ring and the matrices may have other numbers of sequences.
                let more = matches!((i, axis), (2, 0)) || (i, axis) == (1, 0) && case.s.scan.ring == 1;
                assert_eq!(find_for(&case, &other, &out).is_ok(), more, "axis {axis} of operand {i}");
            }
            let mut other = ins.clone();
            other[i].dtype = if ins[i].dtype == DType::F32 { DType::I32 } else { DType::F32 };
            assert!(find_for(&case, &other, &out).is_err(), "type of operand {i}");
            assert!(find_for(&case, &ins[..i], &out).is_err(), "{i} operands");
        }
        let mut longer = out.clone();
        longer.view = View::dense(&[out.view.numel() + 1]);
        assert!(find_for(&case, &ins, &longer).is_err());
        let mut half = out.clone();
        half.dtype = DType::F16;
        assert!(find_for(&case, &ins, &half).is_err());
        for change in [
            |c: &mut Case| c.s.scan.heads = 0,
            |c: &mut Case| c.s.scan.shared += c.s.scan.heads,
            |c: &mut Case| c.s.scan.ring += 1 << 40,
            |c: &mut Case| c.s.scan.key = usize::MAX >> 1,
            |c: &mut Case| c.s.scan.delta = !c.s.scan.delta,
        ] {
            let mut other = case.clone();
            change(&mut other);
            assert!(find_for(&other, &ins, &out).is_err(), "{:?}", other.s.scan);
        }
    }
}
