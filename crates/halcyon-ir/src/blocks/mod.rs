//! Formats of block-quantised weights: a fixed number of elements in a fixed number of bytes.

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
    /// Encodes whole blocks, as many as both slices hold, with the error of ggml's reference quantiser. `None`:
    /// only read.
    pub encode: Option<fn(&[f32], &mut [u8])>,
}

/// A row, from functions that work on one block of constant size. The loop over the blocks is here, so that each
/// format is one loop without calls.
macro_rules! block_row {
    ($row:ident, $name:literal, $ggml:literal, $elements:literal, $bytes:literal, $decode:path $(, $encode:path)?) => {
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
        (elements % self.elements == 0).then(|| (elements / self.elements).checked_mul(self.bytes)).flatten()
    }

    /// Elements in `bytes` bytes. `None` if the bytes are not whole blocks, or on overflow.
    pub fn elements_of(&self, bytes: usize) -> Option<usize> {
        (bytes % self.bytes == 0).then(|| (bytes / self.bytes).checked_mul(self.elements)).flatten()
    }
}

impl BlockType {
    /// Encodes whole blocks, with the error of ggml's reference quantiser. `from` and `to` have the same number
    /// of blocks; further blocks of the longer one are ignored.
    pub fn encode(self, from: &[f32], to: &mut [u8]) {
        let encode = self.row().encode.expect("every format of this table has an encoder");
        encode(from, to);
    }
}
