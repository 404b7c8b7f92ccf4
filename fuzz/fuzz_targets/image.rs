//! Target: PNG and JPEG images, as the command reads them for a model's input.
#![no_main]

#[path = "../../crates/halcyon-cli/src/args.rs"]
#[allow(dead_code)]
mod args;
#[path = "../../crates/halcyon-cli/src/image.rs"]
mod picture;

use clap::Parser;
use halcyon::{DType, Shape};
use halcyon_formats::onnx::{Port, PortType};
use halcyon_fuzz::judge;
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

#[derive(Parser, Debug)]
struct Words {
    #[command(flatten)]
    input: args::InputArgs,
}

static ARGS: LazyLock<args::InputArgs> =
    LazyLock::new(|| Words::try_parse_from(["x"]).expect("no arguments are needed").input);

fuzz_target!(|data: &[u8]| {
    let port = |shape: Shape, dtype| Port { name: "x".into(), ty: PortType::Tensor { dtype, shape: Some(shape) } };
    for p in [
        port([1, 3, 8, 8].into(), DType::F32),
        port(["n", "c", "h", "w"].into(), DType::F32),
        port([8, 8, 1].into(), DType::U8),
    ] {
        judge(picture::read(data, &p, &ARGS, "t"));
    }
});
