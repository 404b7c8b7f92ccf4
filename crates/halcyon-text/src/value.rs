//! Values of JSON whose objects keep the order of their keys. Templates print objects, and models were
//! trained on text in which the keys have their original order.

use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A value of JSON. The keys of objects keep their order, unlike those of `serde_json::Value`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Json {
    /// `null`.
    #[default]
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer that fits.
    Int(i64),
    /// An integer above those.
    UInt(u64),
    /// Any other number.
    Float(f64),
    /// A text.
    String(String),
    /// A list.
    Array(Vec<Json>),
    /// Keys with values, in order.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads a text of JSON.
    ///
    /// # Errors
    /// [`halcyon_ir::Error::Format`] with the line and column of the mistake.
    pub fn parse(text: &str) -> halcyon_ir::Result<Json> {
        serde_json::from_str(text).map_err(|e| crate::bad("JSON", e))
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Json::String(s) => Some(s),
            _ => None,
        }
    }

    /// The value of a key. If the key is repeated, the last value counts.
    pub fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Json::Object(fields) => fields.iter().rev().find(|f| f.0 == key).map(|f| &f.1),
            _ => None,
        }
    }

    pub(crate) fn is_null(&self) -> bool {
        matches!(self, Json::Null)
    }

    /// The length of all texts in it, and one for each value.
    pub(crate) fn size(&self) -> usize {
        match self {
            Json::String(s) => 1 + s.len(),
            Json::Array(list) => 1 + list.iter().map(Json::size).sum::<usize>(),
            Json::Object(fields) => 1 + fields.iter().map(|(k, v)| k.len() + v.size()).sum::<usize>(),
            _ => 1,
        }
    }

    pub(crate) fn to_template(&self) -> minijinja::Value {
        use minijinja::Value;
        match self {
            Json::Null => Value::from(()),
            Json::Bool(b) => Value::from(*b),
            Json::Int(i) => Value::from(*i),
            Json::UInt(u) => Value::from(*u),
            Json::Float(f) => Value::from(*f),
            Json::String(s) => Value::from(s.as_str()),
            Json::Array(list) => Value::from(list.iter().map(Json::to_template).collect::<Vec<_>>()),
            Json::Object(fields) => {
                Value::from_pairs(fields.iter().map(|(k, v)| (k.as_str(), v.to_template())))
            }
        }
    }
}

impl From<&str> for Json {
    fn from(s: &str) -> Json {
        Json::String(s.into())
    }
}

impl From<String> for Json {
    fn from(s: String) -> Json {
        Json::String(s)
    }
}

impl From<serde_json::Value> for Json {
    fn from(v: serde_json::Value) -> Json {
        use serde_json::Value;
        match v {
            Value::Null => Json::Null,
            Value::Bool(b) => Json::Bool(b),
            Value::Number(n) => match (n.as_i64(), n.as_u64()) {
                (Some(i), _) => Json::Int(i),
                (_, Some(u)) => Json::UInt(u),
                _ => Json::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(s) => Json::String(s),
            Value::Array(list) => Json::Array(list.into_iter().map(Json::from).collect()),
            Value::Object(map) => Json::Object(map.into_iter().map(|(k, v)| (k, v.into())).collect()),
        }
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Json::Null => s.serialize_unit(),
            Json::Bool(b) => s.serialize_bool(*b),
            Json::Int(i) => s.serialize_i64(*i),
            Json::UInt(u) => s.serialize_u64(*u),
            Json::Float(f) => s.serialize_f64(*f),
            Json::String(text) => s.serialize_str(text),
            Json::Array(list) => s.collect_seq(list),
            Json::Object(fields) => {
                let mut map = s.serialize_map(Some(fields.len()))?;
                fields.iter().try_for_each(|(k, v)| map.serialize_entry(k, v))?;
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Json, D::Error> {
        d.deserialize_any(AnyJson)
    }
}

struct AnyJson;

impl<'de> Visitor<'de> for AnyJson {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Json, E> {
        Ok(Json::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Json, E> {
        Ok(Json::Int(v))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Json, E> {
        Ok(i64::try_from(v).map_or(Json::UInt(v), Json::Int))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Json, E> {
        Ok(Json::Float(v))
    }

    fn visit_str<E>(self, v: &str) -> Result<Json, E> {
        Ok(Json::String(v.into()))
    }

    fn visit_string<E>(self, v: String) -> Result<Json, E> {
        Ok(Json::String(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut list = vec![];
        while let Some(v) = seq.next_element()? {
            list.push(v);
        }
        Ok(Json::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut fields = vec![];
        while let Some(field) = map.next_entry()? {
            fields.push(field);
        }
        Ok(Json::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_keep_the_order_of_their_keys() {
        let text = r#"{"z":1,"a":[null,true,-2,18446744073709551615,1.5,"x"],"m":{}}"#;
        let json = Json::parse(text).unwrap();
        assert_eq!(serde_json::to_string(&json).unwrap(), text);
        assert_eq!(json.get("z"), Some(&Json::Int(1)));
        assert_eq!(
            json.get("a").unwrap(),
            &Json::from(serde_json::json!([null, true, -2, u64::MAX, 1.5, "x"]))
        );
        assert!(Json::parse("{").unwrap_err().to_string().contains("line 1"));
        assert!(Json::parse(&"[".repeat(100_000)).is_err());
    }
}
