//! Descriptions of datasets, for configuration files.

use crate::dataset::split_rows;
use crate::table::{CsvOptions, LabelKind, read_csv};
use crate::text::{Text, TextOptions, Vocabulary};
use crate::{Arrays, Dataset, DatasetExt, ImageFolder, ImageOptions, idx};
use halcyon_ir::{DType, Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// The kind of a dataset's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// MNIST's files in the folder `path` (with `split`), or a file of images `path` with a file of `labels`.
    Idx,
    /// A CSV table.
    Csv,
    /// A folder with one sub-folder of images per class.
    Images,
    /// UTF-8 text, character by character.
    Text,
    Npz,
    Safetensors,
}

/// The description of a dataset. The keys after `path` are optional, except where they are marked as
/// required. The kinds to which a key applies are in parentheses; [`open`] returns an error if a key is given
/// for another kind.
///
/// ```toml
/// kind = "csv"
/// path = "iris.csv"
/// label = "species"
/// subset = { split = { fraction = 0.8, seed = 1, part = "first" } }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSpec {
    pub kind: Kind,
    /// The file or folder.
    pub path: PathBuf,
    /// (idx) The part of MNIST in the folder `path`. Without this key, `path` is the file of images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<idx::Split>,
    /// (idx) The file of labels. Required if there is no `split`; an error if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<PathBuf>,
    /// (csv) [`CsvOptions::header`], true if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<bool>,
    /// (csv) [`CsvOptions::delimiter`], a comma if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delimiter: Option<char>,
    /// (csv) [`CsvOptions::features`]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
    /// (csv) [`CsvOptions::label`]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// (csv) [`CsvOptions::label_kind`]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_kind: Option<LabelKind>,
    /// (csv, images) The names of the classes, in the order of their numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// (images) Width in pixels. Required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// (images) Height in pixels. Required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub height: Option<usize>,
    /// (images) 1 or 3, 3 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<usize>,
    /// (text) Characters of a window. Required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
    /// (text) [`TextOptions::stride`]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// (text) All characters, sorted. If not given, the characters of the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<Vocabulary>,
    /// (npz, safetensors) The names of the arrays: first the input, then what the model should predict. If
    /// not given, all arrays.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<String>,
    /// (all but images and text) Converts the input to f32 and divides it by this number. If not given, the
    /// default for idx is 255 for images in u8 and 1 for other images; the input of other kinds is not
    /// changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<f32>,
    /// (all but text) The shape of a row of the input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Vec<usize>>,
    /// (all but text) Normalises the input by this mean and standard deviation, after `scale` and `shape`
    /// were applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub normalise: Option<Normalise>,
    /// Uses only a part of the rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subset: Option<Subrange>,
}

/// `(value - mean) / std`. Each list has one number for all channels, or one number per channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Normalise {
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
}

/// A part of the rows of a dataset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Subrange {
    /// `{ rows = [first, end] }`: the rows from `first` to `end`, without the row `end`.
    Rows([usize; 2]),
    /// `{ fraction = [0.0, 0.9] }`: the rows from the first fraction of the dataset to the second. If one
    /// part ends at the fraction where another begins, the parts have no row in common, and there is no row
    /// between them.
    Fraction([f64; 2]),
    /// `{ split = { fraction = 0.8, seed = 1, part = "first" } }`: see [`DatasetExt::split`].
    Split { fraction: f64, seed: u64, part: Part },
}

/// A part of a random split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    First,
    Second,
}

impl Kind {
    /// The name of the kind in a description.
    fn name(self) -> &'static str {
        match self {
            Kind::Idx => "idx",
            Kind::Csv => "csv",
            Kind::Images => "images",
            Kind::Text => "text",
            Kind::Npz => "npz",
            Kind::Safetensors => "safetensors",
        }
    }
}

impl DataSpec {
    /// A description with only the keys that every kind requires.
    pub fn new(kind: Kind, path: impl Into<PathBuf>) -> DataSpec {
        DataSpec {
            kind,
            path: path.into(),
            split: None,
            labels: None,
            header: None,
            delimiter: None,
            features: vec![],
            label: None,
            label_kind: None,
            classes: vec![],
            width: None,
            height: None,
            channels: None,
            context: None,
            stride: None,
            vocabulary: None,
            columns: vec![],
            scale: None,
            shape: None,
            normalise: None,
            subset: None,
        }
    }

    /// The keys that apply only to some kinds: each with whether it is set, and the kinds that use it.
    fn keys(&self) -> [(&'static str, bool, &'static [Kind]); 18] {
        use Kind::*;
        const ARRAYS: &[Kind] = &[Npz, Safetensors];
        const FLOATS: &[Kind] = &[Idx, Csv, Images, Npz, Safetensors];
        [
            ("split", self.split.is_some(), &[Idx]),
            ("labels", self.labels.is_some(), &[Idx]),
            ("header", self.header.is_some(), &[Csv]),
            ("delimiter", self.delimiter.is_some(), &[Csv]),
            ("features", !self.features.is_empty(), &[Csv]),
            ("label", self.label.is_some(), &[Csv]),
            ("label_kind", self.label_kind.is_some(), &[Csv]),
            ("classes", !self.classes.is_empty(), &[Csv, Images]),
            ("width", self.width.is_some(), &[Images]),
            ("height", self.height.is_some(), &[Images]),
            ("channels", self.channels.is_some(), &[Images]),
            ("context", self.context.is_some(), &[Text]),
            ("stride", self.stride.is_some(), &[Text]),
            ("vocabulary", self.vocabulary.is_some(), &[Text]),
            ("columns", !self.columns.is_empty(), ARRAYS),
            ("scale", self.scale.is_some(), &[Idx, Csv, Npz, Safetensors]),
            ("shape", self.shape.is_some(), FLOATS),
            ("normalise", self.normalise.is_some(), FLOATS),
        ]
    }

    fn check(&self) -> Result<()> {
        let unused = self.keys().into_iter().find(|(_, set, kinds)| *set && !kinds.contains(&self.kind));
        match unused {
            Some((key, ..)) => {
                Err(bad(format!("`{key}` has no effect on data of the kind {}", self.kind.name())))
            }
            None => Ok(()),
        }
    }
}

fn bad(what: String) -> Error {
    Error::argument("data", what)
}

/// Opens the dataset of a description. The first column is the input of a model, and the second column is
/// what the model should predict. Integer columns after the first become i32.
///
/// # Errors
/// [`Error::Argument`] for a key that is missing or does not belong to the kind; the errors of the dataset
/// and its transforms.
pub fn open(spec: &DataSpec) -> Result<Arc<dyn Dataset>> {
    spec.check()?;
    let need = |name: &str, v: Option<usize>| {
        v.ok_or_else(|| bad(format!("data of the kind {} needs `{name}`", spec.kind.name())))
    };
    let data = match spec.kind {
        Kind::Idx => open_idx(spec)?,
        Kind::Csv => {
            let options = CsvOptions {
                header: spec.header.unwrap_or(true),
                delimiter: spec.delimiter.unwrap_or(','),
                features: spec.features.clone(),
                label: spec.label.clone(),
                label_kind: spec.label_kind.unwrap_or_default(),
                classes: spec.classes.clone(),
            };
            read_csv(&spec.path, &options)?.share()
        }
        Kind::Images => {
            let options = ImageOptions {
                width: need("width", spec.width)?,
                height: need("height", spec.height)?,
                channels: spec.channels.unwrap_or(3),
                classes: spec.classes.clone(),
            };
            ImageFolder::open(&spec.path, options)?.share()
        }
        Kind::Text => {
            let (stride, vocabulary) = (spec.stride, spec.vocabulary.clone());
            let options = TextOptions { context: need("context", spec.context)?, stride, vocabulary };
            Text::open(&spec.path, options)?.share()
        }
        Kind::Npz => Arrays::npz(&spec.path, &spec.columns)?.share(),
        Kind::Safetensors => Arrays::safetensors(&spec.path, &spec.columns)?.share(),
    };
    part(transformed(data, spec)?, spec.subset.as_ref())
}

fn open_idx(spec: &DataSpec) -> Result<Arc<dyn Dataset>> {
    let raw = match (spec.split, &spec.labels) {
        (Some(_), Some(_)) => {
            return Err(bad(
                "`split` finds the labels in the folder; leave one of `split` and `labels` out".into()
            ));
        }
        (Some(split), None) => idx::folder(&spec.path, split)?,
        (None, Some(labels)) => idx::open(&spec.path, labels)?,
        (None, None) => {
            return Err(
                bad("data of the kind idx needs `split` for a folder, or `labels` for a file".into()),
            );
        }
    };
    idx::ready(raw, spec.scale)
}

/// Transforms the first column, the input, and casts the integer columns after it to i32.
fn transformed(mut data: Arc<dyn Dataset>, spec: &DataSpec) -> Result<Arc<dyn Dataset>> {
    let columns = data.columns().to_vec();
    let Some((input, targets)) = columns.split_first() else {
        return Err(bad(format!("{} has no columns", spec.path.display())));
    };
    if let Some(divisor) = spec.scale.filter(|_| spec.kind != Kind::Idx) {
        data = data.scale(&input.name, divisor)?.share();
    }
    if let Some(dims) = &spec.shape {
        data = data.reshape(&input.name, dims)?.share();
    }
    if let Some(n) = &spec.normalise {
        data = data.normalise(&input.name, &n.mean, &n.std)?.share();
    }
    for target in targets.iter().filter(|c| c.dtype.is_int() && c.dtype != DType::I32) {
        data = data.cast(&target.name, DType::I32)?.share();
    }
    Ok(data)
}

fn part(data: Arc<dyn Dataset>, subset: Option<&Subrange>) -> Result<Arc<dyn Dataset>> {
    let n = data.len();
    Ok(match subset.cloned() {
        None => data,
        Some(Subrange::Rows([start, end])) => data.subset(start..end)?.share(),
        Some(Subrange::Fraction([start, end])) => {
            if !(0.0 <= start && start < end && end <= 1.0) {
                let what = format!(
                    "the subset is from {start} to {end}; the fractions must increase and lie between 0 and 1"
                );
                return Err(bad(what));
            }
            let row = |fraction: f64| (fraction * n as f64).round() as usize;
            data.subset(row(start)..row(end))?.share()
        }
        Some(Subrange::Split { fraction, seed, part }) => {
            let (first, second) = split_rows(n, fraction, seed)?;
            data.rows(if part == Part::First { first } else { second })?.share()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon_formats::{ConstData, npz, safetensors};

    fn parse(text: &str) -> DataSpec {
        toml::from_str(text).unwrap()
    }

    fn fails(text: &str) -> String {
        match open(&parse(text)) {
            Err(e @ Error::Argument { .. }) => e.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn descriptions_survive_serialisation_and_refuse_unknown_keys() {
        let text = r#"
            kind = "csv"
            path = "a.csv"
            delimiter = ";"
            header = false
            features = ["1", "2"]
            label = "0"
            label_kind = "class"
            classes = ["a", "b"]
            scale = 2.0
            shape = [1, 2]
            normalise = { mean = [0.5], std = [0.25] }
            subset = { split = { fraction = 0.8, seed = 1, part = "second" } }
        "#;
        let spec = parse(text);
        assert_eq!(spec.subset, Some(Subrange::Split { fraction: 0.8, seed: 1, part: Part::Second }));
        let value = toml::Value::try_from(&spec).unwrap();
        assert_eq!(value.try_into::<DataSpec>().unwrap(), spec);
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<DataSpec>(&json).unwrap(), spec);
        let short = DataSpec::new(Kind::Npz, "x");
        assert_eq!(serde_json::to_string(&short).unwrap(), r#"{"kind":"npz","path":"x"}"#);
        for wrong in [
            "kind = \"csv\"",
            "path = \"a\"",
            "kind = \"xml\"\npath = \"a\"",
            "kind = \"csv\"\npath = \"a\"\nlable = \"y\"",
            "kind = \"csv\"\npath = \"a\"\nsubset = { rows = [1, 2], fraction = [0.0, 1.0] }",
            "kind = \"csv\"\npath = \"a\"\nnormalise = { mean = [0.0] }",
            "kind = \"csv\"\npath = \"a\"\nnormalise = { mean = [0.0], std = [1.0], sd = [1.0] }",
            "kind = \"csv\"\npath = \"a\"\n\
             subset = { split = { fraction = 0.5, seed = 1, part = \"first\", x = 1 } }",
        ] {
            assert!(toml::from_str::<DataSpec>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn keys_of_other_kinds_are_refused() {
        let keys = [
            ("split = \"test\"", "idx"),
            ("labels = \"l\"", "idx"),
            ("header = true", "csv"),
            ("delimiter = \",\"", "csv"),
            ("features = [\"a\"]", "csv"),
            ("label = \"a\"", "csv"),
            ("label_kind = \"auto\"", "csv"),
            ("classes = [\"a\"]", "csv images"),
            ("width = 3", "images"),
            ("height = 3", "images"),
            ("channels = 3", "images"),
            ("context = 3", "text"),
            ("stride = 3", "text"),
            ("vocabulary = \"abc\"", "text"),
            ("columns = [\"a\"]", "npz safetensors"),
            ("scale = 2.0", "idx csv npz safetensors"),
            ("shape = [2]", "idx csv images npz safetensors"),
            ("normalise = { mean = [0.0], std = [1.0] }", "idx csv images npz safetensors"),
        ];
        for (key, kinds) in keys {
            let name = key.split(' ').next().unwrap();
            for kind in ["idx", "csv", "images", "text", "npz", "safetensors"] {
                let spec = parse(&format!("kind = \"{kind}\"\npath = \"/nowhere\"\n{key}"));
                let text = open(&spec).unwrap_err().to_string();
                let used = kinds.split(' ').any(|k| k == kind);
                assert_eq!(text.contains(&format!("`{name}` has no effect")), !used, "{kind} {key}: {text}");
            }
        }
        assert!(fails("kind = \"images\"\npath = \".\"\nwidth = 3").contains("needs `height`"));
        assert!(fails("kind = \"text\"\npath = \".\"").contains("needs `context`"));
        assert!(fails("kind = \"idx\"\npath = \".\"").contains("needs `split`"));
        assert!(
            fails("kind = \"idx\"\npath = \".\"\nsplit = \"test\"\nlabels = \"x\"").contains("leave one")
        );
    }

    #[test]
    fn inputs_are_transformed_targets_are_i32_and_rows_are_chosen() {
        let dir = tempfile::tempdir().unwrap();
        let x = ConstData::from_slice(&[10, 4], &(0..40).map(|k| k as u8).collect::<Vec<_>>()).unwrap();
        let y = ConstData::from_slice(&[10], &(0..10).collect::<Vec<i64>>()).unwrap();
        let path = dir.path().join("a.npz");
        npz::write(&path, &[("y", &y), ("x", &x)]).unwrap();
        let more = r#"
            columns = ["x", "y"]
            scale = 2.0
            shape = [2, 1, 2]
            normalise = { mean = [1.0, 0.0], std = [0.5] }
        "#;
        let open_with =
            |subset: &str| open(&parse(&format!("kind = \"npz\"\npath = {path:?}\n{more}\n{subset}")));
        let all = open_with("").unwrap();
        let row = all.row(1).unwrap();
        assert_eq!(
            (row[0].dims.as_slice(), row[0].to_vec::<f32>()),
            (&[2, 1, 2][..], vec![2.0, 3.0, 6.0, 7.0])
        );
        assert_eq!((row[1].dtype, row[1].to_vec::<i32>()), (DType::I32, vec![1]));
        let rows = |subset: &str| {
            let data = open_with(subset).unwrap();
            data.batch(&(0..data.len()).collect::<Vec<_>>()).unwrap()[1].to_vec::<i32>()
        };
        assert_eq!(rows("subset = { rows = [3, 5] }"), [3, 4]);
        assert_eq!(rows("subset = { fraction = [0.0, 0.35] }"), [0, 1, 2, 3]);
        assert_eq!(rows("subset = { fraction = [0.35, 1.0] }"), [4, 5, 6, 7, 8, 9]);
        let split = |part: &str| {
            rows(&format!("subset = {{ split = {{ fraction = 0.3, seed = 5, part = \"{part}\" }} }}"))
        };
        let mut both = [split("first"), split("second")].concat();
        assert_eq!(split("first").len(), 3);
        both.sort_unstable();
        assert_eq!(both, (0..10).collect::<Vec<_>>());
        assert!(open_with("subset = { fraction = [0.5, 0.5] }").is_err());
        assert!(open_with("subset = { rows = [3, 11] }").is_err());

        let path = dir.path().join("a.safetensors");
        safetensors::write(&path, &[("x", &x), ("y", &y)], &Default::default()).unwrap();
        let data = open(&parse(&format!("kind = \"safetensors\"\npath = {path:?}"))).unwrap();
        // The input keeps its dtype, because it may hold tokens.
        assert_eq!((data.columns()[0].dtype, data.columns()[1].dtype), (DType::U8, DType::I32));
    }

    #[test]
    fn every_kind_opens() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, bytes: &[u8]| {
            std::fs::write(dir.path().join(name), bytes).unwrap();
            dir.path().join(name)
        };
        let images = put("i", &[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 255, 51, 0]);
        let labels = put("l", &[0, 0, 8, 1, 0, 0, 0, 2, 7, 8]);
        let spec =
            |more: &str| parse(&format!("kind = \"idx\"\npath = {images:?}\nlabels = {labels:?}\n{more}"));
        let row = |more: &str| open(&spec(more)).unwrap().row(1).unwrap();
        assert_eq!(
            (row("")[0].dims.as_slice(), row("")[0].to_vec::<f32>()),
            (&[1, 1, 2][..], vec![0.2, 0.0])
        );
        assert_eq!((row("")[1].dtype, row("")[1].to_vec::<i32>()), (DType::I32, vec![8]));
        let scaled = &row("scale = 51.0")[0];
        assert_eq!((scaled.dims.as_slice(), scaled.to_vec::<f32>()), (&[1, 1, 2][..], vec![1.0, 0.0]));
        assert_eq!(row("shape = [2]")[0].dims[..], [2]);

        let path = put("t.csv", b"a,b,c\n1,2,u\n3,4,v\n");
        let data =
            open(&parse(&format!("kind = \"csv\"\npath = {path:?}\nlabel = \"c\"\nscale = 2.0"))).unwrap();
        let row = data.row(1).unwrap();
        assert_eq!((row[0].to_vec::<f32>(), row[1].to_vec::<i32>()), (vec![1.5, 2.0], vec![1]));
        assert_eq!(data.columns()[1].classes[..], ["u", "v"]);

        let path = put("t.txt", b"hello");
        let data =
            open(&parse(&format!("kind = \"text\"\npath = {path:?}\ncontext = 2\nstride = 1"))).unwrap();
        assert_eq!((data.len(), data.columns()[1].classes.len()), (3, 4));

        std::fs::create_dir(dir.path().join("c")).unwrap();
        put("c/1.pgm", b"P5 1 1 255\n\x80");
        let text = format!("kind = \"images\"\npath = {:?}\nwidth = 2\nheight = 1\nchannels = 1", dir.path());
        let data = open(&parse(&text)).unwrap();
        assert_eq!((data.len(), data.columns()[0].dims.as_slice()), (1, &[1, 1, 2][..]));
        if cfg!(feature = "images") {
            assert_eq!(data.row(0).unwrap()[0].to_vec::<f32>(), [128.0 / 255.0; 2]);
        }
    }
}
