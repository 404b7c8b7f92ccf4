//! Code shared by the drivers that capture commands: how the commands use the buffers of a recording, and
//! which parameters vary.

use crate::commands::{Addressed, Compiled};
use crate::hazard::{Access, Spans};
use crate::{BufferRef, Command, Error, Recording, Result};
use halcyon_ir::kernel::Ty;

/// A buffer that each launch of a capture passes: its address and its size at the capture, and how the
/// commands use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CapturedBuffer {
    at: usize,
    bytes: usize,
    reads: bool,
    writes: bool,
}

/// The buffers of a recording.
///
/// # Errors
/// [`Error::Argument`] if a command uses a buffer that is not among them, or if one of them belongs to
/// another opening of the device.
pub(crate) fn buffers<D: Addressed>(device: &D, r: &Recording<'_>) -> Result<Vec<CapturedBuffer>> {
    let mut access = device.access(r.commands);
    access.normalise();
    let (mut all, mut buffers) = (Spans::default(), vec![]);
    for b in r.buffers {
        let (at, bytes) = D::span(device.buffer("capture", b)?);
        all.add(at, bytes);
        let (reads, writes) = (access.reads.covers(at, at + bytes), access.writes.covers(at, at + bytes));
        // A buffer with unknown use counts as written.
        buffers.push(CapturedBuffer { at, bytes: b.bytes(), reads, writes: writes || !reads });
    }
    all.normalise();
    let brought = |b: &BufferRef| -> Result<()> {
        let (at, bytes) = D::span(device.buffer("capture", b)?);
        let missing = || Error::argument("capture", format!("{b:?} is not among those of the recording"));
        all.covers(at, at + bytes).then_some(()).ok_or_else(missing)
    };
    for c in r.commands {
        match c {
            Command::Launch { buffers, .. } | Command::Library { buffers, .. } => {
                buffers.iter().try_for_each(brought)?;
            }
            Command::Copy { src, dst, .. } => [*src, *dst].into_iter().try_for_each(brought)?,
        }
    }
    Ok(buffers)
}

/// Whether the buffers of a launch, as many as captured, are at their captured addresses. A smaller buffer at
/// a captured address is another buffer, and the commands were not captured for it. The caller holds the
/// queue's lock, so that no buffer is moved meanwhile.
///
/// # Errors
/// [`Error::Argument`] for a buffer of another opening of the device.
pub(crate) fn are_there<D: Addressed>(
    device: &D,
    buffers: &[&BufferRef],
    captured: &[CapturedBuffer],
) -> Result<bool> {
    for (b, was) in buffers.iter().zip(captured) {
        let (at, _) = D::span(device.buffer("launch_capture", b)?);
        if at != was.at || b.bytes() < was.bytes {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The memory that a launch uses. Ignores invalid buffers, because they are reported when the launch is
/// enqueued.
pub(crate) fn access<D: Addressed>(
    device: &D,
    buffers: &[&BufferRef],
    captured: &[CapturedBuffer],
) -> Access {
    let mut a = Access::default();
    for (b, how) in buffers.iter().zip(captured) {
        if let Ok((at, bytes)) = device.buffer("", b).map(D::span) {
            if how.reads {
                a.reads.add(at, bytes);
            }
            if how.writes {
                a.writes.add(at, bytes);
            }
        }
    }
    a
}

/// Checks that a launch passes as many items as were captured.
///
/// # Errors
/// [`Error::Argument`] with both numbers.
pub(crate) fn check(what: &str, given: usize, wanted: usize) -> Result<()> {
    match given == wanted {
        true => Ok(()),
        false => Err(Error::argument("launch_capture", format!("{given} {what} given, {wanted} captured"))),
    }
}

/// A parameter of a launch that varies: its index, its type, and the index of the variable that has its
/// value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Varying {
    pub param: usize,
    pub ty: Ty,
    pub variable: usize,
}

/// The parameters of each command that vary, by their indices.
///
/// # Errors
/// [`Error::Argument`] for a command or a parameter that does not exist or cannot vary.
pub(crate) fn varying<D: Addressed>(device: &D, r: &Recording<'_>) -> Result<Vec<Vec<Varying>>> {
    let wrong = |what: String| Err(Error::argument("capture", what));
    let mut own: Vec<Vec<(usize, usize)>> = vec![vec![]; r.commands.len()];
    for (i, (c, p)) in r.variables.iter().enumerate() {
        match own.get_mut(*c) {
            Some(of_command) => of_command.push((*p, i)),
            None => return wrong(format!("there is no command {c}")),
        }
    }
    let mut all = vec![];
    for (c, mut own) in r.commands.iter().zip(own) {
        let Command::Launch { program, .. } = c else {
            if !own.is_empty() {
                return wrong(format!("{c:?} has no parameters"));
            }
            all.push(vec![]);
            continue;
        };
        let s = device.program(program)?.signature();
        own.sort_unstable();
        let bad = |k: usize| k >= s.params.len() || s.is_fault(k);
        if own.windows(2).any(|w| w[0].0 == w[1].0) || own.last().is_some_and(|o| bad(o.0)) {
            return wrong(format!("parameters {own:?} of {} cannot vary", s.name));
        }
        all.push(own.iter().map(|(p, i)| Varying { param: *p, ty: s.params[*p].ty, variable: *i }).collect());
    }
    Ok(all)
}
