//! `cargo xtask docs`: writes the generated parts of `docs/onnx.md`.

use crate::Failure;
use crate::report::run;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// `docs [--report FILE]...`: FILE is the output of `check_suite.py --report` for one backend. Without
/// reports, the page's part about the suite is unchanged.
pub(crate) fn main(args: &[&str]) -> Result<bool, Failure> {
    let mut reports = vec![];
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match (*arg, args.next()) {
            ("--report", Some(file)) => reports.push(PathBuf::from(file)),
            ("--report", None) => return Err(Failure::Usage("--report needs a file".into())),
            (other, _) => return Err(Failure::Usage(format!("`docs` has no option `{other}`"))),
        }
    }
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(crate::root()).env("UPDATE_DOCS", "1");
    run(cargo.args(["test", "-q", "-p", "halcyon-formats", "--lib", "the_page_is_current"]))?;
    if reports.is_empty() {
        return Ok(true);
    }
    let read = |p: &PathBuf| -> Result<Value, String> {
        let text = std::fs::read_to_string(p).map_err(|e| format!("{}: {e}", p.display()))?;
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", p.display()))
    };
    let reports = reports.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let path = crate::root().join("docs/onnx.md");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let page = replace_part(&text, "suite", &suite(&reports)?)
        .ok_or("docs/onnx.md lacks `<!-- begin suite -->` or `<!-- end suite -->`".to_string())?;
    std::fs::write(&path, page).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(true)
}

/// The page's part about the suite: counts per kind of case and backend, then every case that did not pass,
/// grouped by reason.
fn suite(reports: &[Value]) -> Result<String, String> {
    let mut out = String::new();
    let mut figures = vec![];
    // Reason -> case -> backends.
    let mut open: BTreeMap<String, BTreeMap<String, Vec<String>>> = BTreeMap::new();
    let mut package = String::new();
    for r in reports {
        let backend = r["backend"].as_str().ok_or("a report names no backend")?;
        package = r["onnx"].as_str().unwrap_or("").into();
        for (kind, cases) in r["kinds"].as_object().ok_or("a report has no kinds")? {
            let cases = cases.as_object().ok_or("a kind of a report has no cases")?;
            let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
            for (name, case) in cases {
                let status = case["status"].as_str().unwrap_or("error");
                *counts.entry(status).or_default() += 1;
                if status != "passed" {
                    let reason = reason(status, case["reason"].as_str().unwrap_or(""));
                    let of = open.entry(reason).or_default().entry(format!("{kind}/{name}")).or_default();
                    of.push(backend.into());
                }
            }
            let n = |s: &str| counts.get(s).copied().unwrap_or(0);
            figures.push(format!(
                "| {kind} | {backend} | {} | {} ({:.1} %) | {} | {} | {} |\n",
                cases.len(),
                n("passed"),
                n("passed") as f64 * 100.0 / cases.len().max(1) as f64,
                n("wrong"),
                n("unsupported"),
                n("error")
            ));
        }
    }
    figures.sort();
    out += &format!(
        "The cases of the onnx package {package}. An independent script compares the saved results; the command sees no expectation.\n\n\
         | cases | backend | all | passed | wrong | unsupported | error |\n|---|---|---|---|---|---|---|\n"
    );
    out.extend(figures);
    if open.is_empty() {
        return Ok(out);
    }
    out += "\nWhat does not pass, by reason:\n\n";
    for (reason, cases) in open {
        let mut by: BTreeMap<Vec<String>, Vec<String>> = BTreeMap::new();
        for (case, mut on) in cases {
            on.sort();
            by.entry(on).or_default().push(format!("`{case}`"));
        }
        for (on, cases) in by {
            out += &format!("- **{}**: {reason}: {}\n", on.join(", "), cases.join(", "));
        }
    }
    Ok(out)
}

/// A reason without the parts specific to a case, such as names of nodes and files.
fn reason(status: &str, text: &str) -> String {
    let line = text.split('\n').rfind(|l| !l.trim().is_empty()).unwrap_or("").trim();
    let line = line.split(" (at ").next().unwrap_or(line).trim_end_matches('.');
    let line = line.strip_prefix("not supported yet: ").unwrap_or(line);
    let text = line.replace('|', "\\|").replace('<', "&lt;");
    if status == "unsupported" { text } else { format!("{status}: {text}") }
}

/// Replaces the text between `<!-- begin NAME … -->` and `<!-- end NAME -->` in the file.
fn replace_part(file: &str, name: &str, text: &str) -> Option<String> {
    let begin = file.find(&format!("<!-- begin {name}"))?;
    let start = begin + file[begin..].find("-->")? + 3;
    let end = start + file[start..].find(&format!("<!-- end {name} -->"))?;
    Some(format!("{}\n\n{}\n\n{}", &file[..start], text.trim(), &file[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_and_reasons() {
        let report = |backend: &str, status: &str| {
            json!({ "backend": backend, "onnx": "1.0", "kinds": { "node": {
                "test_a": { "status": "passed", "reason": "" },
                "test_b": { "status": status, "reason": "1 unsupported op:\n  Op (ai.onnx, opset 3) in n: no such operator" },
                "test_c": { "status": "unsupported", "reason": "not supported yet: this (at node7). Do that" },
            }}})
        };
        let text = suite(&[report("cpu", "unsupported"), report("opencl", "passed")]).unwrap();
        assert!(text.contains("| node | cpu | 3 | 1 (33.3 %) | 0 | 2 | 0 |"), "{text}");
        assert!(text.contains("| node | opencl | 3 | 2 (66.7 %) | 0 | 1 | 0 |"), "{text}");
        assert!(
            text.contains("- **cpu**: Op (ai.onnx, opset 3) in n: no such operator: `node/test_b`"),
            "{text}"
        );
        assert!(text.contains("- **cpu, opencl**: this: `node/test_c`"), "{text}");
        assert!(suite(&[json!({})]).is_err());
    }
}
