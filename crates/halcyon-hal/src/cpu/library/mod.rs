//! The CPU device's library kernels, and the table that finds one for a call.

pub mod accumulator;
pub mod attention;
#[cfg(test)]
mod bounds_tests;
mod calls;
mod chunk_scan;
pub mod conv;
pub mod epilogue;
pub mod gemm;
mod index;
mod linear;
pub mod rows;
pub(crate) mod simd;
mod strided;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod wide;

use crate::cpu::chain;
use crate::cpu::memory::Ptr;
use crate::cpu::sys::Isa;
use crate::cpu::team::Team;
use crate::library_call::{Bound, CallForm, Needs};
use crate::reach;
use crate::{Declined, Error, LibraryCall, LibraryKernel, Operand, Result};
use halcyon_ir::DType;
use halcyon_ir::Scalar;
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::passes::bytes;
use halcyon_ir::shape::{Shape, TensorType};
use halcyon_ir::target::{Packing, Work};
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// The place where a kernel reports a bad index: the device's fault word, and the id of the command to store
/// there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault<'a> {
    word: &'a AtomicU32,
    id: u32,
}

impl<'a> Fault<'a> {
    pub(crate) fn new(word: &'a AtomicU32, id: u32) -> Fault<'a> {
        Fault { word, id }
    }

    /// Reports a bad index; the first fault is kept.
    #[cold]
    pub(crate) fn set(&self) {
        // The exchange fails if a fault is already set. The earlier fault is then kept and reported.
        let _ = self.word.compare_exchange(0, self.id, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The arguments of one kernel run. `CpuKernel::run` checks the buffers against the call that the kernel was
/// made for.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    /// Inputs, then outputs.
    pub bufs: &'a [Ptr],
    pub args: &'a [Scalar],
    pub team: &'a Team,
    pub isa: Isa,
    pub fault: Fault<'a>,
}

impl Run<'_> {
    /// Pointer to the first element of the operand in buffer `buf`.
    pub(crate) fn ptr<T>(&self, buf: usize, v: &View) -> *const T {
        (self.bufs[buf].ptr as *const T).wrapping_offset(v.offset)
    }
}

type Body = Box<dyn Fn(&Run<'_>) + Send + Sync>;

/// Packs a constant: the team, the constant in its original layout, and the destination.
type Packer = Box<dyn Fn(&Team, *const u8, *mut u8) + Send + Sync>;

/// The layout of a kernel's constant input, and the function that writes it.
struct PackedInput {
    packing: Packing,
    /// Bytes of the original constant that packing reads.
    reads: usize,
    pack: Packer,
}

/// A kernel made for one call.
pub(crate) struct CpuKernel {
    name: String,
    needs: Needs,
    applies_epilogue: bool,
    args: usize,
    packed: Option<PackedInput>,
    workspace: usize,
    body: Body,
}

impl fmt::Debug for CpuKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuKernel").field("name", &self.name).finish_non_exhaustive()
    }
}

impl CpuKernel {
    /// A kernel for `call`. Its `body` may rely on the following: inputs and outputs are as large as their
    /// views reach; outputs are writable and overlap no other operand. Only the first `call.in_place` outputs
    /// overlap an operand: each is in the buffer of the input with the same index.
    pub(crate) fn new(
        name: impl Into<String>,
        call: &CallForm<'_>,
        body: impl Fn(&Run<'_>) + Send + Sync + 'static,
    ) -> Result<CpuKernel, Declined> {
        Ok(CpuKernel {
            name: name.into(),
            needs: call.needs()?,
            applies_epilogue: call.epilogue.is_some(),
            args: 0,
            packed: None,
            workspace: 0,
            body: Box::new(body),
        })
    }

    /// Sets the number of run-time arguments that the body reads.
    pub(crate) fn with_args(mut self, n: usize) -> CpuKernel {
        self.args = n;
        self
    }

    /// Gives the body `bytes` bytes of workspace, 64-byte aligned, as one more buffer after the outputs.
    pub(crate) fn with_workspace(mut self, bytes: usize) -> CpuKernel {
        self.workspace = bytes;
        self.needs.add_workspace(bytes);
        self
    }

    /// Declares `input` as a packed constant: the body reads the `floats` floats that `pack` wrote. `pack`
    /// may rely on a source that is as large as the call's view reaches, and on a destination of `floats`
    /// floats. The destination need not be 64-byte aligned.
    pub(crate) fn with_packed(
        mut self,
        input: usize,
        floats: usize,
        key: String,
        pack: impl Fn(&Team, *const u8, *mut u8) + Send + Sync + 'static,
    ) -> CpuKernel {
        let packing = Packing { input, bytes: floats * size_of::<f32>(), key };
        let reads = self.needs.resize(input, packing.bytes);
        self.packed = Some(PackedInput { packing, reads, pack: Box::new(pack) });
        self
    }

    /// Packs a constant for this kernel.
    ///
    /// # Safety
    /// Both buffers are live memory that nothing else uses during the call.
    pub(crate) unsafe fn pack(&self, team: &Team, from: &Ptr, to: &Ptr) -> Result<()> {
        let bad = |w: String| Err(Error::argument("pack", format!("{}: {w}", self.name)));
        let Some(p) = &self.packed else { return bad("has no packed constant".into()) };
        if from.bytes < p.reads || to.bytes < p.packing.bytes {
            return bad(format!(
                "buffers of {} and {} bytes were passed, but {} bytes are read and {} written",
                from.bytes, to.bytes, p.reads, p.packing.bytes
            ));
        }
        super::device::check_writable(&self.name, to)?;
        if from.overlaps(to) {
            return bad("the packed constant would overwrite the original".into());
        }
        (p.pack)(team, from.ptr, to.ptr);
        Ok(())
    }

    /// Number of buffers that a run binds.
    pub(crate) fn buffers(&self) -> usize {
        self.needs.len()
    }

    /// Whether a run reads and writes buffer `i`, as `(reads, writes)`.
    pub(crate) fn uses(&self, i: usize) -> (bool, bool) {
        self.needs.uses(i)
    }

    fn check(&self, r: &Run<'_>) -> Result<()> {
        let bound =
            |i: usize| Bound { address: r.bufs[i].ptr as u64, bytes: r.bufs[i].bytes, span: r.bufs[i].bytes };
        self.needs.check(&self.name, r.bufs.len(), bound)?;
        if r.args.len() < self.args {
            let what = format!("got {} run-time arguments, but needs {}", r.args.len(), self.args);
            return Err(Error::argument(self.name.as_str(), what));
        }
        let written = |i: &usize| self.needs.uses(*i).1;
        for i in (0..r.bufs.len()).filter(written) {
            super::device::check_writable(&self.name, &r.bufs[i])?;
        }
        Ok(())
    }

    /// # Safety
    /// The buffers of `r` are live memory. During the call nothing else writes them, and nothing else uses
    /// the buffers that the kernel writes (see [`CpuKernel::uses`]).
    pub(crate) unsafe fn run(&self, r: &Run<'_>) -> Result<()> {
        self.check(r)?;
        (self.body)(r);
        Ok(())
    }
}

impl LibraryKernel for CpuKernel {
    fn name(&self) -> &str {
        &self.name
    }
    fn workspace(&self) -> usize {
        self.workspace
    }
    fn packing(&self) -> Option<&Packing> {
        self.packed.as_ref().map(|p| &p.packing)
    }
    fn applies_epilogue(&self) -> bool {
        self.applies_epilogue
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// [`CompositeKind::ByteMatmul`] of integers as a matrix product. Its right operand is stored transposed, so
/// this function swaps the last two axes of the operand.
fn product_of_bytes(
    isa: Isa,
    threads: usize,
    call: &CallForm<'_>,
    types: [DType; 2],
) -> Result<CpuKernel, Declined> {
    if !types.iter().all(|d| d.is_native()) {
        return Err(Declined::because(format!("there are no products of {} and {}", types[0], types[1])));
    }
    let [a, b, rest @ ..] = call.inputs else {
        return Err(Declined::because("a product has two factors"));
    };
    if call.own != 2 {
        return Err(Declined::because("products of integers have no operands besides their factors"));
    }
    let mut turned = b.clone();
    let Some(last) = turned.view.rank().checked_sub(1).filter(|last| *last > 0) else {
        return Err(Declined::because("the factors of a product have at least two axes"));
    };
    turned.view.shape.swap(last - 1, last);
    turned.view.strides.swap(last - 1, last);
    if turned.view.mask.is_some() {
        return Err(Declined::needs_dense([1]));
    }
    let inputs: Vec<Operand> = [a, &turned].into_iter().chain(rest).cloned().collect();
    find_form(isa, threads, &CallForm { work: Work::Op(&Op::Matmul), inputs: &inputs, ..*call })
}

/// Checks the shapes and dtypes of the operands against the op's type rule, so that kernels may rely on them.
/// Passes may request products of integers in i32 and of bf16 in f32, although the rule gives other result
/// types.
fn check_types(op: &Op, call: &CallForm<'_>) -> Result<(), Declined> {
    let ty = |o: &Operand| TensorType::new(o.dtype, &o.view.shape);
    let [out] = call.outputs else { return Err(Declined::because("one dense output is needed")) };
    let mut x: Vec<TensorType> = call.inputs[..call.own].iter().map(ty).collect();
    let byte = |t: &TensorType| t.dtype.is_int() && t.dtype.bits() == 8;
    let bytes = *op == Op::Matmul && x.iter().all(byte);
    if let ([a, b], true) = (&mut x[..], bytes) {
        // The rule wants factors of one type, but signed and unsigned bytes may be mixed.
        b.dtype = a.dtype;
    }
    let out = ty(out);
    let y = op.infer(&x.iter().collect::<Vec<_>>(), Some(&out));
    let y = y.map_err(|e| Declined::because(e.to_string()))?;
    let wider = *op == Op::Matmul
        && (x[0].dtype.is_int() && out.dtype == DType::I32
            || x[0].dtype == DType::BF16 && out.dtype == DType::F32);
    // An epilogue may give the result another shape and type: the type that its chain stores.
    let count = |s: &Shape| s.iter().map(|d| d.known()).product::<Option<usize>>();
    let fits = match call.epilogue {
        Some(e) => {
            count(&y.shape) == count(&out.shape) && matches!(&e.fused.outs[..], [o] if o.dtype == out.dtype)
        }
        None => y.shape == out.shape && (y.dtype == out.dtype || wider),
    };
    if !fits {
        return Err(Declined::because(format!("{} gives {y}, the output is {out}", op.name())));
    }
    Ok(())
}

/// Finds a kernel for the call, or the reason why there is none.
pub(crate) fn find(isa: Isa, threads: usize, call: &LibraryCall<'_>) -> Result<CpuKernel, Declined> {
    CallForm::first(call, true, |form| find_form(isa, threads, form))
}

fn find_form(isa: Isa, threads: usize, call: &CallForm<'_>) -> Result<CpuKernel, Declined> {
    // The code below assumes native types.
    call.native_types()?;
    // After this check, no product of the sizes of one operand overflows.
    call.inputs.iter().chain(call.outputs).try_for_each(|o| reach::elements(o).map(drop))?;
    let op = match call.work {
        Work::Fused(f) => return chain::kernel(isa, f, call),
        Work::Op(op) => op,
    };
    if let Op::Composite(c) = op
        && let Some(types) = bytes::formats(c)
    {
        return product_of_bytes(isa, threads, call, types);
    }
    call.unmasked()?;
    call.one_dense_output()?;
    check_types(op, call)?;
    let facts = op.facts();
    if call.in_place > usize::from(facts.in_place) {
        return Err(Declined::because("this op does not run in place"));
    }
    if (call.packed.is_some() || call.epilogue.is_some()) && !facts.packs {
        return Err(Declined::because(format!("{} has no packed constant and no epilogue", op.name())));
    }
    // One row per op, or per composite that has a function of its own.
    match op {
        Op::Matmul => gemm::matmul(isa, call),
        Op::Conv(c) => calls::conv(isa, call, c),
        Op::Pool(p) => calls::pooling(call, p),
        Op::PoolGrad(p) => calls::pool_grad(isa, call, p),
        Op::Gather { axis } => index::gather::rows(call, *axis),
        Op::GatherElements { axis } => index::gather::elements(call, *axis),
        Op::ScatterElements { axis, kind } => index::scatter::elements(call, *axis, *kind),
        Op::ScatterRows { axis, kind } => index::scatter::rows(call, *axis, *kind),
        Op::UpdateSlice { axis } => index::scatter::update_slice(call, *axis),
        Op::ClassIndex { classes, ignore } => index::gather::class_index(call, classes.known(), *ignore),
        Op::DecodeBlocks(format) => index::blocks::decode(call, *format),
        Op::ArgReduce { max, axis, last, .. } => rows::sort::arg_reduce(call, *max, *axis, *last),
        Op::ArgSort { axis, descending } => rows::sort::arg_sort(call, *axis, *descending),
        Op::Scan { kind, axis, exclusive, reverse } => {
            rows::scan::scan(call, *kind, *axis, *exclusive, *reverse)
        }
        Op::Composite(c) if c.kind == CompositeKind::BlockedConv => {
            conv::blocked_calls::conv(isa, threads, call, c)
        }
        Op::Composite(c) if c.kind == CompositeKind::QuantizedMatmul => gemm::product_int4::call(isa, call),
        Op::Composite(c) if c.kind == CompositeKind::RowMatmul => linear::call(isa, call, c),
        Op::Composite(c) if c.kind == CompositeKind::CachedAttention => attention::cached::call(isa, call, c),
        Op::Composite(c) if c.kind == CompositeKind::ChunkScan => chunk_scan::call(isa, call, c),
        Op::Composite(c) if c.kind == CompositeKind::BlockedPool => conv::blocked_calls::pool(isa, call, c),
        Op::Composite(c) => calls::composite(isa, call, c),
        Op::Custom(_) => Err(Declined::because("custom ops have their own kernels")),
        _ => Err(Declined::because(format!("there is no library kernel for {}", op.name()))),
    }
}
