//! The result of an optimisation, as data.

use halcyon_ir::error::one_line;
use halcyon_ir::passes::Level;
use halcyon_ir::plan::Receipt;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What an optimisation changed, and the measured effect.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizationResult {
    /// Whether the optimised model's results have the same shapes as the results at O0, and finite values in
    /// the same places. If not, the model stays at O0.
    pub success: bool,
    /// The requested level.
    pub level: Level,
    /// Names of the transformations that changed the executable.
    pub optimizations_applied: Vec<String>,
    /// The transformations of the level that changed nothing, each with the reason; the settings that had no
    /// effect; the warnings of the plan; and the outputs that cannot be compared with O0.
    pub warnings: Vec<String>,
    pub metrics: Metrics,
}

/// Measurements before (at O0) and after the optimisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Time of a run at O0 in milliseconds, with inputs and outputs on the device: the median.
    pub time_before_ms: f64,
    /// The same number at the level.
    pub time_after_ms: f64,
    /// Time before divided by time after: the median over pairs of measurements.
    pub speedup: f64,
    /// 95 % confidence interval of the speed-up.
    pub speedup_interval: [f64; 2],
    /// Bytes of device memory that a run at O0 needs, computed from the plan ([`crate::Fit::device`]).
    pub memory_before_bytes: u64,
    /// The same number at the level.
    pub memory_after_bytes: u64,
    /// Number of steps of the plan at O0.
    pub steps_before: usize,
    /// The same number at the level.
    pub steps_after: usize,
    /// Largest difference over all outputs, relative to the largest magnitude at O0; `None` if shapes differ,
    /// or finite values are not in the same places.
    pub error: Option<f64>,
    /// The differences of each output.
    pub outputs: Vec<OutputError>,
}

/// The difference of one output from O0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputError {
    pub name: String,
    /// Largest difference relative to the largest magnitude at O0; `None` if the shapes differ, or finite
    /// values are not in the same places.
    pub relative: Option<f64>,
    /// Largest difference relative to the standard deviation of the values at O0; `None` if `relative` is
    /// `None`, or the standard deviation is 0.
    pub deviations: Option<f64>,
}

/// The time of all steps of one kind in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpTime {
    /// The ops that the steps compute, such as `conv` or `matmul+add+relu`.
    pub op: String,
    /// Names of the kernels.
    pub kernel: String,
    /// Number of steps.
    pub steps: usize,
    /// The total time of these steps in one run, in milliseconds, measured by the device: the median over
    /// runs.
    pub time_ms: f64,
    pub flops: u64,
    pub bytes: u64,
}

/// The memory of one kind that a run needs ([`crate::Fit::parts`]), in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPart {
    pub name: String,
    pub before: u64,
    pub after: u64,
}

/// An [`OptimizationResult`] with the other facts that the HTML page shows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizationReport {
    /// The model's name.
    pub model: String,
    /// The device, such as `cpu:0`.
    pub device: String,
    pub device_name: String,
    #[serde(flatten)]
    pub result: OptimizationResult,
    /// The transformations that changed the executable at the level, with their gains if measured.
    pub receipts: Vec<Receipt>,
    pub memory: Vec<MemoryPart>,
    /// The slowest ops first; `None` if not measured.
    pub ops_before: Option<Vec<OpTime>>,
    pub ops_after: Option<Vec<OpTime>>,
    /// Why the times of ops could not be measured.
    pub no_ops: Option<String>,
}

/// A time as text, such as `1.23 ms` or `45.6 µs`.
pub(super) fn time(ms: f64) -> String {
    match ms {
        t if t >= 1000.0 => format!("{:.2} s", t / 1000.0),
        t if t >= 1.0 => format!("{t:.2} ms"),
        t => format!("{:.1} µs", t * 1000.0),
    }
}

/// A size as text, such as `12.3 MiB`.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut v, mut u) = (bytes as f64, 0);
    while v >= 1024.0 && u + 1 < UNITS.len() {
        v /= 1024.0;
        u += 1;
    }
    if u == 0 { format!("{bytes} B") } else { format!("{v:.1} {}", UNITS[u]) }
}

/// An error as text, such as `1.2e-6`. Without an error, the text says that the results cannot be compared.
pub(super) fn error(e: Option<f64>) -> String {
    e.map_or("not comparable".into(), |e| format!("{e:.1e}"))
}

impl fmt::Display for OptimizationResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = &self.metrics;
        let outcome = if self.success { "optimised" } else { "failed: the model stays at O0" };
        writeln!(f, "level    {}: {outcome}", self.level)?;
        let [low, high] = m.speedup_interval;
        writeln!(
            f,
            "time     {} -> {}, {:.2}x ({low:.2} to {high:.2})",
            time(m.time_before_ms),
            time(m.time_after_ms),
            m.speedup
        )?;
        writeln!(f, "memory   {} -> {}", size(m.memory_before_bytes), size(m.memory_after_bytes))?;
        writeln!(f, "steps    {} -> {}", m.steps_before, m.steps_after)?;
        writeln!(f, "error    {}", error(m.error))?;
        for o in &m.outputs {
            let deviations = o.deviations.map_or(String::new(), |d| format!(", {d:.1e} deviations"));
            writeln!(f, "  {}: {}{deviations}", one_line(&o.name), error(o.relative))?;
        }
        for a in &self.optimizations_applied {
            writeln!(f, "applied  {a}")?;
        }
        for w in &self.warnings {
            writeln!(f, "warning  {}", one_line(w))?;
        }
        Ok(())
    }
}

impl fmt::Display for OptimizationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "model    {}", one_line(&self.model))?;
        writeln!(f, "device   {} ({})", self.device, self.device_name)?;
        write!(f, "{}", self.result)?;
        for r in &self.receipts {
            let gain = r.gain.map_or("gain not measured".into(), |g| format!("{g:.3}x"));
            writeln!(f, "receipt  {} × {}: {gain}", r.count, r.transformation)?;
        }
        for (when, ops) in [("before", &self.ops_before), ("after", &self.ops_after)] {
            for o in ops.iter().flatten() {
                writeln!(f, "{when:8} {:>9}  {} × {}", time(o.time_ms), o.steps, one_line(&o.op))?;
            }
        }
        match &self.no_ops {
            Some(why) => writeln!(f, "there are no times of ops: {why}"),
            None => Ok(()),
        }
    }
}
