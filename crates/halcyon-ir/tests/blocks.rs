//! The block-quantised formats, compared with the package gguf and with ggml's reference quantisers.
//! `data/README.md` says where the cases come from.

use halcyon_ir::blocks::{BlockRow, BlockType, LoadOnly};

/// By how much the error of an encoder may exceed that of ggml's.
const LIMIT: f64 = 1.02;

/// Blocks of which only a digest of the elements is stored. They reach every entry of the codebooks.
const MANY: usize = 1000;

/// Reads the numbers of the file one after the other.
struct Reader(&'static [u8]);

impl Reader {
    fn bytes(&mut self, n: usize) -> &'static [u8] {
        let (head, tail) = self.0.split_at(n);
        self.0 = tail;
        head
    }

    fn size(&mut self) -> usize {
        u32::from_le_bytes(self.bytes(4).try_into().unwrap()) as usize
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        self.bytes(4 * n).as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
    }

    fn doubles(&mut self, n: usize) -> Vec<f64> {
        self.bytes(8 * n).as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect()
    }
}

struct Decoded {
    format: &'static BlockRow,
    blocks: &'static [u8],
    elements: Vec<f32>,
    /// Of the elements of `MANY` other blocks.
    digest: u64,
}

struct Encoded {
    format: BlockType,
    /// For each row.
    errors: Vec<f64>,
    /// Of all rows. Empty where ours may differ.
    blocks: &'static [u8],
}

struct Cases {
    decoded: Vec<Decoded>,
    rows: Vec<Vec<f32>>,
    encoded: Vec<Encoded>,
}

fn row_of(number: u32) -> &'static BlockRow {
    let kept = BlockType::from_ggml(number).map(BlockType::row);
    kept.or_else(|| LoadOnly::from_ggml(number).map(LoadOnly::row)).expect("a number of a format")
}

fn cases() -> Cases {
    let mut r = Reader(include_bytes!("data/blocks.bin"));
    let formats = r.size();
    let decoded = Vec::from_iter((0..formats).map(|_| {
        let format = row_of(r.size() as u32);
        let n = r.size();
        Decoded {
            format,
            blocks: r.bytes(n * format.bytes),
            elements: r.floats(n * format.elements),
            digest: u64::from_le_bytes(r.bytes(8).try_into().unwrap()),
        }
    }));
    let (n, length) = (r.size(), r.size());
    let rows = Vec::from_iter((0..n).map(|_| r.floats(length)));
    let formats = r.size();
    let encoded = Vec::from_iter((0..formats).map(|_| {
        let format = BlockType::from_ggml(r.size() as u32).expect("a number of a kept format");
        let errors = r.doubles(n);
        let bytes = r.size();
        Encoded { format, errors, blocks: r.bytes(bytes) }
    }));
    assert!(r.0.is_empty());
    Cases { decoded, rows, encoded }
}

fn decoded(format: &BlockRow, blocks: &[u8]) -> Vec<f32> {
    let mut v = vec![f32::MAX; format.elements_of(blocks.len()).unwrap()];
    (format.decode)(blocks, &mut v);
    v
}

fn encoded(format: BlockType, row: &[f32]) -> Vec<u8> {
    // The encoders write every bit.
    let mut b = vec![0xa5; format.bytes_of(row.len()).unwrap()];
    format.encode(row, &mut b);
    b
}

/// `n` bytes of the generator SplitMix64, which starts at 0.
fn random_bytes(n: usize) -> Vec<u8> {
    let numbers = (1..=n.div_ceil(8) as u64).flat_map(|i| {
        let z = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31).to_le_bytes()
    });
    numbers.take(n).collect()
}

/// FNV-1a of the bits, with 32 bits at a time. All NaN are the same.
fn digest(v: &[f32]) -> u64 {
    v.iter().fold(0xcbf2_9ce4_8422_2325, |h: u64, v| {
        let bits = if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() };
        (h ^ u64::from(bits)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The same bits, or both NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// The sum of the squared errors of the blocks.
fn error(format: BlockType, blocks: &[u8], row: &[f32]) -> f64 {
    let v = decoded(format.row(), blocks);
    v.iter().zip(row).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum()
}

#[test]
fn the_tables_have_all_formats_once() {
    let rows =
        Vec::from_iter(BlockType::ALL.iter().map(|t| t.row()).chain(LoadOnly::ALL.iter().map(|t| t.row())));
    let mut numbers = Vec::from_iter(rows.iter().map(|r| r.ggml));
    numbers.sort();
    assert_eq!(numbers, [2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 29, 34, 35, 39]);
    for t in BlockType::ALL {
        assert_eq!(BlockType::from_name(&t.name().to_uppercase()), Some(*t));
        assert_eq!(BlockType::from_ggml(t.row().ggml), Some(*t));
        assert!(t.row().encode.is_some() && LoadOnly::from_name(t.name()).is_none());
    }
    for t in LoadOnly::ALL {
        assert_eq!(LoadOnly::from_name(&t.to_string()), Some(*t));
        assert_eq!(LoadOnly::from_ggml(t.row().ggml), Some(*t));
        assert!(t.row().encode.is_none() && BlockType::from_ggml(t.row().ggml).is_none());
    }
    assert_eq!(BlockType::from_ggml(1), None);
    assert_eq!(BlockType::Q4_K.bytes_of(512), Some(288));
    assert_eq!(BlockType::Q4_K.bytes_of(511), None);
    assert_eq!(BlockType::Q8_0.bytes_of(usize::MAX - 31), None);
    assert_eq!(LoadOnly::IQ1_S.elements_of(100), Some(512));
    assert_eq!(LoadOnly::IQ1_S.elements_of(99), None);
}

#[test]
fn decoders_give_the_values_of_gguf() {
    let cases = cases();
    assert_eq!(cases.decoded.len(), BlockType::ALL.len() + LoadOnly::ALL.len());
    for c in &cases.decoded {
        let v = decoded(c.format, c.blocks);
        if let Some(i) = (0..v.len()).find(|&i| !same(v[i], c.elements[i])) {
            panic!("{}, element {i}: {:e}, gguf has {:e}", c.format.name, v[i], c.elements[i]);
        }
    }
}

#[test]
fn decoders_use_the_codebooks_of_gguf() {
    for c in &cases().decoded {
        let v = decoded(c.format, &random_bytes(MANY * c.format.bytes));
        assert_eq!(digest(&v), c.digest, "{}", c.format.name);
    }
}

#[test]
fn every_bit_of_a_block_matters() {
    // A bit that a decoder ignores would not be noticed by chance in the few random blocks.
    for c in &cases().decoded {
        let mut matters = vec![false; 8 * c.format.bytes];
        for (block, elements) in c.blocks.chunks(c.format.bytes).zip(c.elements.chunks(c.format.elements)) {
            for bit in 0..matters.len() {
                let mut block = block.to_vec();
                block[bit / 8] ^= 1 << (bit % 8);
                let v = decoded(c.format, &block);
                matters[bit] |= v.iter().zip(elements).any(|(&a, &b)| !same(a, b));
            }
        }
        let ignored = Vec::from_iter((0..matters.len()).filter(|&bit| !matters[bit]));
        assert!(ignored.is_empty(), "{}: bits {ignored:?}", c.format.name);
    }
}

#[test]
fn decoders_stop_at_the_shorter_slice() {
    for c in &cases().decoded {
        let f = c.format;
        let mut v = vec![7.0; 2 * f.elements + 1];
        (f.decode)(&c.blocks[..f.bytes + 1], &mut v);
        assert!((0..f.elements).all(|i| same(v[i], c.elements[i])), "{}", f.name);
        assert!(v[f.elements..].iter().all(|&v| v == 7.0), "{}", f.name);
    }
}

#[test]
fn encoders_are_as_exact_as_those_of_ggml() {
    let cases = cases();
    assert_eq!(Vec::from_iter(cases.encoded.iter().map(|c| c.format)), BlockType::ALL);
    for c in &cases.encoded {
        for (n, (row, theirs)) in cases.rows.iter().zip(&c.errors).enumerate() {
            let ours = error(c.format, &encoded(c.format, row), row);
            assert!(ours <= LIMIT * theirs, "{}, row {n}: {ours}, ggml has {theirs}", c.format);
            // A much smaller error would mean that the cases are not what they should be.
            assert!(ours >= 0.9 * theirs, "{}, row {n}: {ours}, ggml has {theirs}", c.format);
        }
    }
}

#[test]
fn simple_formats_get_the_bytes_of_ggml() {
    let cases = cases();
    let with_bytes = Vec::from_iter(cases.encoded.iter().filter(|c| !c.blocks.is_empty()));
    assert_eq!(with_bytes.len(), 6);
    for c in with_bytes {
        let ours = Vec::from_iter(cases.rows.iter().flat_map(|row| encoded(c.format, row)));
        assert_eq!(ours.len(), c.blocks.len());
        let n = c.format.row().bytes;
        let differ = ours.chunks(n).zip(c.blocks.chunks(n)).position(|(a, b)| a != b);
        assert_eq!(differ, None, "{}: the first block that differs", c.format);
    }
}

#[test]
fn the_limit_notices_one_wrong_bit() {
    // A check of the check: of the bits of a block, many must exceed the limit if they alone are wrong.
    let cases = cases();
    for c in &cases.encoded {
        let r = c.format.row();
        let row = &cases.rows[0][..r.elements];
        let block = encoded(c.format, row);
        let right = error(c.format, &block, row);
        let noticed = (0..8 * r.bytes).filter(|&bit| {
            let mut block = block.clone();
            block[bit / 8] ^= 1 << (bit % 8);
            // A flipped exponent can give infinity, and the error NaN.
            error(c.format, &block, row) <= LIMIT * right
        });
        let missed = noticed.count();
        assert!(missed < 4 * r.bytes, "{}: {missed} of {} bits are missed", c.format, 8 * r.bytes);
    }
}

#[test]
fn encoders_keep_zeros_and_single_values() {
    for &t in BlockType::ALL {
        let n = t.row().elements;
        let zeros = vec![0.0; 2 * n];
        let v = decoded(t.row(), &encoded(t, &zeros));
        assert!(v.iter().all(|&v| v == 0.0), "{t}");
        // The scales of `mxfp4` are powers of two: the largest value is 12 where the element is up to 16.
        let close = if t == BlockType::MXFP4 { 0.25 } else { 0.01 };
        for value in [1.0f32, -1.0, 240.0, -0.125] {
            let mut spike = zeros.clone();
            spike[n + 3] = value;
            let v = decoded(t.row(), &encoded(t, &spike));
            assert!((v[n + 3] - value).abs() <= close * value.abs(), "{t}: {value} became {}", v[n + 3]);
            let rest = v.iter().enumerate().filter(|(i, _)| *i != n + 3).map(|(_, v)| v.abs());
            assert!(rest.fold(0.0, f32::max) <= 0.02 * value.abs(), "{t}: zeros beside {value}");
            let constant = vec![value; n];
            let v = decoded(t.row(), &encoded(t, &constant));
            assert!(v.iter().all(|v| (v - value).abs() <= close * value.abs()), "{t}: all {value}, {v:?}");
        }
    }
}

#[test]
fn encoders_take_any_number() {
    let unusual = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        -0.0,
        1e-20,
        7e4,
    ];
    for &t in BlockType::ALL {
        let n = t.row().elements;
        for (i, &a) in unusual.iter().enumerate() {
            for &b in &unusual[i..] {
                for period in [1, 2, n / 2, n] {
                    let row = Vec::from_iter((0..n).map(|i| if i % period == 0 { a } else { b }));
                    decoded(t.row(), &encoded(t, &row));
                }
            }
        }
        // Numbers below the range of `f16` scales become small numbers.
        let tiny = Vec::from_iter((0..n).map(|i| 1e-12 * (i as f32 - 7.0)));
        assert!(decoded(t.row(), &encoded(t, &tiny)).iter().all(|v| v.abs() < 1e-4), "{t}");
    }
}
