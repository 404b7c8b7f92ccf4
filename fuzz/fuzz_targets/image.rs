//! Fuzz target: images, as the command reads them for a model's input.
#![no_main]

use halcyon::{DType, Shape};
use halcyon_cli::read_image;
use halcyon_formats::onnx::{Port, PortType};
use halcyon_fuzz::judge;
use libfuzzer_sys::fuzz_target;
fuzz_target!(|data: &[u8]| {
    let port =
        |shape: Shape, dtype| Port { name: "x".into(), ty: PortType::Tensor { dtype, shape: Some(shape) } };
    for p in [
        port([1, 3, 8, 8].into(), DType::F32),
        port(["n", "c", "h", "w"].into(), DType::F32),
        port([8, 8, 1].into(), DType::U8),
    ] {
        judge(read_image(data, &p));
    }
});
