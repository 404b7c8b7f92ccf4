//! The target's answers during one lowering.

use super::*;
use std::cell::RefCell;

/// A call with its own data. Calls with equal questions get the same kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Question {
    work: tune::Work,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    precision: MatmulPrecision,
    in_place: bool,
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
        let question = Question {
            work: match call.work {
                Work::Op(op) => tune::Work::Op(op.clone()),
                Work::Fused(f) => tune::Work::Fused(Arc::new(f.clone())),
            },
            inputs: call.inputs.to_vec(),
            outputs: call.outputs.to_vec(),
            precision: call.precision,
            in_place: call.in_place,
        };
        if let Some(answer) = self.known.borrow().get(&question) {
            return answer.clone();
        }
        let answer = self.target.library(call);
        self.known.borrow_mut().insert(question, answer.clone());
        answer
    }
}
