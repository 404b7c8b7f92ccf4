//! Writing models: types of tensors, and conversions between folders and files.

#[path = "decode/common.rs"]
mod common;
#[path = "export/convert.rs"]
mod convert;
#[path = "export/types.rs"]
mod types;
