//! Text, cut into windows of characters.

use crate::bad;
use crate::dataset::{Column, Dataset, array, buffer, check_rows, single};
use bytes::Bytes;
use halcyon_formats::mmap;
use halcyon_ir::{ConstData, DType, Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// The characters of a text, numbered from 0 in the order of their code points. The serialised form is a
/// string of all characters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Vocabulary(Arc<[char]>);

impl Vocabulary {
    /// The characters that occur in a text.
    pub fn of(text: &str) -> Vocabulary {
        let mut seen = BTreeSet::new();
        // The characters are inserted one by one, because collecting them into the set would sort a copy of
        // the whole text.
        for c in text.chars() {
            seen.insert(c);
        }
        Vocabulary(seen.into_iter().collect())
    }

    /// The characters, in the order of their numbers.
    pub fn chars(&self) -> &[char] {
        &self.0
    }

    /// The number of characters.
    pub fn size(&self) -> usize {
        self.0.len()
    }

    /// The numbers of the characters of a text.
    ///
    /// # Errors
    /// [`Error::Argument`] for a character that is not in the vocabulary. The message gives the character's
    /// position.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>> {
        text.chars().enumerate().map(|(at, c)| self.number(at, c)).collect()
    }

    /// The number of the character `c`. `at` is the position of `c` in the text, for errors.
    fn number(&self, at: usize, c: char) -> Result<i32> {
        let found = self.0.binary_search(&c).ok().and_then(|k| i32::try_from(k).ok());
        found.ok_or_else(|| {
            let what = format!(
                "character {at} of the text, {c:?}, is not in the vocabulary of {} characters",
                self.size()
            );
            Error::argument("vocabulary", what)
        })
    }

    /// The text with these character numbers.
    ///
    /// # Errors
    /// [`Error::Argument`] for a number that belongs to no character.
    pub fn decode(&self, numbers: &[i32]) -> Result<String> {
        let one = |n: &i32| {
            let found = usize::try_from(*n).ok().and_then(|k| self.0.get(k).copied());
            found.ok_or_else(|| {
                Error::argument(
                    "vocabulary",
                    format!("{n} is not the number of a character; there are {}", self.size()),
                )
            })
        };
        numbers.iter().map(one).collect()
    }
}

impl TryFrom<String> for Vocabulary {
    type Error = Error;

    fn try_from(chars: String) -> Result<Vocabulary> {
        let chars: Vec<char> = chars.chars().collect();
        match chars.windows(2).find(|w| w[0] >= w[1]) {
            Some(w) => {
                let what =
                    format!("{:?} follows {:?}, but characters are sorted and appear once", w[1], w[0]);
                Err(Error::argument("vocabulary", what))
            }
            None => Ok(Vocabulary(chars.into())),
        }
    }
}

impl From<Vocabulary> for String {
    fn from(v: Vocabulary) -> String {
        v.0.iter().collect()
    }
}

/// How [`Text`] cuts a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Characters of a window.
    pub context: usize,
    /// The distance between the starts of two windows, in characters. The default `None` means `context`:
    /// windows then do not overlap, and characters at the end that do not fill a window are left out. With 1,
    /// every possible window is used.
    pub stride: Option<usize>,
    /// The vocabulary to use, such as the vocabulary of the training text. `None` means the characters of
    /// this text.
    pub vocabulary: Option<Vocabulary>,
}

impl TextOptions {
    pub fn new(context: usize) -> TextOptions {
        TextOptions { context, stride: None, vocabulary: None }
    }

    pub fn stride(mut self, stride: usize) -> TextOptions {
        self.stride = Some(stride);
        self
    }

    pub fn vocabulary(mut self, vocabulary: Vocabulary) -> TextOptions {
        self.vocabulary = Some(vocabulary);
        self
    }
}

/// Windows of a text, for models that predict the next character. A row has two columns: `input` has
/// `context` characters, and `target` has the next character for each of them. Both are i32 `[context]`, and
/// the characters are the names of their classes.
#[derive(Clone, Debug)]
pub struct Text {
    columns: [Column; 2],
    vocabulary: Vocabulary,
    /// The number of each character of the text, as little-endian i32.
    numbers: Bytes,
    context: usize,
    stride: usize,
    windows: usize,
}

impl Text {
    /// Reads a UTF-8 file.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] if the file is not UTF-8, is too short for a window, or has a
    /// character that is not in the given vocabulary; [`Error::Argument`] for a context or stride of zero.
    pub fn open(path: &Path, options: TextOptions) -> Result<Text> {
        Text::parse(&mmap::open(path)?, &path.display().to_string(), options)
    }

    /// Like [`Text::open`], but takes the content of a file. `file` is the name of the file in errors.
    pub fn parse(content: &[u8], file: &str, options: TextOptions) -> Result<Text> {
        let text = std::str::from_utf8(content)
            .map_err(|e| bad(file, format!("not UTF-8 text: byte {} is wrong", e.valid_up_to())))?;
        let TextOptions { context, stride, vocabulary } = options;
        let stride = stride.unwrap_or(context);
        if context == 0 || stride == 0 {
            return Err(Error::argument("text", "a context or stride of 0; they are at least 1"));
        }
        let vocabulary = vocabulary.unwrap_or_else(|| Vocabulary::of(text));
        let n = text.chars().count();
        // A window and the character after it.
        let Some(more) = n.checked_sub(1).and_then(|n| n.checked_sub(context)) else {
            return Err(bad(
                file,
                format!("the text has {n} characters; a window needs {context} and one more"),
            ));
        };
        let mut numbers =
            halcyon_host::reserve(n.saturating_mul(DType::I32.size()), &format!("the text {file}"))?;
        for (at, c) in text.chars().enumerate() {
            let number = vocabulary.number(at, c).map_err(|e| match e {
                Error::Argument { what, .. } => bad(file, what),
                e => e,
            })?;
            numbers.extend_from_slice(&number.to_le_bytes());
        }
        let names: Arc<[String]> = vocabulary.chars().iter().map(char::to_string).collect();
        let column = |name| Column::new(name, DType::I32, &[context]).with_classes(names.clone());
        Ok(Text {
            columns: [column("input"), column("target")],
            numbers: numbers.into(),
            vocabulary,
            context,
            stride,
            windows: more / stride + 1,
        })
    }

    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }
}

impl Dataset for Text {
    fn len(&self) -> usize {
        self.windows
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn row(&self, row: usize) -> Result<Vec<ConstData>> {
        single(self, row)
    }

    fn batch(&self, rows: &[usize]) -> Result<Vec<ConstData>> {
        check_rows(rows, self.windows)?;
        let size = DType::I32.size();
        let gather = |(shift, column): (usize, &Column)| {
            let mut out = buffer(column, rows.len())?;
            for row in rows {
                let start = (row * self.stride + shift) * size;
                out.extend_from_slice(&self.numbers[start..][..self.context * size]);
            }
            array(column, rows.len(), out)
        };
        self.columns.iter().enumerate().map(gather).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(s: &str, options: TextOptions) -> Text {
        Text::parse(s.as_bytes(), "t", options).unwrap()
    }

    fn rows(t: &Text) -> Vec<(String, String)> {
        let of = |x: &ConstData| t.vocabulary().decode(&x.to_vec::<i32>()).unwrap();
        (0..t.len()).map(|k| t.row(k).unwrap()).map(|r| (of(&r[0]), of(&r[1]))).collect()
    }

    #[test]
    fn targets_are_the_next_characters() {
        let pairs =
            |v: &[(&str, &str)]| v.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect::<Vec<_>>();
        assert_eq!(rows(&text("abcdefg", TextOptions::new(3))), pairs(&[("abc", "bcd"), ("def", "efg")]));
        assert_eq!(rows(&text("abcdef", TextOptions::new(3))), pairs(&[("abc", "bcd")]));
        let all = rows(&text("abcde", TextOptions::new(2).stride(1)));
        assert_eq!(all, pairs(&[("ab", "bc"), ("bc", "cd"), ("cd", "de")]));
        assert_eq!(rows(&text("ab", TextOptions::new(1))), pairs(&[("a", "b")]));
        assert_eq!(
            rows(&text("abcdefghi", TextOptions::new(2).stride(4))),
            pairs(&[("ab", "bc"), ("ef", "fg")])
        );
    }

    #[test]
    fn vocabularies() {
        let t = text("the ähre 🌾\n", TextOptions::new(2));
        assert_eq!(t.vocabulary().chars(), ['\n', ' ', 'e', 'h', 'r', 't', 'ä', '🌾']);
        assert_eq!((t.columns[1].classes.len(), t.columns[1].classes[7].as_str()), (8, "🌾"));
        let v = t.vocabulary();
        assert_eq!(v.encode("th🌾").unwrap(), [5, 3, 7]);
        assert_eq!(v.decode(&v.encode("the ähre 🌾\n").unwrap()).unwrap(), "the ähre 🌾\n");
        assert!(v.encode("te\u{7}st").unwrap_err().to_string().contains("character 2 of the text, '\\u{7}'"));
        assert!(v.decode(&[-1]).is_err() && v.decode(&[8]).is_err());
        let json = serde_json::to_string(v).unwrap();
        assert_eq!(serde_json::from_str::<Vocabulary>(&json).unwrap(), *v);
        for wrong in ["\"ba\"", "\"aa\""] {
            assert!(serde_json::from_str::<Vocabulary>(wrong).is_err());
        }
        let other = text("het", TextOptions::new(1).vocabulary(v.clone()));
        assert_eq!(other.batch(&[0]).unwrap()[0].to_vec::<i32>(), [3]);
    }

    #[test]
    fn texts_that_are_no_dataset() {
        let fails = |b: &[u8], o: TextOptions| match Text::parse(b, "t", o) {
            Err(e @ Error::Format { .. }) => e.to_string(),
            other => panic!("{other:?}"),
        };
        assert!(fails(b"ab\xffc", TextOptions::new(1)).contains("byte 2"));
        assert!(fails(b"ab", TextOptions::new(2)).contains("the text has 2 characters"));
        assert!(fails(b"", TextOptions::new(1)).contains("0 characters"));
        assert!(fails(b"abc", TextOptions::new(usize::MAX)).contains("3 characters"));
        assert!(fails(b"abc", TextOptions::new(1).vocabulary(Vocabulary::of("ab"))).contains("'c'"));
        assert!(matches!(Text::parse(b"abc", "t", TextOptions::new(0)), Err(Error::Argument { .. })));
        assert!(matches!(
            Text::parse(b"abc", "t", TextOptions::new(1).stride(0)),
            Err(Error::Argument { .. })
        ));
        let t = text("abc", TextOptions::new(1).stride(usize::MAX));
        assert!(t.len() == 1 && matches!(t.batch(&[1]), Err(Error::Argument { .. })));
    }
}
