//! Code shared by the CPU's kernels and the vendors' libraries: the forms in which a call can be run, and the
//! conditions on its operands and buffers.

use crate::{Declined, Error, LibraryCall, Operand, Result, reach};
use halcyon_ir::fused::Load;
use halcyon_ir::target::{Epilogue, MatmulPrecision, Work};
use smallvec::SmallVec;

/// One way to run a [`LibraryCall`]: with its epilogue or without, and with one packed constant or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallForm<'a> {
    pub work: Work<'a>,
    /// The op's operands, followed by the epilogue's other inputs.
    pub inputs: &'a [Operand],
    /// Number of the op's operands.
    pub own: usize,
    /// The op's outputs; with an epilogue, the epilogue's output instead.
    pub outputs: &'a [Operand],
    pub precision: MatmulPrecision,
    pub in_place: usize,
    /// The input that is read as a packed constant.
    pub packed: Option<usize>,
    pub epilogue: Option<Epilogue<'a>>,
}

impl<'a> CallForm<'a> {
    /// The op without a packed constant or an epilogue.
    pub(crate) fn plain(call: &LibraryCall<'a>) -> CallForm<'a> {
        CallForm {
            work: call.work,
            inputs: call.inputs,
            own: call.inputs.len(),
            outputs: call.outputs,
            precision: call.precision,
            in_place: call.in_place,
            packed: None,
            epilogue: None,
        }
    }

    /// The kernel that `find` returns for the first form of the call that has a kernel. Forms with a packed
    /// constant are tried before forms without one. Of two forms that differ only in the epilogue, the form
    /// with the epilogue is tried first. If no form has a kernel, the error is that of the plain form.
    /// `packs` says whether there are kernels that read packed constants.
    pub(crate) fn first<K>(
        call: &LibraryCall<'_>,
        packs: bool,
        find: impl Fn(&CallForm<'_>) -> Result<K, Declined>,
    ) -> Result<K, Declined> {
        let plain = CallForm::plain(call);
        let inputs: Vec<Operand> = match call.epilogue {
            Some(e) => call.inputs.iter().chain(e.inputs).cloned().collect(),
            None => vec![],
        };
        let with_epilogue = call.epilogue.as_ref().map(|e| CallForm {
            inputs: &inputs,
            outputs: std::slice::from_ref(e.output),
            epilogue: Some(*e),
            ..plain
        });
        let constants = call.constants.iter().filter(|_| packs).map(|k| Some(*k));
        for packed in constants.chain([None]) {
            for form in with_epilogue.iter().chain(packed.map(|_| &plain)) {
                match find(&CallForm { packed, ..*form }) {
                    Ok(kernel) => return Ok(kernel),
                    Err(d) => tracing::trace!(packed, epilogue = form.epilogue.is_some(), "{}", d.reason),
                }
            }
        }
        find(&plain)
    }

    /// Declines small types, because kernels compute in native types, and the passes rewrite small ones.
    pub(crate) fn native_types(&self) -> Result<(), Declined> {
        match self.inputs.iter().chain(self.outputs).find(|o| !o.dtype.is_native()) {
            Some(o) => {
                Err(Declined::because(format!("{} is a small type, which the passes replace", o.dtype)))
            }
            None => Ok(()),
        }
    }

    /// Declines masked views, because the value outside a mask depends on the op that reads the view.
    pub(crate) fn unmasked(&self) -> Result<(), Declined> {
        let masked: SmallVec<[usize; 4]> =
            (0..self.inputs.len()).filter(|&i| self.inputs[i].view.mask.is_some()).collect();
        if masked.is_empty() { Ok(()) } else { Err(Declined::needs_dense(masked)) }
    }

    pub(crate) fn one_dense_output(&self) -> Result<(), Declined> {
        match self.outputs {
            [out] if out.view.is_dense() => Ok(()),
            _ => Err(Declined::because("one dense output is needed")),
        }
    }

    /// Index in `inputs` of the operand that `load` of the epilogue `e` reads. The epilogue's own inputs
    /// follow the op's, in order and without the op's result.
    pub(crate) fn epilogue_input(&self, e: &Epilogue<'_>, load: &Load) -> usize {
        self.own + load.input as usize - usize::from(load.input > e.product)
    }

    /// The requirements of a kernel of this form on its buffers: inputs, then outputs.
    pub(crate) fn needs(&self) -> Result<Needs, Declined> {
        let mut all = SmallVec::new();
        for (i, o) in self.inputs.iter().enumerate() {
            all.push(Need { bytes: reach::bytes(o)?, write: i < self.in_place });
        }
        for o in self.outputs {
            all.push(Need { bytes: reach::bytes(o)?, write: true });
        }
        Ok(Needs { all, in_place: self.in_place })
    }
}

/// What a kernel requires of one buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub bytes: usize,
    pub write: bool,
}

/// What a kernel requires of its buffers: inputs, outputs, workspace.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    all: SmallVec<[Need; 8]>,
    /// This many outputs, counted from the first, share the buffer of the input with the same index.
    in_place: usize,
}

/// A bound buffer: its address, its size in bytes, and `span`, the number of bytes from its start that the
/// check for overlaps considers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub address: u64,
    pub bytes: usize,
    pub span: usize,
}

impl Needs {
    /// Number of buffers that a run binds.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn get(&self, i: usize) -> Option<&Need> {
        self.all.get(i)
    }

    /// Whether a run reads and writes buffer `i`, as `(reads, writes)`.
    pub(crate) fn uses(&self, i: usize) -> (bool, bool) {
        let write = self.all[i].write;
        (!write || i < self.in_place, write)
    }

    /// Adds a workspace, unless it is empty.
    pub(crate) fn add_workspace(&mut self, bytes: usize) {
        if bytes > 0 {
            self.all.push(Need { bytes, write: true });
        }
    }

    /// Changes the size of buffer `i`. Returns the old size.
    pub(crate) fn resize(&mut self, i: usize, bytes: usize) -> usize {
        std::mem::replace(&mut self.all[i].bytes, bytes)
    }

    /// Validates the buffers of a run of the kernel `name`: their number, their sizes, and that no written
    /// buffer overlaps another buffer. The exception is an output that replaces an input in place: it must
    /// have the same buffer as this input.
    pub(crate) fn check(&self, name: &str, count: usize, bound: impl Fn(usize) -> Bound) -> Result<()> {
        let bad = |what: String| Err(Error::argument(name, what));
        if count != self.len() {
            return bad(format!("{count} buffers were bound, {} are needed", self.len()));
        }
        for (i, n) in self.all.iter().enumerate() {
            let b = bound(i);
            if b.bytes < n.bytes {
                return bad(format!("buffer {i} has {} bytes, {} are needed", b.bytes, n.bytes));
            }
        }
        // An input that is overwritten in place has the same buffer as its output, so the output's check
        // covers it.
        let first = self.all.iter().skip(self.in_place).position(|n| n.write);
        let first = first.map_or(self.len(), |k| k + self.in_place);
        for o in first..self.len() {
            let b = bound(o);
            let shares = |i: usize| {
                let x = bound(i);
                let pair = i < self.in_place && o == first + i;
                // Buffers may be parts of one allocation, so compare ranges.
                let apart = x.address >= b.address + b.span as u64 || b.address >= x.address + x.span as u64;
                !apart && !pair && x.span > 0 && b.span > 0
            };
            if (0..o).any(shares) {
                return bad(format!("buffer {o} is written, but it overlaps another buffer"));
            }
        }
        let apart = |i: &usize| bound(*i).address != bound(first + i).address;
        if let Some(i) = (0..self.in_place).find(apart) {
            return bad(format!("output {i} must be input {i}'s buffer"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon_ir::DType;
    use halcyon_ir::fused::Fused;
    use halcyon_ir::layout::View;
    use halcyon_ir::ops::Op;

    fn operand(dims: &[usize]) -> Operand {
        Operand { dtype: DType::F32, view: View::dense(dims) }
    }

    #[test]
    fn forms_are_tried_from_the_best_to_the_plain_one() {
        let (x, y, more, out) =
            ([operand(&[2, 3]), operand(&[3, 4])], [operand(&[2, 4])], [operand(&[4])], operand(&[8]));
        let space = [8].into_iter().collect();
        let fused = Fused { space, reduced: 0, loads: vec![], params: vec![], body: vec![], outs: vec![] };
        let epilogue = Some(Epilogue { fused: &fused, product: 0, inputs: &more, output: &out });
        let plain = LibraryCall::new(Work::Op(&Op::Matmul), &x, &y);
        let call = LibraryCall { constants: &[1], epilogue, ..plain };
        // The packed constant, whether there is an epilogue, the number of inputs, the output's rank.
        type Tried = (Option<usize>, bool, usize, usize);
        let tried = |call: &LibraryCall<'_>, packs, accept: usize| {
            let all = std::cell::RefCell::new(Vec::<Tried>::new());
            let found = CallForm::first(call, packs, |f| {
                assert_eq!(f.own, 2);
                let form = (f.packed, f.epilogue.is_some(), f.inputs.len(), f.outputs[0].view.rank());
                all.borrow_mut().push(form);
                let n = all.borrow().len();
                if n == accept { Ok(n) } else { Err(Declined::because(format!("no {n}"))) }
            });
            (all.into_inner(), found.map_err(|d| d.reason))
        };
        let all: [Tried; 4] =
            [(Some(1), true, 3, 1), (Some(1), false, 2, 2), (None, true, 3, 1), (None, false, 2, 2)];
        assert_eq!(tried(&call, true, 0), (all.to_vec(), Err("no 4".into())));
        assert_eq!(tried(&call, true, 2), (all[..2].to_vec(), Ok(2)));
        assert_eq!(tried(&call, false, 0), (all[2..].to_vec(), Err("no 2".into())));
        assert_eq!(tried(&plain, true, 0), (all[3..].to_vec(), Err("no 1".into())));
    }

    #[test]
    fn buffers_are_as_large_as_needed_and_apart() {
        let (x, y) = ([operand(&[4]), operand(&[2])], [operand(&[4])]);
        let call = LibraryCall::new(Work::Op(&Op::Matmul), &x, &y);
        let check = |in_place: usize, at: [(u64, usize); 3]| {
            let needs = CallForm { in_place, ..CallForm::plain(&call) }.needs().unwrap();
            let bound = |i: usize| Bound { address: at[i].0, bytes: at[i].1, span: at[i].1 };
            needs.check("kernel", 3, bound).map_err(|e| e.to_string())
        };
        let says = |r: Result<(), String>, what: &str| {
            let e = r.unwrap_err();
            assert!(e.contains(what), "{e}");
        };
        check(0, [(0, 16), (16, 8), (24, 16)]).unwrap();
        // Operands that are only read may overlap.
        check(0, [(0, 16), (0, 8), (24, 16)]).unwrap();
        says(check(0, [(0, 16), (16, 4), (24, 16)]), "buffer 1 has 4 bytes, 8 are needed");
        says(check(0, [(0, 16), (16, 16), (24, 16)]), "buffer 2 is written, but it overlaps another buffer");
        says(check(0, [(0, 16), (16, 8), (0, 16)]), "buffer 2 is written, but it overlaps another buffer");
        check(1, [(0, 16), (16, 8), (0, 16)]).unwrap();
        says(check(1, [(0, 16), (8, 8), (0, 16)]), "buffer 2 is written, but it overlaps another buffer");
        says(check(1, [(0, 16), (16, 8), (24, 16)]), "output 0 must be input 0's buffer");
        // Two outputs in place of two inputs.
        let two = [operand(&[4]), operand(&[2])];
        let call = LibraryCall { in_place: 2, ..LibraryCall::new(Work::Op(&Op::Matmul), &x, &two) };
        let needs = CallForm::plain(&call).needs().unwrap();
        let check = |at: [(u64, usize); 4]| {
            let bound = |i: usize| Bound { address: at[i].0, bytes: at[i].1, span: at[i].1 };
            needs.check("kernel", 4, bound).map_err(|e| e.to_string())
        };
        check([(0, 16), (16, 8), (0, 16), (16, 8)]).unwrap();
        says(check([(0, 16), (16, 8), (0, 16), (24, 8)]), "output 1 must be input 1's buffer");
        says(check([(0, 16), (8, 8), (0, 16), (8, 8)]), "is written, but it overlaps another buffer");
        says(check([(0, 16), (16, 8), (16, 16), (0, 8)]), "is written, but it overlaps another buffer");
        let call = LibraryCall::new(Work::Op(&Op::Matmul), &x, &y);
        let needs = CallForm::plain(&call).needs().unwrap();
        says(needs.check("kernel", 2, |_| unreachable!()).map_err(|e| e.to_string()), "2 buffers were bound");
    }
}
