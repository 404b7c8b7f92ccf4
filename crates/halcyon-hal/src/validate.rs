//! Checks that every driver performs before it accesses memory.

use crate::{Error, Result};
use halcyon_ir::kernel::{BufferDecl, Kernel, ParamDecl, Stmt, Ty, const_bits};
use halcyon_ir::{DType, Scalar};
use smallvec::SmallVec;

/// Fails unless `offset..offset + bytes` lies within a buffer of `size` bytes.
pub fn range(call: &str, size: usize, offset: usize, bytes: usize) -> Result<()> {
    match offset.checked_add(bytes) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::argument(
            call,
            format!("{bytes} bytes at offset {offset} do not fit a buffer of {size} bytes"),
        )),
    }
}

/// Fails unless both ranges, each given as [buffer size, offset], lie within their buffers and do not overlap
/// if both are in one buffer (`same`).
pub fn copy(src: [usize; 2], dst: [usize; 2], bytes: usize, same: bool) -> Result<()> {
    range("copy", src[0], src[1], bytes)?;
    range("copy", dst[0], dst[1], bytes)?;
    if same && src[1].abs_diff(dst[1]) < bytes {
        let what = format!("ranges of {bytes} bytes at {} and {} of one buffer overlap", src[1], dst[1]);
        return Err(Error::argument("copy", what));
    }
    Ok(())
}

/// The buffers and parameters of a kernel.
#[derive(Clone, Debug)]
pub struct Signature {
    pub name: String,
    /// The buffers that the kernel declares. If it declares the fault word, this is the last one, and the
    /// device binds it itself.
    pub buffers: Vec<BufferDecl>,
    pub params: Vec<ParamDecl>,
    /// Whether the kernel declares the fault word and the parameter `fault`.
    pub faults: bool,
    fault_param: Option<usize>,
}

/// The bits of one argument, with its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argument {
    pub ty: Ty,
    pub bits: u64,
}

impl Signature {
    /// The signature of a verified kernel.
    ///
    /// # Errors
    /// [`Error::Internal`] if a kernel that can fault lacks the fault word or the `fault` parameter, or sets
    /// an error in another buffer.
    pub fn of(k: &Kernel) -> Result<Signature> {
        let mut sets = false;
        let mut elsewhere = false;
        k.walk(&mut |s| {
            if let Stmt::SetError { buf, .. } = s {
                sets = true;
                elsewhere |= buf.ix() + 1 != k.buffers.len();
            }
        });
        // A kernel may declare the fault word without using it.
        let fault_param = k.params.iter().position(|p| p.name == "fault");
        let faults = sets || fault_param.is_some();
        if faults {
            let word = k.buffers.last().is_some_and(|b| b.write && b.dtype == DType::U32) && !elsewhere;
            if !word || fault_param.is_none_or(|p| k.params[p].ty != Ty::U32) {
                return Err(Error::internal(format!(
                    "kernel {} reports faults, so its last buffer must be the fault word (u32, written) and it needs a u32 \
                     parameter named fault",
                    k.name
                )));
            }
        }
        Ok(Signature {
            name: k.name.clone(),
            buffers: k.buffers.clone(),
            params: k.params.clone(),
            faults,
            fault_param,
        })
    }

    /// Number of buffers that the caller passes to a launch.
    pub fn bound(&self) -> usize {
        self.buffers.len() - self.faults as usize
    }

    /// Whether a parameter is the one that takes a command's fault id.
    pub fn is_fault(&self, param: usize) -> bool {
        self.fault_param == Some(param)
    }

    /// The arguments of a launch. `params` has a value for every parameter; the value of `fault` is replaced
    /// by the command's fault id.
    ///
    /// # Errors
    /// [`Error::Internal`] that names the kernel and the mismatch.
    pub fn arguments(
        &self,
        buffers: usize,
        params: &[Scalar],
        fault: u32,
    ) -> Result<SmallVec<[Argument; 16]>> {
        let wrong = |what: String| Error::internal(format!("launch of {}: {what}", self.name));
        if buffers != self.bound() {
            return Err(wrong(format!("{buffers} buffers given, {} expected", self.bound())));
        }
        if params.len() != self.params.len() {
            return Err(wrong(format!("{} parameters given, {} expected", params.len(), self.params.len())));
        }
        if self.faults && fault == 0 {
            return Err(wrong("it can fault, but its fault id is 0, which means no fault".into()));
        }
        let argument = |(i, (p, v)): (usize, (&ParamDecl, &Scalar))| {
            let v = if self.fault_param == Some(i) { Scalar::U(fault as u64) } else { *v };
            Argument { ty: p.ty, bits: const_bits(p.ty, v) }
        };
        Ok(self.params.iter().zip(params).enumerate().map(argument).collect())
    }
}
