//! The tokenizer metadata of a GGUF file, for tests: only what they need, without checks.

use halcyon_text::GgufTokenizer;
use std::collections::HashMap;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub(crate) enum Field {
    Number(f64),
    Bool(bool),
    Text(String),
    List(Vec<Field>),
}

/// The folder with the models that tests read: `HALCYON_TEXT_MODELS`, or `target/llm` of the workspace.
pub(crate) fn model(name: &str) -> Option<PathBuf> {
    let dir = match std::env::var_os("HALCYON_TEXT_MODELS") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/llm"),
    };
    Some(dir.join(name)).filter(|p| p.is_file())
}

struct Reader(BufReader<std::fs::File>);

impl Reader {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut b = [0; N];
        self.0.read_exact(&mut b).unwrap();
        b
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn text(&mut self) -> String {
        let mut b = vec![0; self.u64() as usize];
        self.0.read_exact(&mut b).unwrap();
        String::from_utf8(b).unwrap()
    }

    fn value(&mut self, kind: u32) -> Field {
        match kind {
            0 => Field::Number(self.bytes::<1>()[0].into()),
            1 => Field::Number(i8::from_le_bytes(self.bytes()).into()),
            2 => Field::Number(u16::from_le_bytes(self.bytes()).into()),
            3 => Field::Number(i16::from_le_bytes(self.bytes()).into()),
            4 => Field::Number(self.u32().into()),
            5 => Field::Number(i32::from_le_bytes(self.bytes()).into()),
            6 => Field::Number(f32::from_le_bytes(self.bytes()).into()),
            7 => Field::Bool(self.bytes::<1>()[0] != 0),
            8 => Field::Text(self.text()),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                Field::List((0..count).map(|_| self.value(kind)).collect())
            }
            10 => Field::Number(self.u64() as f64),
            11 => Field::Number(i64::from_le_bytes(self.bytes()) as f64),
            12 => Field::Number(f64::from_le_bytes(self.bytes())),
            other => panic!("GGUF value of kind {other}"),
        }
    }
}

/// Reads the tokenizer of a file.
pub(crate) fn tokenizer(path: &Path) -> GgufTokenizer {
    let mut r = Reader(BufReader::new(std::fs::File::open(path).unwrap()));
    assert_eq!(&r.bytes::<4>(), b"GGUF");
    let _version = r.u32();
    let (_tensors, count) = (r.u64(), r.u64());
    let fields: HashMap<String, Field> = (0..count)
        .map(|_| {
            let (key, kind) = (r.text(), r.u32());
            (key, r.value(kind))
        })
        .collect();
    let find = |key: &str| fields.get(&format!("tokenizer.ggml.{key}")).cloned();
    let text = |f: Option<Field>| match f {
        Some(Field::Text(t)) => Some(t),
        _ => None,
    };
    let id = |key: &str| match find(key) {
        Some(Field::Number(n)) => Some(n as u32),
        _ => None,
    };
    let flag = |key: &str| match find(key) {
        Some(Field::Bool(b)) => Some(b),
        _ => None,
    };
    let list = |key: &str| match find(key) {
        Some(Field::List(l)) => l,
        _ => vec![],
    };
    let texts = |key: &str| list(key).into_iter().filter_map(|f| text(Some(f))).collect();
    let numbers = |key: &str| {
        list(key).into_iter().map(|f| if let Field::Number(n) = f { n } else { f64::NAN }).collect::<Vec<_>>()
    };
    GgufTokenizer {
        model: text(find("model")).unwrap(),
        pre: text(find("pre")),
        tokens: texts("tokens"),
        scores: numbers("scores").iter().map(|&n| n as f32).collect(),
        types: numbers("token_type").iter().map(|&n| n as i32).collect(),
        merges: texts("merges"),
        bos: id("bos_token_id"),
        eos: id("eos_token_id"),
        eot: id("eot_token_id"),
        eom: id("eom_token_id"),
        unk: id("unknown_token_id"),
        sep: id("seperator_token_id"),
        pad: id("padding_token_id"),
        mask: id("mask_token_id"),
        fim_pad: id("fim_pad_token_id"),
        fim_rep: id("fim_rep_token_id"),
        fim_sep: id("fim_sep_token_id"),
        add_bos: flag("add_bos_token"),
        add_eos: flag("add_eos_token"),
        add_space_prefix: flag("add_space_prefix"),
        remove_extra_whitespaces: flag("remove_extra_whitespaces"),
        lowercase: flag("normalizer.lowercase"),
        strip_accents: flag("normalizer.strip_accents"),
        chat_template: text(fields.get("tokenizer.chat_template").cloned()),
        name: text(fields.get("general.name").cloned()),
        architecture: text(fields.get("general.architecture").cloned()),
        ..GgufTokenizer::default()
    }
}
