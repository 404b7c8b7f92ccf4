//! CSV files (RFC 4180): a table of numbers, and a column of labels.

use crate::{Arrays, ConstData, DType, Error, Result, bad};
use csv::{ByteRecord, Reader, ReaderBuilder, Trim};
use halcyon_formats::{data, mmap};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::Path;

/// The largest number of classes. If the classes are not given, more different labels are an error.
const MAX_CLASSES: usize = 1 << 16;
/// The largest number of characters of a value that an error quotes.
const QUOTED: usize = 40;
/// The largest number of names that an error lists.
const LISTED: usize = 20;

/// The meaning of the column of labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LabelKind {
    /// If [`CsvOptions::classes`] are given, the labels are names of classes. Otherwise, if all labels are
    /// integers from 0 to 2^31 - 1, they are class numbers. Otherwise, if all labels are numbers, they are
    /// values to predict. Otherwise they are names of classes.
    #[default]
    Auto,
    /// Names of classes, even if the labels are numbers.
    Class,
    /// Numbers to predict, f32.
    Number,
}

/// How [`read_csv`] reads a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsvOptions {
    /// Whether the first line has the names of the columns. If not, their names are `0`, `1` and so on.
    pub header: bool,
    /// The character between two values. Default: `,`.
    pub delimiter: char,
    /// The columns of the input, in this order. If empty, all but the label.
    pub features: Vec<String>,
    /// The column of labels, if there is one.
    pub label: Option<String>,
    pub label_kind: LabelKind,
    /// The names of the classes, in the order of their numbers. If empty, all labels, sorted by name. For a
    /// test file that may lack some classes, pass the classes of the training file.
    pub classes: Vec<String>,
}

impl Default for CsvOptions {
    fn default() -> CsvOptions {
        CsvOptions {
            header: true,
            delimiter: ',',
            features: vec![],
            label: None,
            label_kind: LabelKind::Auto,
            classes: vec![],
        }
    }
}

/// Reads a file. See [`parse_csv`].
///
/// # Errors
/// [`Error::Io`], and those of [`parse_csv`].
pub fn read_csv(path: &Path, options: &CsvOptions) -> Result<Arrays> {
    parse_csv(&mmap::open(path)?, &path.display().to_string(), options)
}

/// Reads the content of a file. The dataset has the column `features`, f32 `[columns]`, and, if a label is
/// given, the column `label`: i32 for classes (with their names, if the labels are names), or f32 for
/// numbers. Spaces around values and empty lines are ignored. `file` is the name of the file in errors.
///
/// # Errors
/// [`Error::Format`], with the line and the column, for a value that is missing or not a finite f32, for a
/// label that is not one of the given classes, and for more than 65,536 different labels if no classes are
/// given; [`Error::Format`], with the line, for a line with more or fewer values than the first;
/// [`Error::Format`] for a table without values or with two columns of one name; [`Error::Argument`] for
/// options that do not fit the file; [`Error::Unsupported`] for a compressed file.
pub fn parse_csv(content: &[u8], file: &str, options: &CsvOptions) -> Result<Arrays> {
    let mut table = Table::open(content, file, options)?;
    let plan = Plan::new(&table, options)?;
    let mut values: Vec<u8> = vec![];
    let mut labels = plan.label.map(|column| Labels::new(column, options));
    let mut rows = 0;
    while table.next()? {
        for &column in &plan.features {
            let v = number(&table.record, column).map_err(|what| table.wrong(column, &what))? as f32;
            if !v.is_finite() {
                return Err(table.wrong(column, "the number is too large for f32"));
            }
            values.extend_from_slice(&v.to_le_bytes());
        }
        if let Some(l) = &mut labels {
            l.take(&table.record).map_err(|what| table.wrong(l.column, &what))?;
        }
        rows += 1;
    }
    if rows == 0 {
        return Err(bad(file, "the table has no line of values"));
    }
    let features = data::from_bytes(DType::F32, &[rows, plan.features.len()], values.into())?;
    match labels {
        None => Arrays::new([("features", features)]),
        Some(l) if l.text => {
            let (numbers, classes) = classes(content, file, options, l.column)?;
            let label = ConstData::from_slice(&[rows], &numbers)?;
            Arrays::new([("features", features), ("label", label)])?.with_classes("label", classes)
        }
        Some(l) => Arrays::new([("features", features), ("label", l.array()?)]),
    }
}

/// A file that is read line by line.
struct Table<'a> {
    reader: Reader<&'a [u8]>,
    content: &'a [u8],
    file: &'a str,
    /// The names of the columns.
    names: Vec<String>,
    /// The current line.
    record: ByteRecord,
    /// Whether `next` must return the current line again: it is the first line, and it has values, not names.
    again: bool,
}

impl<'a> Table<'a> {
    /// Reads the names of the columns.
    fn open(content: &'a [u8], file: &'a str, options: &CsvOptions) -> Result<Table<'a>> {
        let delimiter =
            u8::try_from(options.delimiter).ok().filter(|d| d.is_ascii() && !b"\"\r\n".contains(d));
        let delimiter = delimiter.ok_or_else(|| {
            let what = format!("{:?} cannot separate values; give one ASCII character", options.delimiter);
            Error::argument("csv", what)
        })?;
        if content.starts_with(crate::idx::GZIP) {
            return Err(Error::unsupported(format!("the compressed table {file}"), "Unpack it first"));
        }
        // UTF-8's byte order mark.
        let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content);
        let mut builder = ReaderBuilder::new();
        builder.has_headers(false).flexible(false).trim(Trim::All).delimiter(delimiter);
        let reader = builder.from_reader(content);
        let (names, record) = (vec![], ByteRecord::new());
        let mut table = Table { reader, content, file, names, record, again: false };
        if !table.next()? {
            return Err(bad(file, "the table is empty"));
        }
        table.again = !options.header;
        table.names = match options.header {
            true => table.header()?,
            false => (0..table.record.len()).map(|k| k.to_string()).collect(),
        };
        Ok(table)
    }

    /// The names in the current line.
    fn header(&self) -> Result<Vec<String>> {
        let name = |(k, b): (usize, &[u8])| {
            let text = std::str::from_utf8(b).map(str::to_string);
            text.map_err(|_| bad(self.file, format!("the name of column {k} is not UTF-8 text")))
        };
        let names = self.record.iter().enumerate().map(name).collect::<Result<Vec<_>>>()?;
        let mut sorted: Vec<&String> = names.iter().collect();
        sorted.sort_unstable();
        match sorted.windows(2).find(|w| w[0] == w[1]) {
            Some(w) => Err(bad(self.file, format!("two columns are called '{}'", w[0]))),
            None => Ok(names),
        }
    }

    /// Goes to the next line of values. Returns false at the end.
    fn next(&mut self) -> Result<bool> {
        if std::mem::take(&mut self.again) {
            return Ok(true);
        }
        let content = self.content;
        self.reader.read_byte_record(&mut self.record).map_err(|e| bad(self.file, refusal(&e, content)))
    }

    /// The error for a value of the current line.
    fn wrong(&self, column: usize, what: &str) -> Error {
        let name = self.names.get(column).map_or("", String::as_str);
        bad(self.file, format!("line {}, column '{name}': {what}", self.line()))
    }

    /// The number of the current line. The position of the CSV reader is before the empty lines that it
    /// skipped, so this function counts these lines.
    fn line(&self) -> u64 {
        self.record.position().map_or(0, |at| line_of(at, self.content))
    }
}

/// The number of the line at a position of the CSV reader, or of the next line that is not empty.
fn line_of(at: &csv::Position, content: &[u8]) -> u64 {
    let rest = usize::try_from(at.byte()).ok().and_then(|k| content.get(k..)).unwrap_or(&[]);
    let ends = rest.iter().take_while(|b| b"\r\n".contains(b));
    at.line() + ends.filter(|b| **b == b'\n').count() as u64
}

/// The message for a line that the CSV reader rejected.
fn refusal(e: &csv::Error, content: &[u8]) -> String {
    match e.kind() {
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let line = pos.as_ref().map_or(0, |at| line_of(at, content));
            format!("line {line} has {len} values, but the first has {expected_len}")
        }
        _ => e.to_string(),
    }
}

/// The columns to read.
struct Plan {
    features: Vec<usize>,
    label: Option<usize>,
}

impl Plan {
    fn new(table: &Table<'_>, o: &CsvOptions) -> Result<Plan> {
        let (names, file) = (&table.names, table.file);
        let bad = |what: String| Error::argument("csv", what);
        let find = |name: &String| {
            let have = || names.iter().take(LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
            let found = names.iter().position(|n| n == name);
            found.ok_or_else(|| bad(format!("{file} has no column '{name}'; it has {}", have())))
        };
        let label = o.label.as_ref().map(find).transpose()?;
        if label.is_none() && (o.label_kind != LabelKind::Auto || !o.classes.is_empty()) {
            return Err(bad(
                "`label_kind` or `classes` is given without a label; name the column in `label`".into(),
            ));
        }
        if o.label_kind == LabelKind::Number && !o.classes.is_empty() {
            return Err(bad("`classes` has no effect on labels that are numbers".into()));
        }
        if let Some((_, class)) = o.classes.iter().enumerate().find(|(k, c)| o.classes[..*k].contains(c)) {
            return Err(bad(format!("the class '{class}' appears twice")));
        }
        let features: Vec<usize> = match &o.features[..] {
            [] => (0..names.len()).filter(|k| Some(*k) != label).collect(),
            given => given.iter().map(find).collect::<Result<_>>()?,
        };
        if features.is_empty() {
            return Err(bad(format!("{file} has no column besides the label")));
        }
        let mut seen = vec![false; names.len()];
        if let Some(twice) = features.iter().find(|k| std::mem::replace(&mut seen[**k], true)) {
            return Err(bad(format!("the column '{}' appears twice in the features", names[*twice])));
        }
        Ok(Plan { features, label })
    }
}

/// The value of a column; an error if it is missing.
fn value(record: &ByteRecord, column: usize) -> Result<&[u8], String> {
    match record.get(column) {
        None | Some([]) => Err("there is no value; fill it in or remove the line".into()),
        Some(v) => Ok(v),
    }
}

/// A value as text for an error.
fn quote(v: &[u8]) -> String {
    String::from_utf8_lossy(v).chars().take(QUOTED).collect()
}

/// The value of a column as a finite number.
fn number(record: &ByteRecord, column: usize) -> Result<f64, String> {
    let v = value(record, column)?;
    let parsed = std::str::from_utf8(v).ok().and_then(|t| t.parse::<f64>().ok());
    parsed.filter(|n| n.is_finite()).ok_or_else(|| format!("'{}' is not a finite number", quote(v)))
}

/// Collects labels. `numbers` has the labels that were read so far, as long as all of them are numbers.
struct Labels {
    column: usize,
    kind: LabelKind,
    numbers: Vec<f64>,
    /// Whether labels are names of classes.
    text: bool,
}

impl Labels {
    fn new(column: usize, o: &CsvOptions) -> Labels {
        let text = o.label_kind == LabelKind::Class || !o.classes.is_empty();
        Labels { column, kind: o.label_kind, numbers: vec![], text }
    }

    fn take(&mut self, record: &ByteRecord) -> Result<(), String> {
        value(record, self.column)?;
        if self.text {
            return Ok(());
        }
        match number(record, self.column) {
            Ok(n) if (n as f32).is_finite() => self.numbers.push(n),
            Ok(n) => return Err(format!("{n} is too large for f32")),
            Err(what) if self.kind == LabelKind::Number => return Err(what),
            Err(_) => (self.text, self.numbers) = (true, vec![]),
        }
        Ok(())
    }

    /// The labels, if all of them are numbers.
    fn array(self) -> Result<ConstData> {
        let class = |n: &f64| n.fract() == 0.0 && (0.0..=f64::from(i32::MAX)).contains(n);
        let dtype = match self.kind != LabelKind::Number && self.numbers.iter().all(class) {
            true => DType::I32,
            false => DType::F32,
        };
        ConstData::from_scalars(dtype, &[self.numbers.len()], self.numbers.into_iter().map(Into::into))
    }
}

/// Reads the labels of a file again, as names of classes. Returns the class numbers and the names.
fn classes(content: &[u8], file: &str, o: &CsvOptions, column: usize) -> Result<(Vec<i32>, Vec<String>)> {
    let mut table = Table::open(content, file, o)?;
    let mut known: HashMap<Vec<u8>, i32> = HashMap::new();
    for (class, k) in o.classes.iter().zip(0..) {
        known.insert(class.as_bytes().to_vec(), k);
    }
    let mut numbers = vec![];
    while table.next()? {
        let wrong = |what: &str| table.wrong(column, what);
        let v = value(&table.record, column).map_err(|what| wrong(&what))?;
        let next = known.len();
        numbers.push(match known.get(v) {
            Some(k) => *k,
            None if !o.classes.is_empty() => {
                let some: Vec<&str> = o.classes.iter().take(LISTED).map(String::as_str).collect();
                return Err(wrong(&format!("'{}' is not one of the classes {}", quote(v), some.join(", "))));
            }
            None if next == MAX_CLASSES => {
                return Err(wrong("there are more than 65536 different labels; these are not classes"));
            }
            None => {
                std::str::from_utf8(v).map_err(|_| wrong("the label is not UTF-8 text"))?;
                known.insert(v.to_vec(), next as i32);
                next as i32
            }
        });
    }
    if !o.classes.is_empty() {
        return Ok((numbers, o.classes.clone()));
    }
    // Up to here, the class numbers are in the order of first appearance.
    let mut names: Vec<(String, i32)> =
        known.into_iter().map(|(v, k)| (String::from_utf8_lossy(&v).into_owned(), k)).collect();
    names.sort_unstable();
    let mut sorted = vec![0i32; names.len()];
    names.iter().zip(0..).for_each(|((_, old), new)| sorted[*old as usize] = new);
    numbers.iter_mut().for_each(|k| *k = sorted[*k as usize]);
    Ok((numbers, names.into_iter().map(|(name, _)| name).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dataset, DatasetExt};

    fn with(label: &str) -> CsvOptions {
        CsvOptions { label: Some(label.into()), ..CsvOptions::default() }
    }

    fn parse(text: &str, o: &CsvOptions) -> Arrays {
        parse_csv(text.as_bytes(), "t.csv", o).unwrap()
    }

    fn fails(text: impl AsRef<[u8]>, o: &CsvOptions) -> String {
        match parse_csv(text.as_ref(), "t.csv", o) {
            Err(e @ (Error::Format { .. } | Error::Argument { .. })) => e.to_string(),
            other => panic!("{other:?}"),
        }
    }

    fn labels(a: &Arrays) -> (DType, Vec<f32>, Vec<String>) {
        let label = a.array("label").unwrap();
        let classes = a.columns()[a.column("label").unwrap()].classes.to_vec();
        (label.dtype, label.to_vec(), classes)
    }

    const IRIS: &str = "\u{feff}sepal, petal ,species\r\n5.1,1.4,setosa\r\n\r\n\
         \u{20}-7e0 ,\"4.5\",\"versi,color\"\r\n6,.5,setosa";

    #[test]
    fn features_are_numbers_and_labels_are_classes() {
        let a = parse(IRIS, &with("species"));
        let x = a.array("features").unwrap();
        assert_eq!(
            (x.dims.as_slice(), x.to_vec::<f32>()),
            (&[3, 2][..], vec![5.1, 1.4, -7.0, 4.5, 6.0, 0.5])
        );
        let names = vec!["setosa".to_string(), "versi,color".into()];
        assert_eq!(labels(&a), (DType::I32, vec![0.0, 1.0, 0.0], names));
        // The columns are selected by name, in another order, and the classes are given.
        let classes = ["none", "versi,color", "setosa"].map(String::from).to_vec();
        let o = CsvOptions { features: vec!["petal".into()], classes: classes.clone(), ..with("species") };
        let a = parse(IRIS, &o);
        assert_eq!(a.array("features").unwrap().to_vec::<f32>(), [1.4, 4.5, 0.5]);
        assert_eq!(labels(&a), (DType::I32, vec![2.0, 1.0, 2.0], classes));
        let only = CsvOptions { features: vec!["petal".into(), "sepal".into()], ..CsvOptions::default() };
        assert_eq!(parse(IRIS, &only).batch(&[1]).unwrap()[0].to_vec::<f32>(), [4.5, -7.0]);
    }

    #[test]
    fn kinds_of_labels() {
        let t = |l: [&str; 3]| format!("x,y\n1,{}\n2,{}\n3,{}\n", l[0], l[1], l[2]);
        let kind = |kind, l| labels(&parse(&t(l), &CsvOptions { label_kind: kind, ..with("y") }));
        assert_eq!(kind(LabelKind::Auto, ["10", "0", "2"]), (DType::I32, vec![10.0, 0.0, 2.0], vec![]));
        assert_eq!(kind(LabelKind::Number, ["10", "0", "2"]), (DType::F32, vec![10.0, 0.0, 2.0], vec![]));
        assert_eq!(kind(LabelKind::Auto, ["10", "-1", "2"]).0, DType::F32);
        assert_eq!(kind(LabelKind::Auto, ["0.5", "1", "2"]), (DType::F32, vec![0.5, 1.0, 2.0], vec![]));
        let (dtype, v, names) = kind(LabelKind::Class, ["10", "9", "10"]);
        assert_eq!((dtype, v, names), (DType::I32, vec![0.0, 1.0, 0.0], vec!["10".into(), "9".into()]));
        // If one label is not a number, all labels are names.
        let (dtype, v, names) = kind(LabelKind::Auto, ["7", "b", "7"]);
        assert_eq!((dtype, v, names), (DType::I32, vec![0.0, 1.0, 0.0], vec!["7".into(), "b".into()]));
        let o = CsvOptions { label_kind: LabelKind::Number, ..with("y") };
        assert!(fails(t(["1", "b", "2"]), &o).contains("line 3, column 'y': 'b' is not a finite number"));
        assert!(fails(t(["1", "1e39", "2"]), &with("y")).contains("too large for f32"));
        let o = CsvOptions { classes: vec!["1".into(), "2".into()], ..with("y") };
        assert!(
            fails(t(["1", "3", "2"]), &o).contains("line 3, column 'y': '3' is not one of the classes 1, 2")
        );
    }

    #[test]
    fn files_without_a_header() {
        let o = CsvOptions { header: false, delimiter: ';', ..with("0") };
        let a = parse("a;1;2\nb;3;4\n", &o);
        assert_eq!(a.array("features").unwrap().to_vec::<f32>(), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(labels(&a).1, [0.0, 1.0]);
        assert!(fails("a;1;x\n", &o).contains("line 1, column '2': 'x'"));
    }

    #[test]
    fn wrong_values_are_errors_with_line_and_column() {
        let o = with("y");
        assert!(fails("a,b,y\n1,2,u\n3,,v\n", &o).contains("t.csv: line 3, column 'b': there is no value"));
        assert!(fails("a,b,y\n1,2,u\n\n\n3, ,v\n", &o).contains("line 5, column 'b': there is no value"));
        assert!(fails("a,b,y\n1,2,u\n3,4,\n", &o).contains("line 3, column 'y': there is no value"));
        assert!(
            fails("a,b,y\n1,2,u\n3,abc,v\n", &o).contains("line 3, column 'b': 'abc' is not a finite number")
        );
        for v in ["nan", "inf", "-Infinity", "0x10", "1_0", "1,5"] {
            assert!(fails(format!("a,y\n1,0\n\"{v}\",0\n"), &o).contains("line 3, column 'a'"), "{v}");
        }
        assert!(fails("a,y\n1e39,0\n", &o).contains("too large for f32"));
        assert!(fails("a,y\n1,2\n1,2,3\n", &o).contains("line 3 has 3 values, but the first has 2"));
        assert!(fails("a,y\n1,2\n\n\n1,2,3\n", &o).contains("line 5 has 3 values, but the first has 2"));
        assert!(fails("a,y\n\"1\n,2\n", &o).contains("has 1 values"));
        assert!(fails(b"a,y\n1,2\n\xff,2\n", &o).contains("line 3, column 'a'"));
        assert!(fails(b"a,y\n1,\xff\n", &o).contains("not UTF-8"));
        assert!(fails(b"\xff,y\n1,2\n", &o).contains("column 0 is not UTF-8"));
        // Line numbers are correct after a quoted value that extends over two lines.
        assert!(fails("a,y\n1,\"u\nv\"\nx,2\n", &o).contains("line 4, column 'a'"));
    }

    #[test]
    fn options_that_do_not_fit() {
        let table = "a,b\n1,2\n";
        assert!(fails("", &with("a")).contains("empty"));
        assert!(matches!(parse_csv(b"\x1f\x8b", "t", &with("a")), Err(Error::Unsupported { .. })));
        assert!(fails("a,b\n", &with("a")).contains("no line of values"));
        assert!(fails("a,a\n1,2\n", &with("a")).contains("two columns are called 'a'"));
        assert!(fails(table, &with("z")).contains("has no column 'z'; it has a, b"));
        assert!(fails("a\n1\n", &with("a")).contains("no column besides the label"));
        let twice = CsvOptions { features: vec!["a".into(), "a".into()], ..CsvOptions::default() };
        assert!(fails(table, &twice).contains("'a' appears twice"));
        for delimiter in ['"', '\n', 'ä', '→'] {
            assert!(fails(table, &CsvOptions { delimiter, ..with("a") }).contains("cannot separate"));
        }
        let o = CsvOptions { classes: vec!["u".into()], ..CsvOptions::default() };
        assert!(fails(table, &o).contains("without a label"));
        assert!(
            fails(table, &CsvOptions { classes: vec!["u".into(), "u".into()], ..with("a") })
                .contains("twice")
        );
        let o = CsvOptions { classes: vec!["u".into()], label_kind: LabelKind::Number, ..with("a") };
        assert!(fails(table, &o).contains("labels that are numbers"));
    }

    #[test]
    fn a_column_of_many_labels_is_not_one_of_classes() {
        let text: String =
            std::iter::once("x,y\n".into()).chain((0..70_000).map(|k| format!("1,n{k}\n"))).collect();
        assert!(fails(text, &with("y")).contains("line 65538, column 'y': there are more than 65536"));
    }
}
