//! The datasets of a configuration.

use super::config::Config;
use halcyon::ir::error::{Error, Result};
use halcyon_data::idx::{Split, mnist_part};
use halcyon_data::{Column, DataSpec, Dataset, DatasetExt, Kind, open};
use std::path::Path;
use std::sync::Arc;
use toml::{Table, Value};

/// What the model predicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// One of this number of classes.
    Classes(usize),
    /// Numbers.
    Values,
}

/// Opened datasets with input and target columns.
pub(super) struct Data {
    pub(super) train: Arc<dyn Dataset>,
    pub(super) test: Option<Arc<dyn Dataset>>,
    pub(super) input: Column,
    pub(super) output: Column,
    pub(super) target: Target,
}

impl Data {
    pub(super) fn open(config: &Config) -> Result<Data> {
        let train = part(config, &config.train, "train", &[])?;
        let [input, output] = train.columns() else {
            let names: Vec<&str> = train.columns().iter().map(|c| c.name.as_str()).collect();
            let what =
                format!("the data has the columns {}, expected an input and a target", names.join(", "));
            return Err(Error::argument("train", what));
        };
        let (input, output) = (input.clone(), output.clone());
        let test = config.test.as_ref().map(|t| part(config, t, "test", &output.classes)).transpose()?;
        if let Some(t) = &test {
            let same = |a: &Column, b: &Column| (a.dtype, &a.dims) == (b.dtype, &b.dims);
            let fits =
                t.columns().len() == 2 && t.columns().iter().zip(train.columns()).all(|(a, b)| same(a, b));
            if !fits {
                let what = format!("the test data is {t:?}, but the training data is {train:?}");
                return Err(Error::argument("train", what));
            }
        }
        let target = match output.dtype.is_float() {
            true => Target::Values,
            false => Target::Classes(classes(&output, [Some(&train), test.as_ref()])?),
        };
        Ok(Data { train, test, input, output, target })
    }
}

/// The number of classes: the number of class names, or, without names, one more than the largest class
/// number in the data.
fn classes(output: &Column, parts: [Option<&Arc<dyn Dataset>>; 2]) -> Result<usize> {
    if !output.classes.is_empty() {
        return Ok(output.classes.len());
    }
    let mut largest = 0;
    for part in parts.into_iter().flatten() {
        let Some(column) = part.columns().last() else { continue };
        let targets = part.clone().select(&[&column.name])?;
        for start in (0..targets.len()).step_by(4096) {
            let rows: Vec<usize> = (start..targets.len().min(start + 4096)).collect();
            for column in targets.batch(&rows)? {
                for v in column.to_vec::<i64>() {
                    if !(0..1 << 24).contains(&v) {
                        let what = format!("the target {v} is not a class number from 0 to 16777215");
                        return Err(Error::argument("train", what));
                    }
                    largest = largest.max(v);
                }
            }
        }
    }
    Ok(largest as usize + 1)
}

/// Opens one part. `names` are the classes or characters of the training data.
fn part(config: &Config, table: &Table, which: &str, names: &[String]) -> Result<Arc<dyn Dataset>> {
    let mut table = table.clone();
    if let (false, Some(path)) = (table.contains_key("path"), &config.data) {
        table.insert("path".into(), Value::String(path.display().to_string()));
    }
    let bad = |what: String| Error::argument("train", format!("[{which}]: {what}"));
    if table.get("kind").and_then(Value::as_str) == Some("mnist") {
        let path = table.get("path").and_then(Value::as_str);
        let path = path.ok_or_else(|| bad("give the folder of MNIST's files with --set data=DIR".into()))?;
        if let Some(other) = table.keys().find(|k| !["kind", "path"].contains(&k.as_str())) {
            return Err(bad(format!("`{other}` has no effect on data of the kind mnist")));
        }
        let split = if which == "train" { Split::Train } else { Split::Test };
        return mnist_part(Path::new(path), split);
    }
    let mut spec: DataSpec = table.try_into().map_err(|e: toml::de::Error| bad(e.message().to_string()))?;
    match spec.kind {
        // The test text may lack characters of the training text, but its characters must have the same
        // numbers as in the training text.
        Kind::Text if spec.vocabulary.is_none() && !names.is_empty() => {
            let text: String = names.concat();
            spec.vocabulary = Some(halcyon_data::Vocabulary::of(&text));
        }
        Kind::Images | Kind::Csv if spec.classes.is_empty() && !names.is_empty() => {
            spec.classes = names.to_vec();
        }
        _ => {}
    }
    let data = open(&spec)?;
    match data.is_empty() {
        true => Err(bad("the data has no rows".into())),
        false => Ok(data),
    }
}
