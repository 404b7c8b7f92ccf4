//! ONNX Runtime as another program that runs ONNX models, to compare Halcyon with.
//!
//! [`Runtime::open`] finds the library and loads it; a build needs none of its files. [`Session`] loads a
//! model and runs it on values on the host. The crate `ort` declares and calls the functions of the library.
//! This crate reads and writes the memory of tensors itself, for two reasons: `ort` has no Rust type for
//! numbers of 8 bits and fewer of ONNX's other types, and it reads booleans as `bool`, which is undefined
//! for the bytes other than 0 and 1 that a model file can hold.

mod library;
mod session;
mod value;

pub use library::{FoundBy, OLDEST, Runtime};
pub use session::{Inputs, Session, SessionOptions};

use halcyon_ir::Error;

/// The name of ONNX Runtime in messages.
const NAME: &str = "ONNX Runtime";

/// A failed call of ONNX Runtime. `what` names the model or the work.
fn failed<R>(what: &str, e: &ort::Error<R>) -> Error {
    use ort::ErrorCode::*;
    let text = e.message().trim().to_string();
    match e.code() {
        NotImplemented => Error::unsupported(
            format!("{what} in {NAME}: {text}"),
            "Use a build of ONNX Runtime that has this operator, or run the model with Halcyon",
        ),
        NoSuchFile | NoModel | InvalidProtobuf | InvalidGraph => {
            Error::Format { file: what.into(), what: format!("{NAME} does not load it: {text}") }
        }
        _ => Error::Driver {
            device: NAME.into(),
            call: what.into(),
            code: text,
            next: "The message is ONNX Runtime's".into(),
        },
    }
}
