//! The environment variables that users and developers of Halcyon may set. `halcyon help environment` prints
//! this table. A test compares the names that begin with `HALCYON_` with those in the sources.

/// The section of `halcyon help environment` that lists the variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    User,
    Library,
    System,
    Development,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Variable {
    pub name: &'static str,
    /// Its possible values, as in a usage line.
    pub values: &'static str,
    pub meaning: &'static str,
    pub group: Group,
}

const fn row(group: Group, name: &'static str, values: &'static str, meaning: &'static str) -> Variable {
    Variable { name, values, meaning, group }
}

use Group::*;

pub(crate) const VARIABLES: &[Variable] = &[
    row(
        User,
        "HALCYON_BACKENDS",
        "NAME,NAME,...|ORDER",
        "The default of --backends: the order in which --backend auto tries backends. Names of backends, separated by commas (cuda,cpu), or \
         an order by its name: priority, torchbridge, torch, inference or vendors.",
    ),
    row(
        User,
        "HALCYON_CACHE",
        "off|programs|packed",
        "What is kept on disk between runs. off: nothing, except in files that an option names. programs: compiled kernels, but no packed weights. packed: packed weights too, even \
         where packing again is faster. Not set: compiled kernels, and packed weights where reading them is faster.",
    ),
    row(
        User,
        "HALCYON_CHAT_HISTORY",
        "FILE|off",
        "The file that keeps the messages of halcyon chat, in builds with the feature edit. off: none, as with --no-history. Not set: chats/history in Halcyon's folder of caches; with HALCYON_CACHE=off none.",
    ),
    row(
        User,
        "HALCYON_CONFIG",
        "FILE|off",
        "The configuration file. off: no file is read. Not set: halcyon/config.toml in the user's configuration folder.",
    ),
    row(
        User,
        "HALCYON_CPU_ISA",
        "portable|avx2|avx512|avx512vnni|avx512bf16|amx",
        "The highest instruction set that the CPU backend uses. If this machine does not have it, the error lists the sets that it has. Not set: the highest one.",
    ),
    row(
        User,
        "HALCYON_LOG",
        "LEVEL|TARGET=LEVEL,...",
        "Prints log lines to stderr. LEVEL is error, warn, info, debug or trace; TARGET is a crate or module (halcyon_hal=debug).",
    ),
    row(User, "HALCYON_PRECISION", "f32|bf16|f16", "The default of --precision."),
    row(
        User,
        "HALCYON_PROBE_TIMEOUT",
        "SECONDS",
        "How long the process that probes a driver, or opens one of its devices for the first time, may take: 1 to 3600. Not set: 30.",
    ),
    row(
        User,
        "HALCYON_TUNING",
        "off|cached|background|exhaustive|SECONDS",
        "The default of --tuning: when kernels are tuned.",
    ),
    row(
        User,
        "HALCYON_TUNING_CACHE",
        "FILE|off",
        "The default of --tuning-cache: the file with the results of tuning. off: none.",
    ),
    row(Library, "HALCYON_CUDA_LIBRARY", "PATH", "NVIDIA's driver, libcuda."),
    row(Library, "HALCYON_NVRTC_LIBRARY", "PATH", "CUDA's run-time compiler, libnvrtc."),
    row(Library, "HALCYON_CUBLASLT_LIBRARY", "PATH|off", "cuBLASLt, for matrix products. off: not used."),
    row(
        Library,
        "HALCYON_CUDNN_LIBRARY",
        "PATH|off",
        "cuDNN, for convolutions and attention. off: not used.",
    ),
    row(Library, "HALCYON_HIP_LIBRARY", "PATH", "AMD's HIP runtime, libamdhip64."),
    row(Library, "HALCYON_HIPRTC_LIBRARY", "PATH", "HIP's run-time compiler, libhiprtc."),
    row(Library, "HALCYON_HIPBLASLT_LIBRARY", "PATH|off", "hipBLASLt, for matrix products. off: not used."),
    row(Library, "HALCYON_ROCBLAS_LIBRARY", "PATH|off", "rocBLAS, for matrix products. off: not used."),
    row(Library, "HALCYON_OPENCL_LIBRARY", "PATH", "The OpenCL loader or driver, libOpenCL."),
    row(
        Library,
        "HALCYON_OPENCL_COMMAND_BUFFERS",
        "on|off",
        "Whether OpenCL devices launch plans as command buffers, where the driver has them. Not set: devices that are not processors do.",
    ),
    row(Library, "HALCYON_TPU_LIBRARY", "PATH", "A PJRT plugin for TPUs, libtpu."),
    row(
        Library,
        "HALCYON_PYTHON",
        "PATH",
        "A Python interpreter. The libraries of CUDA, ROCm and ONNX Runtime are looked for among its packages too; halcyon-check measures PyTorch with it.",
    ),
    row(
        System,
        "HF_ENDPOINT",
        "URL",
        "The server from which models by name (hf:ORG/REPO) are downloaded. Not set: https://huggingface.co.",
    ),
    row(
        System,
        "HF_HOME",
        "FOLDER",
        "The folder of Hugging Face's programs; its folder hub has the downloaded models, unless HF_HUB_CACHE names another. \
         Not set: huggingface in the user's folder of caches.",
    ),
    row(System, "HF_HUB_CACHE", "FOLDER", "The folder of downloaded models. Not set: hub in HF_HOME."),
    row(System, "HF_HUB_OFFLINE", "1", "Nothing is downloaded, as with --offline."),
    row(
        System,
        "HF_TOKEN",
        "TOKEN",
        "Gives access to models of the Hugging Face Hub. Not set: the file token in HF_HOME.",
    ),
    row(
        System,
        "SSL_CERT_FILE",
        "FILE",
        "The certificates, in PEM format, that are trusted in downloads. Not set: Mozilla's.",
    ),
    row(
        System,
        "XDG_CACHE_HOME",
        "FOLDER",
        "On Linux, the folder that contains Halcyon's folder of caches, and that of Hugging Face's programs. Not set: $HOME/.cache.",
    ),
    row(
        System,
        "XDG_CONFIG_HOME",
        "FOLDER",
        "On Linux, the folder that contains halcyon/config.toml. Not set: $HOME/.config.",
    ),
    row(
        System,
        "ORT_DYLIB_PATH",
        "PATH",
        "The library of ONNX Runtime, for --runtime ort and compare. Not set: the system's search, then the package onnxruntime of a Python.",
    ),
    row(System, "TPU_LIBRARY_PATH", "PATH", "Where libtpu.so is looked for first."),
    row(
        System,
        "VIRTUAL_ENV",
        "FOLDER",
        "A Python environment whose packages are searched for vendors' libraries.",
    ),
    row(
        Development,
        "HALCYON_REQUIRE_ALL",
        "1",
        "Tests fail, instead of being skipped, where a library or data is missing.",
    ),
    row(Development, "HALCYON_SEED", "N", "Repeats a test's random numbers: the seed that it printed."),
    row(
        Development,
        "HALCYON_ROW",
        "TEXT",
        "The op table's tests run only the rows whose names contain TEXT.",
    ),
    row(
        Development,
        "HALCYON_CASES",
        "all|N",
        "Tests that draw a share of their cases run all of them, or one in N.",
    ),
    row(
        Development,
        "HALCYON_TIER",
        "fast|merge|nightly",
        "The tier of the tests, set by cargo xtask test. Some tests use random inputs in the nightly tier only.",
    ),
    row(
        Development,
        "HALCYON_DEVICES",
        "NAME,NAME,...",
        "Tests that run on every device run on these backends only.",
    ),
    row(Development, "HALCYON_GRAPH", "SEED", "Repeats one random graph of the op table's tests."),
    row(Development, "HALCYON_GRAPHS", "N", "How many random graphs the tests of --verify draw."),
    row(Development, "HALCYON_FAILURES", "N", "How many failures of an op the op table's tests print."),
    row(
        Development,
        "HALCYON_MUTATIONS",
        "N",
        "Multiplies the number of mutated files that the tests of parsers draw.",
    ),
    row(Development, "HALCYON_KEEP", "FOLDER", "Where the tests of parsers keep files that show a bug."),
    row(Development, "HALCYON_CASE", "FILE", "Repeats the tests of parsers with one file."),
    row(
        Development,
        "HALCYON_EMULATED",
        "1",
        "Kernel tests leave out large sizes, for a processor that is emulated.",
    ),
    row(Development, "HALCYON_TESTDATA", "FOLDER", "Test data that was generated with Python."),
    row(Development, "HALCYON_MODELS", "FOLDER", "Models with known outputs, for tests."),
    row(Development, "HALCYON_MINILM", "FOLDER", "The sentence encoder, prepared for tests."),
    row(Development, "HALCYON_EXPORTED", "FOLDER", "Where tests of export leave their models."),
    row(Development, "HALCYON_SKIPS", "FILE", "Where tests write what they skipped."),
    row(Development, "HALCYON_BIN", "PATH", "The halcyon command, for the Python checks."),
    row(Development, "HALCYON_MNIST", "FOLDER", "mnist.onnx and its data, for cargo xtask bench."),
    row(Development, "HALCYON_RESNET50", "FILE", "ResNet-50, for cargo xtask bench start."),
    row(
        Development,
        "HALCYON_PEER_MODELS",
        "FOLDER",
        "Models that cargo xtask bench compares with other runtimes.",
    ),
    row(Development, "HALCYON_COMMIT", "HASH", "Set when halcyon-check is built: the commit it reports."),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::{Path, PathBuf};

    /// Not for users: set by a test or by one of Halcyon's processes for its own child process.
    const INTERNAL: [&str; 15] = [
        "HALCYON_C_LIBRARY",
        "HALCYON_C_SANITIZED",
        "HALCYON_CONTRACT_ALONE",
        "HALCYON_PROBE_CHILD",
        "HALCYON_PROXY_CORRUPT",
        "HALCYON_PROXY_COUNT",
        "HALCYON_S0_02",
        "HALCYON_S0_03",
        "HALCYON_S3_11",
        "HALCYON_S3_11_FILE",
        "HALCYON_TEST_DIR",
        "HALCYON_TEXT_MODELS",
        "HALCYON_LINKED_CHILD",
        "HALCYON_TUNE_FILE",
        "HALCYON_TUNE_JOB",
    ];

    fn sources(dir: &Path, to: &mut Vec<PathBuf>) {
        for e in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let (path, name) = (e.path(), e.file_name().to_string_lossy().into_owned());
            if path.is_dir() && name != "target" && name != "corpus" {
                sources(&path, to);
            } else if [".rs", ".py", ".sh", ".yml"].iter().any(|x| name.ends_with(x)) {
                to.push(path);
            }
        }
    }

    /// Variables that the sources name, each with a file that names it.
    fn named() -> BTreeMap<String, PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let (mut files, mut found) = (vec![], BTreeMap::new());
        for dir in [
            "crates",
            "xtask",
            "examples",
            "fuzz",
            "bindings/python",
            "bindings/c/check/tests",
            ".ci",
            ".github",
        ] {
            sources(&root.join(dir), &mut files);
        }
        assert!(files.len() > 100, "the sources are not there");
        for f in files.iter().filter(|f| !f.ends_with("halcyon-cli/src/environment.rs")) {
            let text = std::fs::read_to_string(f).expect("a source is text");
            for (i, _) in text.match_indices("HALCYON_") {
                let rest = &text[i..];
                let end = rest.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
                let name = &rest[..end.unwrap_or(rest.len())];
                // Excludes prefixes of variable names, which some drivers use.
                if !name.ends_with('_')
                    && !text[..i].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                {
                    found.entry(name.to_string()).or_insert_with(|| f.clone());
                }
            }
        }
        found
    }

    #[test]
    fn no_variable_is_listed_twice() {
        let names: BTreeSet<&str> = VARIABLES.iter().map(|v| v.name).collect();
        assert_eq!(names.len(), VARIABLES.len());
    }

    #[test]
    fn the_table_has_every_variable_of_the_sources_and_no_other() {
        let found = named();
        let known: BTreeSet<&str> = VARIABLES.iter().map(|v| v.name).chain(INTERNAL).collect();
        for (name, file) in &found {
            assert!(
                known.contains(name.as_str()),
                "{name} of {} has no row in environment.rs",
                file.display()
            );
        }
        for name in known.iter().filter(|n| n.starts_with("HALCYON_")) {
            assert!(found.contains_key(*name), "no source names {name}");
        }
    }
}
