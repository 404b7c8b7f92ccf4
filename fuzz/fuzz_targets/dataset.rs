//! Fuzz target: datasets in IDX (plain and compressed), CSV and text. The first byte selects the format and
//! options.
#![no_main]

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use halcyon_data::{Arrays, CsvOptions, Dataset, LabelKind, Result, Text, TextOptions, idx, parse_csv};
use halcyon_fuzz::judge;
use libfuzzer_sys::fuzz_target;
use std::io::Write;

/// Reads some rows of a dataset.
fn read(data: Result<impl Dataset>) {
    if let Some(data) = judge(data)
        && let Some(last) = data.len().checked_sub(1)
    {
        let batch = data.batch(&[0, last, last / 2]).expect("rows of a dataset");
        for (x, c) in batch.iter().zip(data.columns()) {
            assert_eq!((x.dtype, x.dims[0], &x.dims[1..]), (c.dtype, 3, &c.dims[..]));
        }
    }
}

fn images(content: Bytes) -> Result<Arrays> {
    Arrays::new([("image", idx::parse(content, "t")?)])
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, content)) = data.split_first() else { return };
    let option = kind >> 2;
    match kind & 3 {
        // The file as it is: plain, or compressed if it begins so.
        0 => read(images(Bytes::copy_from_slice(content))),
        // The fuzzer cannot find checksums, so the content of a compressed file is compressed here.
        1 => {
            let mut e = GzEncoder::new(vec![], Compression::fast());
            if let Ok(packed) = e.write_all(content).and_then(|()| e.finish()) {
                read(images(packed.into()));
            }
        }
        2 => {
            let kinds = [LabelKind::Auto, LabelKind::Class, LabelKind::Number, LabelKind::Auto];
            let options = CsvOptions {
                header: option & 1 == 0,
                delimiter: if option & 2 == 0 { ',' } else { '\t' },
                label: (option & 4 == 0).then(|| if option & 1 == 0 { "y" } else { "1" }.into()),
                label_kind: if option & 4 == 0 {
                    kinds[usize::from(option >> 3 & 3)]
                } else {
                    LabelKind::Auto
                },
                ..CsvOptions::default()
            };
            read(parse_csv(content, "t", &options));
        }
        _ => {
            let options = TextOptions::new(1 + usize::from(option & 7)).stride(1 + usize::from(option >> 3));
            read(Text::parse(content, "t", options));
        }
    }
});
