//! Tests with damaged files: for any bytes, reading returns a dataset or a typed error.

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use halcyon_data::{
    Arrays, CsvOptions, Dataset, Error, LabelKind, Result, Text, TextOptions, idx, parse_csv, permutation,
};
use halcyon_formats::{ConstData, npz, safetensors};
use halcyon_test_host::{one_in, seed};
use proptest::prelude::*;
use std::io::Write;

/// Checks that an error is neither an internal one nor an interruption, or that three rows of the dataset can
/// be read.
fn judge<D: Dataset>(r: Result<D>) -> Option<usize> {
    match r {
        Ok(data) => {
            let n = data.len();
            if n > 0 {
                let batch = data.batch(&[0, n - 1, n / 2]).expect("rows of a dataset");
                for (x, c) in batch.iter().zip(data.columns()) {
                    assert_eq!((x.dtype, x.dims[0], &x.dims[1..]), (c.dtype, 3, &c.dims[..]));
                }
            }
            assert!(matches!(data.batch(&[n]), Err(Error::Argument { .. })));
            Some(n)
        }
        Err(e) => {
            assert!(!matches!(e, Error::Internal(_)) && (1..=5).contains(&e.exit_code()), "{e}");
            None
        }
    }
}

fn gz(b: &[u8]) -> Vec<u8> {
    let mut e = GzEncoder::new(vec![], Compression::fast());
    e.write_all(b).and_then(|()| e.finish()).expect("memory")
}

fn images(content: Vec<u8>) -> Result<Arrays> {
    let x = idx::parse(Bytes::from(content), "t")?;
    Arrays::new([("image", x)])
}

fn table(content: &[u8]) -> Vec<Result<Arrays>> {
    let label = |label_kind| CsvOptions { label: Some("b".into()), label_kind, ..CsvOptions::default() };
    let plain = CsvOptions { header: false, delimiter: ';', ..CsvOptions::default() };
    let all = [label(LabelKind::Auto), label(LabelKind::Class), label(LabelKind::Number), plain];
    all.iter().map(|o| parse_csv(content, "t", o)).collect()
}

/// Changes, removes or adds bytes.
fn damage(file: &[u8], at: &mut impl FnMut(usize) -> usize) -> Vec<u8> {
    let mut f = file.to_vec();
    // Two thirds of the files get a single change, because more of these files can still be read.
    for _ in 0..1 + at(2) * at(3) {
        let k = at(f.len().max(1)).min(f.len().saturating_sub(1));
        match at(4) {
            _ if f.is_empty() => {}
            0 => f[k] ^= 1 << at(8),
            1 => f[k] = [0, 1, 0x7f, 0x80, 0xff, b'\n', b'"', b','][at(8)],
            2 => f.truncate(k),
            _ => f.insert(k, at(256) as u8),
        }
    }
    f
}

#[test]
fn damaged_files_are_read_or_refused() {
    let (seed, mut epoch) = (seed("damaged_files_are_read_or_refused"), 0);
    let mut at = |n: usize| {
        epoch += 1;
        permutation(n.clamp(1, 4096), seed, epoch)[0]
    };
    let idx_file: Vec<u8> =
        [&[0, 0, 0x0d, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3][..], &1.5f32.to_be_bytes().repeat(6)].concat();
    let csv_file = b"a,b,c\n1,x,2.5\n-3,\"y,\"\"z\",1e3\n7,x,0\n".to_vec();
    let dir = tempfile::tempdir().expect("a folder");
    let (x, y) = (ConstData::from_slice(&[8, 16], &[1i16; 128]), ConstData::from_slice(&[8], &[1u8; 8]));
    let arrays = [("x", &x.expect("an array")), ("y", &y.expect("an array"))];
    let npz_file = npz::encode(&arrays).expect("an archive");
    let path = dir.path().join("f");
    safetensors::write(&path, &arrays, &Default::default()).expect("the file is written");
    let st_file = std::fs::read(&path).expect("the file");
    let text_file = "the ähre 🌾 on the field".as_bytes();
    let (mut read, rounds) = ([0; 6], if one_in(2) == 1 { 4000 } else { 600 });
    for _ in 0..rounds {
        let f = damage(&idx_file, &mut at);
        read[0] += usize::from(judge(images(gz(&f))).is_some());
        read[0] += usize::from(judge(images(f)).is_some());
        read[1] += usize::from(judge(images(damage(&gz(&idx_file), &mut at))).is_some());
        for r in table(&damage(&csv_file, &mut at)) {
            read[2] += usize::from(judge(r).is_some());
        }
        for (k, file) in [(3, &npz_file), (4, &st_file)] {
            // Each round writes a new file, because a mapped file must not change.
            let path = dir.path().join(format!("{k}"));
            std::fs::write(&path, damage(file, &mut at)).expect("the file is written");
            let r = if k == 3 {
                Arrays::npz::<&str>(&path, &[])
            } else {
                Arrays::safetensors::<&str>(&path, &[])
            };
            read[k] += usize::from(judge(r).is_some());
            std::fs::remove_file(&path).expect("the file is removed");
        }
        let f = damage(text_file, &mut at);
        read[5] += usize::from(judge(Text::parse(&f, "t", TextOptions::new(4).stride(3))).is_some());
    }
    println!("of {rounds} rounds, read: {read:?}");
    // If almost all files were rejected, only the first checks would be tested.
    assert!(read.iter().all(|n| *n > rounds / 200), "{read:?}");
}

#[test]
fn every_prefix_of_a_file_is_refused_or_complete() {
    let file = [&[0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 2][..], &[1, 2, 3, 4]].concat();
    let packed = gz(&file);
    assert_eq!(judge(images(file.clone())), Some(2));
    assert_eq!(judge(images(packed.clone())), Some(2));
    assert!((0..file.len()).all(|n| judge(images(file[..n].to_vec())).is_none()));
    assert!((0..packed.len()).all(|n| judge(images(packed[..n].to_vec())).is_none()));
    let text = b"a,b\n1,x\n2,y\n";
    let rows = |n: usize| judge(table(&text[..n]).remove(0)).unwrap_or(0);
    let all: Vec<usize> = (0..=text.len()).map(rows).collect();
    assert_eq!(all, [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 2, 2]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if one_in(2) == 1 { 20_000 } else { 1000 }))]

    #[test]
    fn random_bytes_after_a_header(
        code in 8u8..15,
        axes in 0u8..6,
        v in proptest::collection::vec(0u8.., 0..60),
    ) {
        let mut f = vec![0, 0, code, axes];
        f.extend(v);
        judge(images(gz(&f)));
        judge(images(f.clone()));
        // Every size becomes 1, so that some files are complete.
        let sizes = f.iter_mut().skip(4).take(4 * usize::from(axes));
        sizes.enumerate().for_each(|(k, b)| *b = u8::from(k % 4 == 3));
        judge(images(f));
    }

    #[test]
    fn random_tables(text in "[ab01.,;\"\n\re+-]{0,80}") {
        for content in [text.clone(), format!("a,b\n{text}")] {
            table(content.as_bytes()).into_iter().for_each(|r| {
                judge(r);
            });
        }
    }

    #[test]
    fn random_gzip(v in proptest::collection::vec(0u8.., 0..80)) {
        judge(images([&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3][..], &v].concat()));
    }
}
