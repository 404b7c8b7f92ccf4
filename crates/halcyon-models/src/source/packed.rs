//! Quantised matrices of folders: from the stored codes, scales and zero points to blocks or floats.

use super::Weights;
use bytes::Bytes;
use halcyon::ir::error::{Error, Result};
use halcyon::{BlockType, ConstData, DType};
use half::{bf16, f16};

/// Elements of a block of the block types that are used here.
const BLOCK: usize = 32;
/// Rows that are decoded together, because some formats store neighbouring rows next to each other.
const ROWS: usize = 64;
/// AWQ: the row of each four bits of a word, from the low ones.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// The magnitudes of f4e2m1.
const F4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Values that rectangles of a matrix share.
#[derive(Clone, Debug)]
pub(super) struct Grid<T> {
    pub values: Vec<T>,
    /// Values per row of the grid.
    pub width: usize,
    /// The grid's row of each row of the matrix, and its column of each column.
    pub row: Vec<u32>,
    pub column: Vec<u32>,
}

impl<T: Copy> Grid<T> {
    fn line(&self, row: usize) -> &[T] {
        let first = self.row[row] as usize * self.width;
        &self.values[first..first + self.width]
    }
}

/// How the codes are stored.
#[derive(Clone, Debug)]
pub(super) enum Codes {
    /// A sequence of `bits` bits for each row, which begins with a word of 32 bits.
    Rows {
        bits: usize,
        words: usize,
    },
    /// A sequence of `bits` bits for each column of `[words, rows]` words (GPTQ).
    Columns {
        bits: usize,
    },
    /// Four bits; a word has eight rows of one column (AWQ).
    Awq,
    I8,
    /// Floats of 8 bits.
    F8(DType),
    /// f4e2m1, two in a byte, the first in the low bits.
    F4,
}

/// A matrix, or several: `dims` are those of the decoded tensor, and end with rows and columns.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub dims: Vec<usize>,
    pub codes: Codes,
    pub data: ConstData,
    pub scale: Grid<f32>,
    /// What is subtracted from each code. `None`: half the range of unsigned codes.
    pub zero: Option<Grid<i16>>,
    /// All bytes in the file.
    pub size: usize,
}

/// How a matrix is kept in memory. A later form can hold everything that an earlier one holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Form {
    Mxfp4,
    /// Integers from -8 to 7, in `q4_0`.
    Bits4,
    /// From -16 to 15, in `q5_0`.
    Bits5,
    /// From -128 to 127, in `q8_0`.
    Bits8,
    F16,
    Bf16,
    F32,
}

impl Form {
    pub(super) fn blocks(self) -> Option<BlockType> {
        match self {
            Form::Mxfp4 => Some(BlockType::MXFP4),
            Form::Bits4 => Some(BlockType::Q4_0),
            Form::Bits5 => Some(BlockType::Q5_0),
            Form::Bits8 => Some(BlockType::Q8_0),
            Form::F16 | Form::Bf16 | Form::F32 => None,
        }
    }

    /// The type of decoded values.
    pub(super) fn dtype(self) -> DType {
        match self {
            Form::F16 => DType::F16,
            Form::Bf16 => DType::BF16,
            _ => DType::F32,
        }
    }

    /// The form for matrices of both forms, which are stored in one tensor.
    pub(super) fn join(self, other: Form) -> Form {
        let (low, high) = (self.min(other), self.max(other));
        match (low, high) {
            _ if low == high => low,
            // Neither holds the other's values.
            (Form::Mxfp4, Form::Bits4 | Form::Bits5 | Form::Bits8) | (Form::F16, Form::Bf16) => Form::F32,
            _ => high,
        }
    }
}

impl Codes {
    /// The least and the greatest code, of integers.
    fn range(&self) -> Option<(i32, i32)> {
        match self {
            Codes::Rows { bits, .. } | Codes::Columns { bits } => Some((0, (1 << bits) - 1)),
            Codes::Awq => Some((0, 15)),
            Codes::I8 => Some((-128, 127)),
            Codes::F8(_) | Codes::F4 => None,
        }
    }

    /// What is subtracted from codes without zero points.
    fn middle(&self) -> i32 {
        match self.range() {
            Some((0, high)) => (high + 1) / 2,
            _ => 0,
        }
    }

    /// The largest magnitude of a code, as a float.
    fn largest(&self) -> f32 {
        match self {
            Codes::F8(DType::F8E5M2) => 57_344.0,
            Codes::F8(_) => 448.0,
            Codes::F4 => 6.0,
            _ => 256.0,
        }
    }
}

/// A power of two that `mxfp4` can store, as its exponent byte.
fn exponent(scale: f32) -> Option<u8> {
    let bits = scale.to_bits();
    match (bits >> 23, bits & 0x7f_ffff) {
        (e @ 1..=254, 0) => Some(e as u8),
        // 2^-127 is a subnormal f32.
        (0, 0x40_0000) => Some(0),
        _ => None,
    }
}

/// `bits` bits from bit `at` of little-endian words, of which the `i`-th is `word(i)`.
fn field(bits: usize, at: usize, word: impl Fn(usize) -> u32) -> u32 {
    let (w, shift) = (at / 32, at % 32);
    let mut v = word(w) >> shift;
    if shift + bits > 32 {
        v |= word(w + 1) << (32 - shift);
    }
    v & ((1 << bits) - 1)
}

/// The word with this number.
pub(super) fn word(bytes: &[u8], i: usize) -> u32 {
    bytes.as_chunks::<4>().0.get(i).map_or(0, |b| u32::from_le_bytes(*b))
}

/// The codes of a sequence of `bits` bits that begins at a word.
pub(super) fn sequence(bytes: &[u8], first_word: usize, bits: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| field(bits, i * bits, |w| word(bytes, first_word + w))).collect()
}

/// The rows in a word of AWQ: `word` holds rows `8 w..8 w + 8`.
pub(super) fn awq_rows(word: u32) -> [u32; 8] {
    let mut out = [0; 8];
    for (i, row) in AWQ_ORDER.iter().enumerate() {
        out[*row] = word >> (4 * i) & 15;
    }
    out
}

impl Stored {
    fn rows(&self) -> usize {
        self.dims[..self.dims.len() - 1].iter().product()
    }

    fn columns(&self) -> usize {
        self.dims[self.dims.len() - 1]
    }

    /// The smallest form that holds the values exactly; else floats of `dtype`.
    pub(super) fn form(&self, dtype: DType) -> Form {
        self.exact().unwrap_or_else(|| {
            let most = self.scale.values.iter().fold(0f32, |m, s| m.max(s.abs())) * self.codes.largest();
            match dtype {
                DType::BF16 => Form::Bf16,
                DType::F16 if most <= f16::MAX.to_f32() => Form::F16,
                _ => Form::F32,
            }
        })
    }

    /// The block type that holds the values exactly.
    fn exact(&self) -> Option<Form> {
        let by_block = |column: &[u32]| {
            let (blocks, rest) = column.as_chunks::<BLOCK>();
            rest.is_empty() && blocks.iter().all(|b| b.iter().all(|c| *c == b[0]))
        };
        if !by_block(&self.scale.column) {
            return None;
        }
        if matches!(self.codes, Codes::F4) {
            return self.scale.values.iter().all(|s| exponent(*s).is_some()).then_some(Form::Mxfp4);
        }
        let (low, high) = self.codes.range()?;
        let same = |s: &f32| f16::from_f32(*s).to_f32().to_bits() == s.to_bits();
        if !self.scale.values.iter().all(same) {
            return None;
        }
        let zeros = self.zero.iter().flat_map(|z| &z.values).map(|z| i32::from(*z));
        let (first, last) = match (zeros.clone().min(), zeros.max()) {
            (Some(a), Some(b)) => (low - b, high - a),
            _ => (low - self.codes.middle(), high - self.codes.middle()),
        };
        [(Form::Bits4, 8), (Form::Bits5, 16), (Form::Bits8, 128)]
            .into_iter()
            .find_map(|(form, n)| (first >= -n && last < n).then_some(form))
    }

    /// The codes of rows from `first` on, minus the zero points. `out` is `[rows, columns]`.
    fn integers(&self, first: usize, out: &mut [i16]) {
        let k = self.columns();
        let rows = out.len() / k;
        match self.codes {
            Codes::Rows { bits, words } => {
                for (r, out) in out.chunks_exact_mut(k).enumerate() {
                    let at = (first + r) * words;
                    for (i, v) in out.iter_mut().enumerate() {
                        *v = field(bits, i * bits, |w| word(self.data.bytes(), at + w)) as i16;
                    }
                }
            }
            Codes::Columns { bits } => {
                let all = self.rows();
                for i in 0..k {
                    for r in 0..rows {
                        let v = field(bits, i * bits, |w| word(self.data.bytes(), w * all + first + r));
                        out[r * k + i] = v as i16;
                    }
                }
            }
            Codes::Awq => {
                let words = self.rows() / 8;
                for i in 0..k {
                    for w in 0..rows / 8 {
                        let values = awq_rows(word(self.data.bytes(), i * words + first / 8 + w));
                        for (r, v) in values.into_iter().enumerate() {
                            out[(8 * w + r) * k + i] = v as i16;
                        }
                    }
                }
            }
            _ => {
                let bytes = &self.data.bytes()[first * k..];
                out.iter_mut().zip(bytes).for_each(|(v, b)| *v = i16::from(*b as i8));
            }
        }
        for (r, out) in out.chunks_exact_mut(k).enumerate() {
            match &self.zero {
                Some(z) => {
                    let line = z.line(first + r);
                    out.iter_mut().zip(&z.column).for_each(|(v, c)| *v -= line[*c as usize]);
                }
                None => out.iter_mut().for_each(|v| *v -= self.codes.middle() as i16),
            }
        }
    }

    /// The unscaled values of rows from `first` on.
    fn values(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let k = self.columns();
        match self.codes {
            Codes::F8(dtype) => {
                let bytes = Bytes::copy_from_slice(&self.data.bytes()[first * k..first * k + out.len()]);
                let data = halcyon_formats::data::from_bytes(dtype, &[out.len()], bytes)?;
                out.copy_from_slice(&super::floats(&data)?);
            }
            Codes::F4 => {
                for (i, v) in out.iter_mut().enumerate() {
                    let code = self.data.bytes()[(first * k + i) / 2] >> (4 * (i % 2));
                    let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                    *v = sign * F4[usize::from(code & 7)];
                }
            }
            _ => {
                let mut codes = vec![0; out.len()];
                self.integers(first, &mut codes);
                out.iter_mut().zip(codes).for_each(|(v, c)| *v = f32::from(c));
            }
        }
        Ok(())
    }

    /// The tensor in a form that holds its values.
    ///
    /// # Errors
    /// `Error::Internal` for blocks that do not hold the values.
    pub(super) fn make(&self, form: Form) -> Result<Weights> {
        let mut out = Vec::new();
        let (n, k) = (self.rows(), self.columns());
        let step = ROWS.min(n.max(1));
        for first in (0..n).step_by(step) {
            let rows = step.min(n - first);
            match form {
                Form::Mxfp4 => self.microscaled(first, rows, &mut out)?,
                Form::Bits4 | Form::Bits5 | Form::Bits8 => self.blocks(form, first, rows, &mut out),
                _ => self.decoded(form, first, rows, &mut out)?,
            }
        }
        let mut dims = self.dims.clone();
        let blocks = form.blocks();
        let dtype = match blocks {
            Some(b) => {
                let last = b.bytes_of(k).ok_or_else(|| Error::internal("a row that is not whole blocks"))?;
                *dims.last_mut().expect("at least two sizes") = last;
                DType::U8
            }
            None => form.dtype(),
        };
        let data = halcyon_formats::data::from_bytes(dtype, &dims, Bytes::from(out))?;
        Ok(Weights { data, blocks })
    }

    fn decoded(&self, form: Form, first: usize, rows: usize, out: &mut Vec<u8>) -> Result<()> {
        let k = self.columns();
        let mut values = vec![0f32; rows * k];
        self.values(first, &mut values)?;
        for (r, line) in values.chunks_exact_mut(k.max(1)).enumerate() {
            let scale = self.scale.line(first + r);
            line.iter_mut().zip(&self.scale.column).for_each(|(v, c)| *v *= scale[*c as usize]);
        }
        match form {
            Form::F16 => out.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
            Form::Bf16 => out.extend(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
            _ => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        }
        Ok(())
    }

    fn blocks(&self, form: Form, first: usize, rows: usize, out: &mut Vec<u8>) {
        let k = self.columns();
        let mut codes = vec![0i16; rows * k];
        self.integers(first, &mut codes);
        for (r, line) in codes.chunks_exact(k).enumerate() {
            let scale = self.scale.line(first + r);
            for (b, codes) in line.as_chunks::<BLOCK>().0.iter().enumerate() {
                let d = f16::from_f32(scale[self.scale.column[b * BLOCK] as usize]);
                out.extend(d.to_le_bytes());
                match form {
                    Form::Bits4 => nibbles(codes, 8, out),
                    Form::Bits5 => {
                        let fifth = |(i, v): (usize, &i16)| ((*v + 16) as u32 >> 4 & 1) << i;
                        out.extend(codes.iter().enumerate().map(fifth).sum::<u32>().to_le_bytes());
                        nibbles(codes, 16, out);
                    }
                    _ => out.extend(codes.iter().map(|v| *v as u8)),
                }
            }
        }
    }

    fn microscaled(&self, first: usize, rows: usize, out: &mut Vec<u8>) -> Result<()> {
        let k = self.columns();
        for r in first..first + rows {
            let scale = self.scale.line(r);
            for b in 0..k / BLOCK {
                let e = exponent(scale[self.scale.column[b * BLOCK] as usize]);
                out.push(e.ok_or_else(|| Error::internal("a scale that is not a power of two"))?);
                let at = (r * k + b * BLOCK) / 2;
                let code = |i: usize| i16::from(self.data.bytes()[at + i / 2] >> (4 * (i % 2)) & 15);
                nibbles(&std::array::from_fn(code), 0, out);
            }
        }
        Ok(())
    }
}

/// The low four bits of `code + shift`: elements 0 to 15 in the low halves of bytes, the others in the high.
fn nibbles(codes: &[i16; BLOCK], shift: i16, out: &mut Vec<u8>) {
    let low = |i: usize| (codes[i] + shift) as u8 & 15;
    out.extend((0..BLOCK / 2).map(|i| low(i) | low(i + BLOCK / 2) << 4));
}

/// The values of a tensor of floats, or of exponents of two.
pub(super) fn scales(data: &ConstData) -> Result<Vec<f32>> {
    match data.dtype {
        // 2^-127 is a subnormal f32.
        DType::U8 | DType::F8E8M0 => {
            Ok(data.bytes().iter().map(|b| 2f64.powi(i32::from(*b) - 127) as f32).collect())
        }
        _ => super::floats(data),
    }
}
