//! Generated test data in `target/testdata`, which is not stored in the repository.

use crate::prerequisites::Venv;
use crate::report::run;
pub(crate) use halcyon_test_host::models_dir as models;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A generator script in `xtask/scripts`, and the folder that it writes.
#[derive(Debug)]
struct Generator {
    script: &'static str,
    /// Arguments before the output folder.
    inputs: fn() -> Vec<PathBuf>,
    /// Folder below `target/testdata`; empty for `target/testdata` itself.
    output: &'static str,
}

const GENERATORS: &[Generator] = &[
    Generator { script: "gen_squeezenet.py", inputs: Vec::new, output: "squeezenet" },
    Generator {
        script: "mlp_reference.py",
        inputs: || vec![crate::root().join("models/digits.npz")],
        output: "mlp",
    },
    Generator { script: "altered_conformance.py", inputs: Vec::new, output: "" },
    Generator { script: "gen_suite.py", inputs: Vec::new, output: "suite" },
    Generator { script: "gen_models.py", inputs: Vec::new, output: "models" },
    Generator { script: "gen_ml_cases.py", inputs: Vec::new, output: "ml" },
    Generator { script: "gen_check.py", inputs: minilm, output: "seeded" },
];

fn minilm() -> Vec<PathBuf> {
    let path = models().join("minilm/minilm.onnx");
    if path.is_file() { vec![path] } else { vec![] }
}

pub(crate) fn dir() -> PathBuf {
    crate::target_dir().join("testdata")
}

/// Runs every generator whose script, inputs or Python packages have changed since its last run.
pub(crate) fn prepare(venv: &Venv) -> Result<String, String> {
    let mut made = 0;
    for generator in GENERATORS {
        let script = crate::root().join("xtask/scripts").join(generator.script);
        let out = dir().join(generator.output);
        std::fs::create_dir_all(&out).map_err(|e| format!("{}: {e}", out.display()))?;
        let stamp_file = dir().join(format!("{}.stamp", generator.script));
        let stamp = stamp(generator, &script)?;
        if std::fs::read_to_string(&stamp_file).is_ok_and(|have| have == stamp) {
            continue;
        }
        run(Command::new(venv.python()).arg(&script).args((generator.inputs)()).arg(&out))?;
        std::fs::write(&stamp_file, stamp).map_err(|e| format!("{}: {e}", stamp_file.display()))?;
        made += 1;
    }
    Ok(format!("{} of {} sets generated; the others are up to date", made, GENERATORS.len()))
}

fn stamp(generator: &Generator, script: &Path) -> Result<String, String> {
    let mut hasher = DefaultHasher::new();
    let inputs = (generator.inputs)();
    let requirements = crate::test::REQUIREMENTS.iter().map(|one| one.path());
    for path in [script.to_path_buf()].into_iter().chain(inputs).chain(requirements) {
        std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?.hash(&mut hasher);
    }
    Ok(format!("{:016x}\n", hasher.finish()))
}
