//! Writes `include/halcyon.h`: `cargo run --manifest-path bindings/c/check/Cargo.toml`. A test compares it.

use std::process::ExitCode;

fn main() -> ExitCode {
    let file = halcyon_c_check::file();
    let written = halcyon_c_check::header()
        .and_then(|text| std::fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display())));
    match written {
        Ok(()) => {
            println!("{} is written", file.display());
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}
