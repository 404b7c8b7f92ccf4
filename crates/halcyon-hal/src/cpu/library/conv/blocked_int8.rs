//! Convolution of 8-bit integers in the blocked layout with 64 channels per block, `[N, C / 64, H, W, 64]`,
//! with exact sums in i32.
//!
//! A pixel's block is 64 bytes, the same size as a block of 32 bf16 channels. So the work is divided and the
//! input is copied in the same way as for bf16 ([`super::blocked_bf16`]), with two bytes in the place of one
//! bf16. The weights are i8, packed as `[O / 32, C / 64 / groups, KH, KW, 2, 16, 16, 4]`. The last four axes
//! are the halves of 32 output channels, the groups of four input channels, the output channels of a half,
//! and the four channels of a group. The image is u8 or i8; its zero point is 0, because padding is zero.
//!
//! - With AMX, tile registers multiply the bytes as they are (`tdpbusd`, `tdpbssd`).
//! - AVX512_VNNI multiplies unsigned by signed bytes (`vpdpbusd`). Signed images are read with 128 added, and
//!   the sums start at `-128 Σ w`.
//! - AVX2 multiplies pairs of bytes into 16 bits with saturation (`vpmaddubsw`). No sum saturates if
//!   `|w₁| + |w₂| <= 128` for all pairs of weights. Packing checks this; weights of 7 bits fulfil it.
//!   Otherwise the bytes are widened to 16 bits, which takes twice as long.
//!
//! The sums are converted to f32. Then scale, bias, residual and activation are applied, and the result is
//! stored as f32, or quantised and stored as bytes.

use super::blocked::Buffers;
use super::blocked_bf16::Blocked16;
use super::blocked_bf16_parts::After;
use super::blocked_bf16_tile::{BLOCK as HALF_BLOCK, HALF};
use super::blocked_tile::Activation;
use super::plain::Conv;
use crate::cpu::library::gemm::product_bf16::Bf16Code;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};
use std::sync::atomic::{AtomicBool, Ordering};

/// Channels of a block.
pub const BLOCK: usize = 64;
/// A sum has at most this many products, so that it fits i32.
const MAX_TERMS: usize = 1 << 16;

/// The instructions that multiply bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Engine {
    /// Tile registers (AMX-INT8).
    Tiles,
    /// AVX512_VNNI.
    Vnni,
    Avx2,
}

impl Engine {
    /// The best instructions of this processor up to `isa`; `None` without AVX2.
    pub fn of(isa: Isa) -> Option<Engine> {
        match isa.check() {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            _ if isa.has_int8_tiles() => Some(Engine::Tiles),
            #[cfg(target_arch = "x86_64")]
            _ if isa.has_vnni() => Some(Engine::Vnni),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => Some(Engine::Avx2),
            _ => None,
        }
    }

    /// The part of a kernel's name that stands for the engine.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Tiles => "amx-int8",
            Engine::Vnni => "avx512-vnni",
            Engine::Avx2 => "avx2",
        }
    }
}

/// How bytes are multiplied, and whether the bytes of the image are signed.
#[derive(Clone, Copy, Debug)]
// Only x86-64 has the instructions.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct Bytes {
    pub engine: Engine,
    pub signed: bool,
}

/// How results are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Store {
    Float,
    /// `saturate(round(v * inverse) + zero)` as i8 (`signed`) or u8. A NaN becomes 0.
    Byte {
        inverse: f32,
        zero: f32,
        signed: bool,
    },
}

impl Store {
    /// Bytes of a result.
    pub(crate) fn size(self) -> usize {
        match self {
            Store::Float => size_of::<f32>(),
            Store::Byte { .. } => 1,
        }
    }
}

/// The epilogue `act(sum * scale + bias + residual)`, with one scale and bias per output channel. The
/// residual is f32 in the output's layout. Null pointers mean absent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteEpilogue {
    pub scale: SharedConst<f32>,
    pub bias: SharedConst<f32>,
    pub residual: SharedConst<f32>,
    pub act: Activation,
    pub to: Store,
}

/// A convolution of bytes whose input and output channels are in blocks of 64.
#[derive(Clone, Debug)]
pub struct Blocked8 {
    conv: Conv,
    parts: Blocked16,
}

impl Blocked8 {
    /// `None` if the channels do not come in whole blocks (64 input channels and 32 output channels per
    /// group, 64 output channels in all), if a sum could overflow i32, or if [`Blocked16::new`] does not
    /// support the geometry. This processor must have the instructions of `engine`. The image is i8 if
    /// `signed`, otherwise u8.
    pub fn new(conv: Conv, threads: usize, engine: Engine, signed: bool) -> Option<Blocked8> {
        let whole = (conv.c_in / conv.groups).is_multiple_of(BLOCK) && conv.c_out.is_multiple_of(BLOCK);
        if !whole || conv.k() > MAX_TERMS {
            return None;
        }
        let pairs = Conv { c_in: conv.c_in / 2, ..conv };
        let bytes = Bytes { engine, signed };
        let code = if engine == Engine::Tiles { Bf16Code::Tiles } else { Bf16Code::Wide };
        let parts = Blocked16::with(pairs, HALF_BLOCK, threads, code, Some(bytes))?;
        Some(Blocked8 { conv, parts })
    }

    fn blocks(&self) -> usize {
        self.parts.out_blocks()
    }

    /// Size of the packed weights in bytes: the weights, `-128 Σ w` of each output channel in i32, and a
    /// flag. The flag is set if no sum of two products can saturate.
    pub fn weights(&self) -> usize {
        self.blocks() * (self.parts.block_weights() + size_of::<i32>() * HALF_BLOCK) + 64
    }

    /// Bytes of workspace that a run needs.
    pub fn workspace(&self) -> usize {
        self.parts.workspace()
    }

    /// Packs `[O, C / groups, KH, KW]` weights into the layout that the kernel reads.
    ///
    /// # Safety
    /// All weights are readable at `w`; `to` is aligned to 4 bytes, writable for [`Blocked8::weights`] bytes
    /// and overlaps nothing else.
    pub unsafe fn pack(&self, team: &Team, w: *const i8, to: *mut u8) {
        let c = &self.conv;
        let (taps, channels) = (c.window.kernel_size(), c.c_in / c.groups);
        let size = self.parts.block_weights();
        let (w, to) = (SharedConst(w), SharedMut(to));
        let end = SharedMut(to.get().wrapping_add(self.blocks() * size) as *mut i32);
        let small = AtomicBool::new(true);
        team.run(self.blocks(), &|ob| {
            let to = to.get().wrapping_add(ob * size);
            let mut sums = [0i32; HALF_BLOCK];
            for step in 0..self.parts.depth() {
                for k in (0..BLOCK).step_by(2) {
                    let (channel, tap) = (step / taps * BLOCK + k, step % taps);
                    for (o, sum) in sums.iter_mut().enumerate() {
                        let from = ((ob * HALF_BLOCK + o) * channels + channel) * taps + tap;
                        let at = (2 * step + o / 16) * HALF + k / 4 * 64 + 4 * (o % 16) + k % 4;
                        // SAFETY: channel, tap and output index lie within the weights at `w`, also for the
                        // next channel, because `k` is even; `at + 1` lies within the block's weights at
                        // `to`; each part writes one block.
                        let pair = unsafe {
                            let pair = [*w.get().add(from), *w.get().add(from + taps)];
                            *to.add(at) = pair[0] as u8;
                            *to.add(at + 1) = pair[1] as u8;
                            pair.map(i32::from)
                        };
                        *sum += pair[0] + pair[1];
                        if pair[0].abs() + pair[1].abs() > 128 {
                            small.store(false, Ordering::Relaxed);
                        }
                    }
                }
            }
            for (o, sum) in sums.iter().enumerate() {
                // SAFETY: the trailer has one value for each output channel.
                unsafe { end.get().add(ob * HALF_BLOCK + o).write(-128 * sum) };
            }
        });
        // SAFETY: the trailer ends with 64 bytes for this flag.
        unsafe {
            end.get().add(self.blocks() * HALF_BLOCK).write(i32::from(small.load(Ordering::Relaxed)));
        }
    }

    /// Computes the convolution with its epilogue.
    ///
    /// # Safety
    /// In `buffers`, `x` is readable for the whole input, `w` for the weights that [`Blocked8::pack`] wrote,
    /// and `y` is writable for the output, which overlaps nothing else. `work` is writable for
    /// [`Blocked8::workspace`] bytes. The pointers of `after` are null or readable as [`ByteEpilogue`]
    /// describes. The processor has the instructions of the engine with which the convolution was made.
    ///
    /// # Panics
    /// If the team's number of threads is not the number for which the convolution was made.
    pub(crate) unsafe fn run(&self, team: &Team, isa: Isa, buffers: Buffers<u8, u8>, after: ByteEpilogue) {
        let Buffers { x, w, y, work } = buffers;
        let buffers = Buffers { x: x as *const u16, w: w as *const u16, y, work };
        // SAFETY: `run` has the contract of `run_with` for bytes.
        unsafe { self.parts.run_with(team, isa, buffers, After::Bytes(after)) }
    }
}
