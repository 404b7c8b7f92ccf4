//! The target's answers during one lowering.

use super::*;
use std::cell::RefCell;

/// A call with its own data. Equal questions have the same answer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Question {
    work: tune::Work,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    precision: MatmulPrecision,
    in_place: bool,
    constants: Vec<usize>,
    /// The chain, the input that is the op's result, the other inputs, and the output.
    epilogue: Option<(Fused, u32, Vec<Operand>, Operand)>,
}

impl Question {
    fn of(call: &LibraryCall<'_>) -> Question {
        Question {
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

type Answer = Result<Arc<dyn LibraryKernel>, Declined>;

/// Asks the target, each question once. The kernel with which a pass found that the target runs a composite
/// is thus the kernel of the composite's step.
pub(super) struct Answers<'a> {
    pub(super) target: &'a dyn Target,
    known: RefCell<HashMap<Question, Answer>>,
}

impl<'a> Answers<'a> {
    pub(super) fn new(target: &'a dyn Target) -> Answers<'a> {
        Answers { target, known: RefCell::default() }
    }

    /// [`Target::library`].
    pub(super) fn library(&self, call: &LibraryCall<'_>) -> Answer {
        let mut known = self.known.borrow_mut();
        known.entry(Question::of(call)).or_insert_with(|| self.target.library(call)).clone()
    }
}
