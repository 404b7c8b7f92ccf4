//! Block-quantised weights decoded to f32.

use crate::Declined;
use crate::cpu::library::CpuKernel;
use crate::cpu::library::calls::dense;
use crate::cpu::team::{SharedConst, SharedMut};
use crate::library_call::CallForm;
use halcyon_ir::DType;
use halcyon_ir::blocks::BlockType;

/// Fewest elements of a part.
const GRAIN: usize = 4096;

/// [`halcyon_ir::ops::Op::DecodeBlocks`] of a dense operand.
pub(crate) fn decode(call: &CallForm<'_>, format: BlockType) -> Result<CpuKernel, Declined> {
    let ([x], [y]) = (call.inputs, call.outputs) else {
        return Err(Declined::because("one operand and one output are needed"));
    };
    if (x.dtype, y.dtype) != (DType::U8, DType::F32) {
        return Err(Declined::because(format!("blocks of {} to {} are not supported", x.dtype, y.dtype)));
    }
    dense(call, &[0])?;
    let (view, row) = (x.view.clone(), format.row());
    // The type rule has checked that a row has whole blocks.
    let blocks = view.numel() / row.bytes;
    CpuKernel::new("cpu.decode_blocks", call, move |r| {
        let (from, to) = (SharedConst(r.ptr::<u8>(0, &view)), SharedMut(r.bufs[1].ptr as *mut f32));
        r.team.ranges(blocks, GRAIN / row.elements, &|a, b| {
            // SAFETY: `CpuKernel::run` has checked that the operand, which is dense, and the output lie in
            // their buffers and do not overlap. Both have `blocks` blocks, and each part has its own.
            let (from, to) = unsafe {
                let from = from.get().add(a * row.bytes);
                let to = to.get().add(a * row.elements);
                let n = b - a;
                (
                    std::slice::from_raw_parts(from, n * row.bytes),
                    std::slice::from_raw_parts_mut(to, n * row.elements),
                )
            };
            format.decode(from, to);
        });
    })
}
