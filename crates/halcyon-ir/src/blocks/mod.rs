//! Formats of block-quantised weights: a fixed number of elements in a fixed number of bytes.
//!
//! The formats are those of ggml. A matrix `[n, k]` is stored as bytes `[n, k / elements * bytes]`; a row is a
//! sequence of blocks. [`BlockType`] has one row per format, with its name, sizes and codecs.

mod formats;

pub(crate) use formats::{IQ4_VALUES, MXFP4_VALUES};

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
    /// Decodes one block: `bytes` bytes to `elements` floats.
    pub decode: fn(&[u8], &mut [f32]),
    /// Encodes one block, with the error that ggml's reference quantiser has. `None`: only read.
    pub encode: Option<fn(&[f32], &mut [u8])>,
}

macro_rules! block_types {
    ($($variant:ident => $row:expr,)*) => {
        /// A format of block-quantised weights.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
        #[allow(non_camel_case_types)]
        pub enum BlockType {
            $($variant,)*
        }

        impl BlockType {
            /// Every format.
            pub const ALL: &'static [BlockType] = &[$(BlockType::$variant),*];

            /// The facts about the format.
            pub fn row(self) -> &'static BlockRow {
                match self {
                    $(BlockType::$variant => &$row,)*
                }
            }
        }
    };
}

block_types! {
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

impl BlockType {
    /// The name in files and messages, in lower case: `q4_k`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The format with this name, in any case.
    pub fn from_name(name: &str) -> Option<BlockType> {
        BlockType::ALL.iter().copied().find(|b| b.name().eq_ignore_ascii_case(name))
    }

    /// The format with this number in GGUF files.
    pub fn from_ggml(number: u32) -> Option<BlockType> {
        BlockType::ALL.iter().copied().find(|b| b.row().ggml == number)
    }

    /// Bytes of `elements` weights. `None` if they do not fill whole blocks, or on overflow.
    pub fn bytes_of(self, elements: usize) -> Option<usize> {
        let r = self.row();
        elements.is_multiple_of(r.elements).then(|| (elements / r.elements).checked_mul(r.bytes)).flatten()
    }

    /// Elements in `bytes` bytes. `None` if the bytes are not whole blocks, or on overflow.
    pub fn elements_of(self, bytes: usize) -> Option<usize> {
        let r = self.row();
        bytes.is_multiple_of(r.bytes).then(|| (bytes / r.bytes).checked_mul(r.elements)).flatten()
    }

    /// Decodes whole blocks. `from` and `to` have the same number of blocks; further blocks of the longer one
    /// are ignored.
    pub fn decode(self, from: &[u8], to: &mut [f32]) {
        let r = self.row();
        for (b, v) in from.chunks_exact(r.bytes).zip(to.chunks_exact_mut(r.elements)) {
            (r.decode)(b, v);
        }
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
