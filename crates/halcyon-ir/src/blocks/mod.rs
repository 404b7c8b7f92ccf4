//! Formats of block-quantised weights: a fixed number of elements in a fixed number of bytes.
//!
//! The formats are those of ggml (<https://github.com/ggml-org/ggml>, MIT licence). `mxfp4` is that of the
//! OCP Microscaling Formats specification 1.0 in ggml's order of bytes. A matrix `[n, k]` is stored as bytes
//! `[n, k / elements * bytes]`; a row is a sequence of blocks. [`BlockType`] has one row per format that is
//! kept, with its name, sizes and codecs. [`LoadOnly`] has those that are decoded when a model is loaded.
//!
//! # Layout of the bytes
//!
//! Numbers of several bytes are little-endian. `x` is an element, `i` its number in the block, and `q` its
//! code. `low(c, n)` are codes of 4 bits of `2 n` elements in `n` bytes from offset `c`: byte `j` has element
//! `j` in its low half and element `n + j` in its high half. A part is 16 or 32 elements that share a scale;
//! `p` is the number of the part, from 0.
//!
//! ## Blocks of 32 elements
//!
//! | format | offset | size | meaning |
//! |---|---|---|---|
//! | `q4_0` | 0 | 2 | `d`, an `f16`; `x = (q - 8) d` |
//! | | 2 | 16 | the codes: `low(2, 16)` |
//! | `q4_1` | 0 | 2 | `d`, an `f16`; `x = q d + m` |
//! | | 2 | 2 | `m`, an `f16` |
//! | | 4 | 16 | the codes: `low(4, 16)` |
//! | `q5_0` | 0 | 2 | `d`, an `f16`; `x = (q - 16) d` |
//! | | 2 | 4 | a `u32`: bit `i` is bit 4 of the code of element `i` |
//! | | 6 | 16 | bits 0 to 3 of the codes: `low(6, 16)` |
//! | `q5_1` | 0 | 2 | `d`, an `f16`; `x = q d + m` |
//! | | 2 | 2 | `m`, an `f16` |
//! | | 4 | 4 | a `u32`: bit `i` is bit 4 of the code of element `i` |
//! | | 8 | 16 | bits 0 to 3 of the codes: `low(8, 16)` |
//! | `q8_0` | 0 | 2 | `d`, an `f16`; `x = q d` |
//! | | 2 | 32 | the codes, an `i8` each |
//! | `iq4_nl` | 0 | 2 | `d`, an `f16`; `x = d t[q]` with the table `t` below |
//! | | 2 | 16 | the codes: `low(2, 16)` |
//! | `mxfp4` | 0 | 1 | `e`; `x = 2^(e - 128) u[q]` with the table `u` below |
//! | | 1 | 16 | the codes: `low(1, 16)` |
//!
//! The table `t` is -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113. The table `u`
//! has twice the values of f4e2m1: 0, 1, 2, 3, 4, 6, 8, 12, and the same with a minus; code 8 is zero without
//! a sign.
//!
//! ## Blocks of 256 elements
//!
//! | format | offset | size | meaning |
//! |---|---|---|---|
//! | `q2_k` | 0 | 16 | `s` of 16 parts in the low halves, `m` in the high ones; `x = d s q - dmin m` |
//! | | 16 | 64 | the codes, 2 bits each: byte `32 (i / 128) + i % 32`, bits from `2 (i / 32 % 4)` |
//! | | 80 | 2 | `d`, an `f16` |
//! | | 82 | 2 | `dmin`, an `f16` |
//! | `q3_k` | 0 | 32 | bit 2 of the codes: byte `i % 32`, bit `i / 32`; `x = d (s - 32) (q - 4)` |
//! | | 32 | 64 | bits 0 and 1 of the codes, arranged as in `q2_k` |
//! | | 96 | 8 | bits 0 to 3 of `s` of 16 parts: `low(96, 8)` with parts for elements |
//! | | 104 | 4 | bits 4 and 5 of `s`: byte `p % 4`, bits from `2 (p / 4)` |
//! | | 108 | 2 | `d`, an `f16` |
//! | `q4_k` | 0 | 2 | `d`, an `f16`; 8 parts; `x = d s q - dmin m` |
//! | | 2 | 2 | `dmin`, an `f16` |
//! | | 4 | 4 | `s` of parts 0 to 3 in bits 0 to 5; above them bits 4 and 5 of `s` of parts 4 to 7 |
//! | | 8 | 4 | `m` of parts 0 to 3 in bits 0 to 5; above them bits 4 and 5 of `m` of parts 4 to 7 |
//! | | 12 | 4 | parts 4 to 7: bits 0 to 3 of `s` in the low half, of `m` in the high half |
//! | | 16 | 128 | the codes of each 64 elements: `low(16 + 32 (i / 64), 32)` |
//! | `q5_k` | 0 | 16 | as in `q4_k` |
//! | | 16 | 32 | bit 4 of the codes: byte `i % 32`, bit `i / 32` |
//! | | 48 | 128 | bits 0 to 3 of the codes of each 64 elements: `low(48 + 32 (i / 64), 32)` |
//! | `q6_k` | 0 | 128 | bits 0 to 3 of the codes of each 128 elements: `low(64 (i / 128), 64)` |
//! | | 128 | 64 | bits 4 and 5 of the codes, arranged as in `q2_k`; `x = d s (q - 32)` |
//! | | 192 | 16 | `s` of 16 parts, an `i8` each |
//! | | 208 | 2 | `d`, an `f16` |
//! | `iq4_xs` | 0 | 2 | `d`, an `f16`; 8 parts; `x = d (s - 32) t[q]` with the table of `iq4_nl` |
//! | | 2 | 2 | a `u16`: bits 4 and 5 of `s`, in bits from `2 p` |
//! | | 4 | 4 | bits 0 to 3 of `s`: byte `p / 2`, its low half for even `p` |
//! | | 8 | 128 | the codes of each part: `low(8 + 16 p, 16)` |
//!
//! ## Formats that are decoded when they are loaded
//!
//! All have 256 elements. A codebook has an entry for each group of 8 elements (4 in the iq3 formats); `g` is
//! the number of the group, and `c` the value in the entry. A scale of 4 bits or less, `s`, belongs to 32
//! elements or 16. A sign bit that is set makes `x` negative. Where a group of 8 has 7 sign bits, the eighth
//! makes the number of negative ones even.
//!
//! | format | offset | size | meaning |
//! |---|---|---|---|
//! | `iq2_xxs` | 0 | 2 | `d`, an `f16`; `x = d (s + 1/2) / 4 c`, `c` is 8, 25 or 43 |
//! | | 2 | 64 | for each 32 elements: 4 indices of a byte, and a `u32` with 4 times 7 signs and `s` on top |
//! | `iq2_xs` | 0 | 2 | `d`, as in `iq2_xxs` |
//! | | 2 | 64 | a `u16` per group: an index of 9 bits and 7 signs |
//! | | 66 | 8 | `s` of each 16 elements, the low half first |
//! | `iq2_s` | 0 | 2 | `d`, as in `iq2_xxs` |
//! | | 2 | 32 | bits 0 to 7 of the indices |
//! | | 34 | 32 | 8 signs per group |
//! | | 66 | 8 | bits 8 and 9 of the indices: byte `g / 4`, bits from `2 (g % 4)` |
//! | | 74 | 8 | `s` of each 16 elements, the low half first |
//! | `iq3_xxs` | 0 | 2 | `d`, an `f16`; `x = d (s + 1/2) / 2 c`, `c` is 4, 12, 20, 28, 36, 44, 52 or 62 |
//! | | 2 | 64 | the indices, a byte each |
//! | | 66 | 32 | a `u32` for each 32 elements: 4 times 7 signs and `s` on top |
//! | `iq3_s` | 0 | 2 | `d`, an `f16`; `x = d (1 + 2 s) c`, `c` is odd, from 1 to 15 |
//! | | 2 | 64 | bits 0 to 7 of the indices |
//! | | 66 | 8 | bit 8 of the indices: byte `g / 8`, bit `g % 8` |
//! | | 74 | 32 | the signs: byte `i / 8`, bit `i % 8` |
//! | | 106 | 4 | `s` of each 32 elements, the low half first |
//! | `iq1_s` | 0 | 2 | `d`, an `f16`; `x = d (1 + 2 s) (c + delta)`, `c` is -1, 0 or 1, `delta` 1/8 or -1/8 |
//! | | 2 | 32 | bits 0 to 7 of the indices |
//! | | 34 | 16 | a `u16` for each 32 elements: bits 8 to 10 of 4 indices, 3 bits `s`, the sign of `delta` |
//! | `iq1_m` | 0 | 32 | bits 0 to 7 of the indices; `x` as in `iq1_s` |
//! | | 32 | 16 | a half byte per group: bits 8 to 10 of the index, the sign of `delta` |
//! | | 48 | 8 | four `u16`: `s` of 4 times 16 elements in 3 bits each, and on top 4 bits of `d`, an `f16` |
//! | `tq1_0` | 0 | 32 | 5 digits of base 3 per byte: the `k`-th is element `32 k + j`; `x = d (q - 1)` |
//! | | 32 | 16 | the same for elements 160 to 239, in rows of 16 |
//! | | 48 | 4 | 4 digits per byte for elements 240 to 255, in rows of 4 |
//! | | 52 | 2 | `d`, an `f16` |
//! | `tq2_0` | 0 | 64 | the codes, arranged as in `q2_k`; `x = d (q - 1)` |
//! | | 64 | 2 | `d`, an `f16` |
//!
//! Byte `j` of `tq1_0` is a fraction of 256: the number of its digits divided by `3^5`, rounded up. The
//! `k`-th digit is `3 (3^k j % 256) / 256`, rounded down.

mod codebooks;
mod encode;
mod formats;
mod load_only;
mod search;

use serde::{Deserialize, Serialize};
use std::fmt;

/// The facts about a format.
#[derive(Debug)]
pub struct BlockRow {
    /// The name in files and messages, in lower case: `q4_k`.
    pub name: &'static str,
    /// The number of the type in GGUF files.
    pub ggml: u32,
    /// Elements of a block.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Decodes whole blocks, as many as both slices hold: `bytes` bytes to `elements` floats each.
    pub decode: fn(&[u8], &mut [f32]),
    /// Encodes whole blocks, as many as both slices hold, with the error of ggml's reference quantiser.
    pub encode: Option<fn(&[f32], &mut [u8])>,
}

/// A row, from functions that work on one block of constant size. The loop over the blocks is here, so that
/// each format is one loop without calls.
macro_rules! block_row {
    ($row:ident, $name:literal, $ggml:literal, $elements:literal, $bytes:literal, $decode:path
     $(, $encode:path)?) => {
        pub(super) static $row: BlockRow = BlockRow {
            name: $name,
            ggml: $ggml,
            elements: $elements,
            bytes: $bytes,
            decode: |from, to| {
                let (from, to) = (from.as_chunks::<$bytes>().0, to.as_chunks_mut::<$elements>().0);
                for (from, to) in from.iter().zip(to) {
                    $decode(from, to);
                }
            },
            encode: block_row!(@encode $elements, $bytes $(, $encode)?),
        };
    };
    (@encode $elements:literal, $bytes:literal) => { None };
    (@encode $elements:literal, $bytes:literal, $encode:path) => {
        Some(|from, to| {
            let (from, to) = (from.as_chunks::<$elements>().0, to.as_chunks_mut::<$bytes>().0);
            for (from, to) in from.iter().zip(to) {
                $encode(from, to);
            }
        })
    };
}
use block_row;

macro_rules! block_types {
    ($(#[$about:meta])* $type:ident { $($variant:ident => $row:expr,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
        #[allow(non_camel_case_types)]
        pub enum $type {
            $($variant,)*
        }

        impl $type {
            /// Every format.
            pub const ALL: &'static [$type] = &[$($type::$variant),*];

            /// The facts about the format.
            pub fn row(self) -> &'static BlockRow {
                match self {
                    $($type::$variant => &$row,)*
                }
            }

            /// The name in files and messages, in lower case: `q4_k`.
            pub fn name(self) -> &'static str {
                self.row().name
            }

            /// The format with this name, in any case.
            pub fn from_name(name: &str) -> Option<$type> {
                $type::ALL.iter().copied().find(|b| b.name().eq_ignore_ascii_case(name))
            }

            /// The format with this number in GGUF files.
            pub fn from_ggml(number: u32) -> Option<$type> {
                $type::ALL.iter().copied().find(|b| b.row().ggml == number)
            }

            /// Bytes of `elements` weights. `None` if they do not fill whole blocks, or on overflow.
            pub fn bytes_of(self, elements: usize) -> Option<usize> {
                self.row().bytes_of(elements)
            }

            /// Elements in `bytes` bytes. `None` if the bytes are not whole blocks, or on overflow.
            pub fn elements_of(self, bytes: usize) -> Option<usize> {
                self.row().elements_of(bytes)
            }

            /// Decodes whole blocks. `from` and `to` have the same number of blocks; further blocks of the
            /// longer one are ignored.
            pub fn decode(self, from: &[u8], to: &mut [f32]) {
                (self.row().decode)(from, to);
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

block_types! {
    /// A format of block-quantised weights that are kept as they are: kernels read the blocks.
    BlockType {
        Q4_0 => formats::Q4_0,
        Q4_1 => formats::Q4_1,
        Q5_0 => formats::Q5_0,
        Q5_1 => formats::Q5_1,
        Q8_0 => formats::Q8_0,
        Q2_K => formats::Q2_K,
        Q3_K => formats::Q3_K,
        Q4_K => formats::Q4_K,
        Q5_K => formats::Q5_K,
        Q6_K => formats::Q6_K,
        IQ4_NL => formats::IQ4_NL,
        IQ4_XS => formats::IQ4_XS,
        MXFP4 => formats::MXFP4,
    }
}

block_types! {
    /// A format of block-quantised weights that are decoded when they are loaded.
    LoadOnly {
        IQ2_XXS => load_only::IQ2_XXS,
        IQ2_XS => load_only::IQ2_XS,
        IQ3_XXS => load_only::IQ3_XXS,
        IQ1_S => load_only::IQ1_S,
        IQ3_S => load_only::IQ3_S,
        IQ2_S => load_only::IQ2_S,
        IQ1_M => load_only::IQ1_M,
        TQ1_0 => load_only::TQ1_0,
        TQ2_0 => load_only::TQ2_0,
    }
}

impl BlockRow {
    /// Bytes of `elements` weights. `None` if they do not fill whole blocks, or on overflow.
    pub fn bytes_of(&self, elements: usize) -> Option<usize> {
        let blocks = elements.is_multiple_of(self.elements).then_some(elements / self.elements)?;
        blocks.checked_mul(self.bytes)
    }

    /// Elements in `bytes` bytes. `None` if the bytes are not whole blocks, or on overflow.
    pub fn elements_of(&self, bytes: usize) -> Option<usize> {
        let blocks = bytes.is_multiple_of(self.bytes).then_some(bytes / self.bytes)?;
        blocks.checked_mul(self.elements)
    }
}

impl BlockType {
    /// Encodes whole blocks, with the error of ggml's reference quantiser. `from` and `to` have the same
    /// number of blocks; further blocks of the longer one are ignored.
    pub fn encode(self, from: &[f32], to: &mut [u8]) {
        let encode = self.row().encode.expect("every format of this table has an encoder");
        encode(from, to);
    }
}
