//! Operators on maps: ZipMap, DictVectorizer, CastMap.

use super::DOMAIN;
use crate::data;
use crate::onnx::build::{Builder, Value};
use crate::onnx::item::{Item, Keys, Text};
use crate::onnx::node::Call;
use crate::onnx::ops::{Row, item_row_in};
use halcyon_ir::{ConstData, DType, Dim, Result, Scalar, Shape};
use std::collections::HashMap;
use std::rc::Rc;

pub const ROWS: &[Row] = &[
    item_row_in(DOMAIN, "CastMap", 1, &["cast_to", "map_form", "max_map"], cast_map),
    item_row_in(DOMAIN, "DictVectorizer", 1, &["int64_vocabulary", "string_vocabulary"], dict_vectorizer),
    item_row_in(DOMAIN, "ZipMap", 1, &["classlabels_int64s", "classlabels_strings"], zip_map),
];
