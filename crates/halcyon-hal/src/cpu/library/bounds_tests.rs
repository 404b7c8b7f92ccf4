//! Tests that calls and buffers are rejected if they would make a kernel access memory outside of its
//! buffers. Safe code may set every number of a call.

use crate::cpu::CpuDevice;
use crate::{BufferRef, Device, LibraryKernel, Options, Tag, Target};
use halcyon_ir::composite::Composite;
use halcyon_ir::fused::{Fused, Instr, InstrKind, Load, Out};
use halcyon_ir::kernel::lower::lower_op;
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::target::{Epilogue, LibraryCall, Operand, Work};
use halcyon_ir::{DType, Graph, NodeId, ScalarOp, TensorType};
use std::sync::Arc;

const F: DType = DType::F32;

fn device() -> CpuDevice {
    CpuDevice::new(&Options { threads: Some(2), ..Default::default() }).unwrap()
}

fn dense(shape: &[usize]) -> Operand {
    Operand { dtype: F, view: View::dense(shape) }
}

fn instr(kind: InstrKind, args: &[u32]) -> Instr {
    Instr { kind, dtype: F, args: args.into() }
}

/// `product + bias` over a space; the bias is input 1 of the chain.
fn biased(space: &[usize]) -> Fused {
    let load = |input| Load { input, dtype: F, view: View::dense(space), fill: None };
    Fused {
        space: space.into(),
        reduced: 0,
        loads: vec![load(0), load(1)],
        params: vec![],
        body: vec![
            instr(InstrKind::Load(0), &[]),
            instr(InstrKind::Load(1), &[]),
            instr(InstrKind::Op(ScalarOp::Add), &[0, 1]),
        ],
        outs: vec![Out { value: 2, dtype: F, reduce: None, view: View::dense(space) }],
    }
}

/// Whether the kernel for a product of 4 x 4 matrices applies this epilogue.
fn takes(dev: &CpuDevice, fused: &Fused, bias: Operand, output: &[usize]) -> bool {
    let (inputs, more, outputs) = ([dense(&[4, 4]), dense(&[4, 4])], [bias], [dense(&[4, 4])]);
    let epilogue = Some(Epilogue { fused, product: 0, inputs: &more, output: &dense(output) });
    let call = LibraryCall { epilogue, ..LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &outputs) };
    dev.library(&call).is_ok_and(|k| k.applies_epilogue())
}

#[test]
fn epilogues_that_leave_their_operands_are_declined() {
    let dev = device();
    let good = biased(&[4, 4]);
    assert!(takes(&dev, &good, dense(&[4, 4]), &[4, 4]));
    assert!(takes(&dev, &good, dense(&[4, 4]), &[16]), "the chain may give the result another shape");
    // The product has more elements than the result or the chain.
    assert!(!takes(&dev, &biased(&[2]), dense(&[2]), &[2]));
    assert!(!takes(&dev, &good, dense(&[4, 4]), &[2, 4]));
    // The chain reads as many elements as the bias's view has, but all of them are one element in memory.
    let repeated = Operand { dtype: F, view: View::dense(&[1]).expand(&[4, 4]) };
    assert!(!takes(&dev, &good, repeated, &[4, 4]));
    let mut f = good.clone();
    f.loads[1].view = View::dense(&[1]);
    assert!(!takes(&dev, &f, dense(&[1]), &[4, 4]), "the chain reads 16 elements of a view of one");
    let half = Operand { dtype: DType::BF16, view: View::dense(&[4, 4]) };
    assert!(!takes(&dev, &good, half, &[4, 4]), "the operand is half as long as what the chain reads");
    // An instruction that reads its own value, a missing operand, a missing result, and a value of fewer
    // bytes than its reader requires.
    let mut f = good.clone();
    f.body[2].args = [0, 2].as_slice().into();
    assert!(!takes(&dev, &f, dense(&[4, 4]), &[4, 4]));
    let mut f = good.clone();
    f.body[2].args = [0].as_slice().into();
    assert!(!takes(&dev, &f, dense(&[4, 4]), &[4, 4]));
    let mut f = good.clone();
    f.outs[0].value = 3;
    assert!(!takes(&dev, &f, dense(&[4, 4]), &[4, 4]));
    let mut f = good;
    f.body[2].kind = InstrKind::Op(ScalarOp::Lt);
    assert!(!takes(&dev, &f, dense(&[4, 4]), &[4, 4]), "a comparison gives bytes, not floats");
}

#[test]
fn chains_that_leave_their_operands_are_declined() {
    let dev = device();
    let takes = |f: &Fused, inputs: &[Operand], output: Operand| {
        dev.library(&LibraryCall::new(Work::Fused(f), inputs, &[output])).is_ok()
    };
    let good = biased(&[4, 4]);
    let whole = || dense(&[4, 4]);
    assert!(takes(&good, &[whole(), whole()], whole()));
    let repeated = || Operand { dtype: F, view: View::dense(&[1]).expand(&[4, 4]) };
    assert!(!takes(&good, &[whole(), repeated()], whole()));
    assert!(!takes(&good, &[whole(), whole()], repeated()));
    // Two threads would write one element.
    let mut f = good.clone();
    f.outs[0].view.strides = [0, 1].as_slice().into();
    assert!(!takes(&f, &[whole(), whole()], whole()));
    // Multiples of this stride overflow.
    let mut f = good;
    f.loads[1].view.strides = [isize::MIN, 1].as_slice().into();
    assert!(!takes(&f, &[whole(), whole()], whole()));
}

#[test]
fn views_that_no_buffer_contains_are_declined() {
    let dev = device();
    let half = 1usize << (usize::BITS / 2);
    let huge = |shape: &[usize], strides: &[isize]| Operand {
        dtype: F,
        view: View { shape: shape.into(), strides: strides.into(), offset: 0, mask: None },
    };
    let inputs = [huge(&[half, half], &[0, 0]), huge(&[half, half], &[0, 0])];
    let outputs = [dense(&[half, half])];
    assert!(dev.library(&LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &outputs)).is_err());
    let inputs = [huge(&[2, 4], &[isize::MIN, 1]), dense(&[4, 2])];
    let outputs = [dense(&[2, 2])];
    assert!(dev.library(&LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &outputs)).is_err());
}

/// The composite that `build` creates, with a body that returns only the first column of operand 0.
fn shortened(types: &[TensorType], build: impl FnOnce(&mut Graph, &[NodeId]) -> NodeId) -> Op {
    let graph = |f: &mut dyn FnMut(&mut Graph, &[NodeId]) -> NodeId| {
        let mut g = Graph::new();
        let ids: Vec<_> =
            types.iter().enumerate().map(|(i, t)| g.input(&format!("x{i}"), t.clone())).collect();
        let y = f(&mut g, &ids);
        (g, y)
    };
    let mut build = Some(build);
    let (g, y) = graph(&mut |g, x| build.take().unwrap()(g, x));
    let Op::Composite(c) = &g.node(y).op else { panic!("no composite") };
    let last = types[0].shape.rank() - 1;
    let (mut body, y) = graph(&mut |g, x| g.narrow(x[0], last, 0usize, 1usize).unwrap());
    body.output("y", y);
    Op::Composite(Arc::new(Composite { body, ..(**c).clone() }))
}

#[test]
fn composites_whose_body_gives_a_smaller_result_are_declined() {
    let dev = device();
    let ty = |dims: &[usize]| TensorType::new(F, dims);
    let soft = shortened(&[ty(&[8, 64])], |g, x| g.softmax(x[0], 1).unwrap());
    let norm = shortened(&[ty(&[8, 64]), ty(&[64])], |g, x| g.rms_norm(x[0], x[1], 1e-5).unwrap());
    let heads = [ty(&[1, 2, 4, 8]), ty(&[1, 2, 6, 8]), ty(&[1, 2, 6, 8])];
    let attend = shortened(&heads, |g, x| g.attention(x[0], x[1], x[2], None, false, 0.5).unwrap());
    for (op, inputs, output) in [
        (soft, vec![dense(&[8, 64])], dense(&[8, 1])),
        (norm, vec![dense(&[8, 64]), dense(&[64])], dense(&[8, 1])),
        (
            attend,
            vec![dense(&[1, 2, 4, 8]), dense(&[1, 2, 6, 8]), dense(&[1, 2, 6, 8])],
            dense(&[1, 2, 4, 1]),
        ),
    ] {
        let d = dev
            .library(&LibraryCall::new(Work::Op(&op), &inputs, std::slice::from_ref(&output)))
            .unwrap_err();
        assert_eq!(d.reason, "the result has another shape or type");
        // The templates of GPUs decline it too.
        let d = lower_op(&op, &inputs, &[output], false, dev.caps()).unwrap_err();
        assert!(d.reason.contains("another shape or type"), "{}", d.reason);
    }
}

/// The kernel of a product, and buffers of the sizes that it needs.
fn product(dev: &CpuDevice, packed: bool) -> (Arc<dyn LibraryKernel>, Vec<BufferRef>) {
    let (inputs, outputs) = ([dense(&[64, 32]), dense(&[32, 48])], [dense(&[64, 48])]);
    let call = LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &outputs);
    let constants: &[usize] = if packed { &[1] } else { &[] };
    let k = dev.library(&LibraryCall { constants, ..call }).unwrap();
    let right = k.packing().map_or(4 * 32 * 48, |p| p.bytes);
    let sizes = [4 * 64 * 32, right, 4 * 64 * 48];
    (k, sizes.iter().map(|n| dev.alloc(*n, Tag::Io).unwrap()).collect())
}

#[test]
fn parts_begin_where_elements_are_aligned() {
    let dev = device();
    let whole = dev.alloc(1000, Tag::Io).unwrap();
    for offset in [1, 4, 8, 63] {
        assert_eq!(dev.part(&whole, offset, 100).unwrap_err().exit_code(), 2, "{offset}");
    }
    struct Words(Vec<u64>);
    impl AsRef<[u8]> for Words {
        fn as_ref(&self) -> &[u8] {
            // SAFETY: each of the vector's words is 8 initialised bytes.
            unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), 8 * self.0.len()) }
        }
    }
    let lent = dev.import(Arc::new(Words(vec![0; 100]))).unwrap();
    assert!(dev.part(&lent, 64, 100).is_ok() && dev.part(&lent, 4, 100).is_err());
}

#[test]
fn a_constant_is_not_packed_onto_itself_or_into_too_little() {
    let dev = device();
    let (k, buffers) = product(&dev, true);
    let from = dev.alloc(4 * 32 * 48, Tag::Weights).unwrap();
    dev.pack(&*k, &from, &buffers[1]).unwrap();
    let refused = |from: &BufferRef, to: &BufferRef| dev.pack(&*k, from, to).unwrap_err().exit_code() == 2;
    assert!(refused(&buffers[1], &buffers[1]));
    let block = dev.alloc(3 * 4 * 32 * 48, Tag::Weights).unwrap();
    let n = k.packing().unwrap().bytes;
    let (a, b) = (dev.part(&block, 0, n).unwrap(), dev.part(&block, 64, n).unwrap());
    assert!(refused(&a, &b) && refused(&b, &a));
    let short = dev.alloc(n - 4, Tag::Weights).unwrap();
    assert!(refused(&from, &short) && refused(&short, &buffers[1]));
}
