//! The metadata of GGUF files: typed values by key.

use crate::bad;
use halcyon_ir::{Error, Result};

/// Numbers of the types that the table of numbers lacks.
pub(super) const BOOL: u32 = 7;
pub(super) const STRING: u32 = 8;
pub(super) const ARRAY: u32 = 9;

macro_rules! numbers {
    ($($variant:ident $ty:ty, $code:literal, $name:literal;)*) => {
        /// A metadata value.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Value {
            $($variant($ty),)*
            Bool(bool),
            String(String),
            /// A string that is not UTF-8.
            Bytes(Vec<u8>),
            Array(Array),
        }

        /// The elements of an array. All have one type.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Array {
            $($variant(Vec<$ty>),)*
            Bool(Vec<bool>),
            String(Vec<String>),
            /// Strings, of which at least one is not UTF-8.
            Bytes(Vec<Vec<u8>>),
            /// Arrays, whose element types may differ.
            Array(Vec<Array>),
        }

        impl Value {
            /// The number of the type in GGUF files.
            pub(super) fn code(&self) -> u32 {
                match self {
                    $(Value::$variant(_) => $code,)*
                    Value::Bool(_) => BOOL,
                    Value::String(_) | Value::Bytes(_) => STRING,
                    Value::Array(_) => ARRAY,
                }
            }

            /// The value as an integer, if it is one.
            fn integer(&self) -> Option<i128> {
                self.number().and_then(|n| match n {
                    Number::Integer(v) => Some(v),
                    Number::Float(_) => None,
                })
            }

            fn number(&self) -> Option<Number> {
                match self {
                    $(Value::$variant(v) => Some((*v).into()),)*
                    _ => None,
                }
            }

            /// Appends the value's bytes, without its type.
            pub(super) fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(Value::$variant(v) => out.extend_from_slice(&v.to_le_bytes()),)*
                    Value::Bool(v) => out.push((*v).into()),
                    Value::String(v) => string(v.as_bytes(), out),
                    Value::Bytes(v) => string(v, out),
                    Value::Array(v) => v.encode(out),
                }
            }
        }

        impl Array {
            /// The number of the elements' type in GGUF files.
            pub(super) fn code(&self) -> u32 {
                match self {
                    $(Array::$variant(_) => $code,)*
                    Array::Bool(_) => BOOL,
                    Array::String(_) | Array::Bytes(_) => STRING,
                    Array::Array(_) => ARRAY,
                }
            }

            /// The number of elements.
            pub fn len(&self) -> usize {
                match self {
                    $(Array::$variant(v) => v.len(),)*
                    Array::Bool(v) => v.len(),
                    Array::String(v) => v.len(),
                    Array::Bytes(v) => v.len(),
                    Array::Array(v) => v.len(),
                }
            }

            /// A copy of element `i`.
            pub fn get(&self, i: usize) -> Option<Value> {
                match self {
                    $(Array::$variant(v) => v.get(i).copied().map(Value::$variant),)*
                    Array::Bool(v) => v.get(i).copied().map(Value::Bool),
                    Array::String(v) => v.get(i).cloned().map(Value::String),
                    Array::Bytes(v) => v.get(i).cloned().map(Value::Bytes),
                    Array::Array(v) => v.get(i).cloned().map(Value::Array),
                }
            }

            /// The elements as numbers. `None` if they are not numbers.
            fn numbers(&self) -> Option<Vec<Number>> {
                match self {
                    $(Array::$variant(v) => Some(v.iter().map(|v| (*v).into()).collect()),)*
                    _ => None,
                }
            }

            fn encode(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.code().to_le_bytes());
                out.extend_from_slice(&(self.len() as u64).to_le_bytes());
                match self {
                    $(Array::$variant(v) => v.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes())),)*
                    Array::Bool(v) => out.extend(v.iter().map(|v| u8::from(*v))),
                    Array::String(v) => v.iter().for_each(|v| string(v.as_bytes(), out)),
                    Array::Bytes(v) => v.iter().for_each(|v| string(v, out)),
                    Array::Array(v) => v.iter().for_each(|v| v.encode(out)),
                }
            }
        }

        /// The bytes of a number, or of a bool: 0 for a type that is neither.
        pub(super) fn size(code: u32) -> usize {
            match code {
                $($code => size_of::<$ty>(),)*
                BOOL => 1,
                _ => 0,
            }
        }

        /// A number. `bytes` has [`size`] bytes. `None` if the type is not that of a number.
        pub(super) fn number(code: u32, bytes: &[u8]) -> Option<Value> {
            match code {
                $($code => Some(Value::$variant(<$ty>::from_le_bytes(bytes.try_into().ok()?))),)*
                _ => None,
            }
        }

        /// An array of numbers. `None` if the type is not that of a number.
        pub(super) fn numbers(code: u32, bytes: &[u8]) -> Option<Array> {
            match code {
                $($code => {
                    let (each, _) = bytes.as_chunks::<{ size_of::<$ty>() }>();
                    Some(Array::$variant(each.iter().map(|b| <$ty>::from_le_bytes(*b)).collect()))
                })*
                _ => None,
            }
        }

        /// The name of a type. `None` for an unknown number.
        pub(super) fn type_name(code: u32) -> Option<&'static str> {
            match code {
                $($code => Some($name),)*
                BOOL => Some("bool"),
                STRING => Some("string"),
                ARRAY => Some("array"),
                _ => None,
            }
        }

        $(
            impl From<$ty> for Value {
                fn from(v: $ty) -> Value {
                    Value::$variant(v)
                }
            }
            impl From<Vec<$ty>> for Value {
                fn from(v: Vec<$ty>) -> Value {
                    Value::Array(Array::$variant(v))
                }
            }
        )*
    };
}

numbers! {
    U8 u8, 0, "u8";
    I8 i8, 1, "i8";
    U16 u16, 2, "u16";
    I16 i16, 3, "i16";
    U32 u32, 4, "u32";
    I32 i32, 5, "i32";
    F32 f32, 6, "f32";
    U64 u64, 10, "u64";
    I64 i64, 11, "i64";
    F64 f64, 12, "f64";
}

/// A number of any type, without loss.
enum Number {
    Integer(i128),
    Float(f64),
}

macro_rules! convert {
    ($($ty:ty => $variant:ident,)*) => {
        $(impl From<$ty> for Number {
            fn from(v: $ty) -> Number {
                Number::$variant(v.into())
            }
        })*
    };
}

convert! {
    u8 => Integer, i8 => Integer, u16 => Integer, i16 => Integer, u32 => Integer, i32 => Integer,
    u64 => Integer, i64 => Integer, f32 => Float, f64 => Float,
}

impl Number {
    /// The nearest `f64`.
    fn float(self) -> f64 {
        match self {
            Number::Integer(v) => v as f64,
            Number::Float(v) => v,
        }
    }
}

impl From<&str> for Value {
    fn from(v: &str) -> Value {
        Value::String(v.into())
    }
}

impl From<String> for Value {
    fn from(v: String) -> Value {
        Value::String(v)
    }
}

impl From<bool> for Value {
    fn from(v: bool) -> Value {
        Value::Bool(v)
    }
}

impl From<Vec<String>> for Value {
    fn from(v: Vec<String>) -> Value {
        Value::Array(Array::String(v))
    }
}

/// Appends a string: its length and its bytes.
pub(super) fn string(v: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&(v.len() as u64).to_le_bytes());
    out.extend_from_slice(v);
}

impl Value {
    /// The name of the type: `u32`, `string`, `string[512]`.
    pub fn type_name(&self) -> String {
        match self {
            Value::Array(a) => a.type_name(),
            v => type_name(v.code()).unwrap_or_default().into(),
        }
    }
}

impl Array {
    /// The name of the type, with the number of elements: `string[512]`.
    pub fn type_name(&self) -> String {
        format!("{}[{}]", self.element_type(), self.len())
    }

    /// The name of the elements' type: `string`.
    pub fn element_type(&self) -> &'static str {
        type_name(self.code()).unwrap_or_default()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of arrays around the innermost element: 1 for an array of numbers.
    pub(super) fn depth(&self) -> usize {
        match self {
            Array::Array(v) => 1 + v.iter().map(Array::depth).max().unwrap_or(0),
            _ => 1,
        }
    }
}

/// The metadata of a file: values by key, in the order of the file.
///
/// The methods that are named after a type ([`Metadata::u64`], [`Metadata::str`] and so on) return the value
/// of a key that must be there. For a key that may be absent, use [`Metadata::maybe`]:
///
/// ```
/// use halcyon_formats::gguf::{Gguf, Metadata, encode};
/// # fn main() -> halcyon_ir::Result<()> {
/// let file = encode(&[("llama.block_count".into(), 5u32.into())], &[])?;
/// let file = Gguf::parse(file.into(), "model.gguf")?;
/// let m = file.metadata();
/// assert_eq!(m.u64("llama.block_count")?, 5);
/// assert_eq!(m.maybe("llama.expert_count", Metadata::u64)?, None);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Metadata {
    /// The file's name, for errors.
    file: String,
    entries: Vec<(String, Value)>,
    /// The indices of the entries, sorted by key.
    order: Vec<u32>,
}

impl Metadata {
    /// # Errors
    /// [`Error::Format`] for a key that appears twice.
    pub(super) fn new(file: &str, entries: Vec<(String, Value)>) -> Result<Metadata> {
        let order = sorted(entries.iter().map(|(k, _)| k.as_str()))
            .map_err(|k| bad(file, format!("the metadata key '{k}' appears twice")))?;
        Ok(Metadata { file: file.into(), entries, order })
    }

    /// Keys and values, in the order of the file.
    pub fn entries(&self) -> &[(String, Value)] {
        &self.entries
    }

    /// The value of a key, if it is there.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let i = self.order.binary_search_by_key(&key, |i| self.entries[*i as usize].0.as_str()).ok()?;
        Some(&self.entries[self.order[i] as usize].1)
    }

    /// `read(key)` if the key is there, else `None`.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn maybe<'m, T>(
        &'m self,
        key: &str,
        read: impl FnOnce(&'m Metadata, &str) -> Result<T>,
    ) -> Result<Option<T>> {
        if self.get(key).is_some() { read(self, key).map(Some) } else { Ok(None) }
    }

    /// The value of a key that must be there.
    fn need(&self, key: &str) -> Result<&Value> {
        self.get(key).ok_or_else(|| bad(&self.file, format!("it has no metadata '{key}'")))
    }

    /// The error for a value of another type than `want`.
    fn other(&self, key: &str, v: &Value, want: &str) -> Error {
        let found = match v {
            Value::Bytes(_) => "a string that is not UTF-8".into(),
            Value::Array(Array::Bytes(b)) => {
                let at = b.iter().position(|s| std::str::from_utf8(s).is_err()).unwrap_or(0);
                format!("an array of strings, and the one at index {at} is not UTF-8")
            }
            v => format!("of type {}", v.type_name()),
        };
        bad(&self.file, format!("metadata '{key}' must be {want}, but it is {found}"))
    }

    /// A string.
    ///
    /// # Errors
    /// [`Error::Format`] if the key is absent or its value has another type. All other methods of this kind
    /// have the same errors.
    pub fn str(&self, key: &str) -> Result<&str> {
        match self.need(key)? {
            Value::String(s) => Ok(s),
            v => Err(self.other(key, v, "a string")),
        }
    }

    /// An integer of any type that is not negative.
    pub fn u64(&self, key: &str) -> Result<u64> {
        let v = self.need(key)?;
        let i = v.integer().ok_or_else(|| self.other(key, v, "an integer"))?;
        u64::try_from(i).map_err(|_| bad(&self.file, format!("metadata '{key}' must not be negative: {i}")))
    }

    /// An integer of any type that fits an `i64`.
    pub fn i64(&self, key: &str) -> Result<i64> {
        let v = self.need(key)?;
        let i = v.integer().ok_or_else(|| self.other(key, v, "an integer"))?;
        i64::try_from(i).map_err(|_| self.too_large(key, i))
    }

    fn too_large(&self, key: &str, v: i128) -> Error {
        bad(&self.file, format!("metadata '{key}': {v} is larger than 63 bits hold"))
    }

    /// A number of any type, as the nearest `f64`.
    pub fn f64(&self, key: &str) -> Result<f64> {
        let v = self.need(key)?;
        v.number().map(Number::float).ok_or_else(|| self.other(key, v, "a number"))
    }

    /// A bool.
    pub fn bool(&self, key: &str) -> Result<bool> {
        match self.need(key)? {
            Value::Bool(b) => Ok(*b),
            v => Err(self.other(key, v, "a bool")),
        }
    }

    /// An array of strings. An empty array may have any type, here and in the other methods for arrays.
    pub fn strings(&self, key: &str) -> Result<&[String]> {
        match self.need(key)? {
            Value::Array(Array::String(s)) => Ok(s),
            Value::Array(a) if a.is_empty() => Ok(&[]),
            v => Err(self.other(key, v, "an array of strings")),
        }
    }

    /// An array of numbers of any type, as the nearest `f32`s.
    pub fn floats(&self, key: &str) -> Result<Vec<f32>> {
        const WANT: &str = "an array of numbers";
        Ok(self.numbers(key, WANT)?.into_iter().map(|n| n.float() as f32).collect())
    }

    /// An array of integers of any type that fit `i64`s.
    pub fn ints(&self, key: &str) -> Result<Vec<i64>> {
        const WANT: &str = "an array of integers";
        let one = |n| match n {
            Number::Integer(i) => i64::try_from(i).map_err(|_| self.too_large(key, i)),
            Number::Float(_) => Err(self.other(key, self.need(key)?, WANT)),
        };
        self.numbers(key, WANT)?.into_iter().map(one).collect()
    }

    fn numbers(&self, key: &str, want: &str) -> Result<Vec<Number>> {
        match self.need(key)? {
            Value::Array(a) if a.is_empty() => Ok(vec![]),
            v @ Value::Array(a) => a.numbers().ok_or_else(|| self.other(key, v, want)),
            v => Err(self.other(key, v, want)),
        }
    }
}

/// The indices of names in the order of the names. If a name appears twice, the error is that name.
pub(super) fn sorted<'n>(
    names: impl Iterator<Item = &'n str> + Clone,
) -> std::result::Result<Vec<u32>, &'n str> {
    let mut all: Vec<(&str, u32)> = names.zip(0..).collect();
    all.sort_unstable();
    match all.windows(2).find(|w| w[0].0 == w[1].0) {
        Some(w) => Err(w[0].0),
        None => Ok(all.into_iter().map(|(_, i)| i).collect()),
    }
}
