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
    let wide = y.dtype == DType::F64;
    if x.dtype != DType::U8 || !wide && y.dtype != DType::F32 {
        return Err(Declined::because(format!("blocks of {} to {} are not supported", x.dtype, y.dtype)));
    }
    dense(call, &[0])?;
    let (view, row) = (x.view.clone(), format.row());
    // The type rule has checked that a row has whole blocks.
    let blocks = view.numel() / row.bytes;
    CpuKernel::new("cpu.decode_blocks", call, move |r| {
        let (from, to) = (SharedConst(r.ptr::<u8>(0, &view)), SharedMut(r.bufs[1].ptr));
        r.team.ranges(blocks, GRAIN / row.elements, &|a, b| {
            // SAFETY: `CpuKernel::run` has checked that the operand, which is dense, lies in its buffer; it
            // has `blocks` blocks.
            let from =
                unsafe { std::slice::from_raw_parts(from.get().add(a * row.bytes), (b - a) * row.bytes) };
            let (first, n) = (a * row.elements, (b - a) * row.elements);
            if wide {
                // f64 is the type of references.
                let mut v = vec![0f32; n];
                format.decode(from, &mut v);
                // SAFETY: the output lies in its buffer, overlaps no operand and has as many blocks; each
                // part has its own.
                let to = unsafe { std::slice::from_raw_parts_mut(to.get().cast::<f64>().add(first), n) };
                to.iter_mut().zip(v).for_each(|(to, v)| *to = f64::from(v));
                return;
            }
            // SAFETY: the output lies in its buffer, overlaps no operand and has as many blocks; each part
            // has its own.
            format.decode(from, unsafe {
                std::slice::from_raw_parts_mut(to.get().cast::<f32>().add(first), n)
            });
        });
    })
}
