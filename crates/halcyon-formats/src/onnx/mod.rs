//! ONNX models and tensors.

pub mod proto;
pub mod tensor;
