//! The library kernels that the target returned during one lowering.

use super::*;
use std::cell::RefCell;

/// A call that owns its data. Equal calls get the same kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct CallKey {
    work: tune::Work,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    precision: MatmulPrecision,
    in_place: usize,
    constants: Vec<usize>,
    /// The chain, the index of its input that is the op's result, its other inputs, and its output.
    epilogue: Option<(Fused, u32, Vec<Operand>, Operand)>,
}

impl CallKey {
    fn of(call: &LibraryCall<'_>) -> CallKey {
        CallKey {
            work: match call.work {
                Work::Op(op) => tune::Work::Op(op.clone()),
                Work::Fused(f) => tune::Work::Fused(Arc::new(f.clone())),
            },
            inputs: call.inputs.to_vec(),
            outputs: call.outputs.to_vec(),
            precision: call.precision,
            in_place: call.in_place,
            constants: call.constants.to_vec(),
            epilogue: call
                .epilogue
                .map(|e| (e.fused.clone(), e.product, e.inputs.to_vec(), e.output.clone())),
        }
    }
}

type FoundKernel = Result<Arc<dyn LibraryKernel>, Declined>;

/// Queries the target once for each distinct call. So if a composite is claimed because the target returned a
/// kernel for it, the composite's step runs that same kernel.
pub(super) struct KernelCache<'a> {
    pub(super) target: &'a dyn Target,
    known: RefCell<HashMap<CallKey, FoundKernel>>,
}

impl<'a> KernelCache<'a> {
    pub(super) fn new(target: &'a dyn Target) -> KernelCache<'a> {
        KernelCache { target, known: RefCell::default() }
    }

    /// Like [`Target::library`], with the kernel of an equal earlier call if there is one.
    pub(super) fn library(&self, call: &LibraryCall<'_>) -> FoundKernel {
        let mut known = self.known.borrow_mut();
        known.entry(CallKey::of(call)).or_insert_with(|| self.target.library(call)).clone()
    }
}
