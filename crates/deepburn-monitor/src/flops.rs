//! Floating-point operations and parameters of a model by module, in the form of DeepSpeed's flops
//! profiler.
//!
//! Main type: [`FlopsProfile`], built from the counts for each module on one rank in one step.
//! Model FLOPs utilization (MFU) divides the operations of forward and backward, without
//! recomputation, by the operations that the device could have executed in the same time (Chowdhery
//! et al. 2022, appendix B). Hardware FLOPs utilization (HFU) includes recomputation.

mod tree;

use std::fmt::{self, Write};

use crate::html::percent;
use tree::ModuleNode;

/// The counts of one module, on one rank in one step. Operations of submodules are separate
/// entries.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModuleFlops {
    /// The dotted path, such as `transformer.h.0.attn`.
    pub path: String,
    /// The number of parameters of the module without its submodules.
    pub parameters: u64,
    /// The floating-point operations of the forward pass. A multiplication and an addition count as
    /// two.
    pub forward: u64,
    /// The floating-point operations of the backward pass.
    pub backward: u64,
}

/// The profiled step and the format of its report.
#[derive(Debug, Clone, PartialEq)]
pub struct FlopsOptions {
    /// The step, from 1.
    pub step: u64,
    /// The number of data-parallel ranks.
    pub ranks: usize,
    /// The wall-clock time of the step in seconds, if it was measured.
    pub step_seconds: Option<f64>,
    /// The peak rate of one rank's device in FLOP/s.
    pub peak_flops: Option<f64>,
    /// The fraction of the forward pass that backward recomputes.
    pub recompute_fwd_factor: f64,
    /// The depth to which the largest modules are printed; `None` prints all depths.
    pub module_depth: Option<usize>,
    /// The number of modules printed per depth.
    pub top_modules: usize,
    /// Whether the complete tree is printed.
    pub detailed: bool,
}

/// The sums over a module and its submodules.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct FlopsTotals {
    /// Parameters.
    pub parameters: u64,
    /// Operations of the forward pass.
    pub forward: u64,
    /// Operations of the backward pass.
    pub backward: u64,
}

/// The modules of a model with their counts.
#[derive(Debug, Clone)]
pub struct FlopsProfile {
    /// The model, with its modules as children.
    root: ModuleNode,
}

impl FlopsProfile {
    /// Builds the profile of the model `name`. Entries with the same path are added; an entry with
    /// an empty path belongs to the model itself.
    pub fn new(name: &str, entries: &[ModuleFlops]) -> Self {
        let mut root = ModuleNode::new(name);
        for entry in entries {
            let parts = entry.path.split('.').filter(|part| !part.is_empty());
            parts.fold(&mut root, ModuleNode::child).add(entry);
        }
        Self { root }
    }

    /// Returns the sums over the model.
    pub fn totals(&self) -> FlopsTotals {
        self.root.totals()
    }

    /// Returns the MFU, from 0 to 1; `None` without a measured time or a peak rate.
    pub fn model_flops_utilization(&self, options: &FlopsOptions) -> Option<f64> {
        let totals = self.totals();
        utilization(totals.forward as f64 + totals.backward as f64, options)
    }

    /// Returns the HFU, which includes recomputation.
    pub fn hardware_flops_utilization(&self, options: &FlopsOptions) -> Option<f64> {
        utilization(hardware_flops(self.totals(), options), options)
    }

    /// Prints the profile.
    ///
    /// # Errors
    /// Returns the error of `out`.
    pub fn write(&self, out: &mut impl Write, options: &FlopsOptions) -> fmt::Result {
        writeln!(out, "Floating-point operations of step {}, on rank 0", options.step)?;
        self.write_totals(out, options)?;
        self.write_top_modules(out, options)?;
        if options.detailed {
            self.write_tree(out)?;
        }
        Ok(())
    }

    /// Writes the sums over the model and the utilization. Lines whose inputs are unknown are
    /// omitted.
    fn write_totals(&self, out: &mut impl Write, options: &FlopsOptions) -> fmt::Result {
        let totals = self.totals();
        let all = hardware_flops(totals, options);
        let mut row = |name: &str, value: String| writeln!(out, "  {name:<34}{value}");
        row("ranks", options.ranks.to_string())?;
        row("parameters", quantity(totals.parameters as f64, ""))?;
        row("forward", quantity(totals.forward as f64, "FLOP"))?;
        row("backward", quantity(totals.backward as f64, "FLOP"))?;
        if options.recompute_fwd_factor > 0.0 {
            let again = options.recompute_fwd_factor * totals.forward as f64;
            row("forward, again in backward", quantity(again, "FLOP"))?;
        }
        row("step", quantity(all, "FLOP"))?;
        if let Some(seconds) = options.step_seconds {
            row("time of the step", duration(seconds))?;
            row("step a second", quantity(rate(all, seconds), "FLOP/s"))?;
        }
        if let Some(peak) = options.peak_flops {
            row("peak of the device, as stated", quantity(peak, "FLOP/s"))?;
        }
        if let Some(share) = self.model_flops_utilization(options) {
            row("model FLOPs utilization (MFU)", percent(share))?;
        }
        if let Some(share) = self.hardware_flops_utilization(options) {
            row("hardware FLOPs utilization (HFU)", percent(share))?;
        }
        Ok(())
    }

    /// Writes the largest modules of each depth, by parameters and by operations of forward.
    fn write_top_modules(&self, out: &mut impl Write, options: &FlopsOptions) -> fmt::Result {
        let levels = self.root.levels();
        // The root is always a level, so there is at least one.
        let last = options.module_depth.unwrap_or(usize::MAX).min(levels.len() - 1);
        writeln!(out, "\nLargest modules by depth, {} each", options.top_modules)?;
        for (depth, modules) in levels[..=last].iter().enumerate() {
            writeln!(out, "  depth {depth}")?;
            let mut top = |name: &str, size: fn(&FlopsTotals) -> f64, unit: &str| {
                write_top(out, name, modules, options.top_modules, size, unit)
            };
            top("parameters", |it| it.parameters as f64, "")?;
            top("forward", |it| it.forward as f64, "FLOP")?;
        }
        Ok(())
    }

    /// Writes every module with its share of the model. A module includes its submodules.
    fn write_tree(&self, out: &mut impl Write) -> fmt::Result {
        writeln!(out, "\nAll modules, with their share of the model")?;
        let whole = self.totals();
        self.root.visit(0, &mut |depth, name, totals| {
            write!(out, "{:width$}{name}: ", "", width = 2 * depth + 2)?;
            let parameters = quantity(totals.parameters as f64, "");
            let share = share(totals.parameters as f64, whole.parameters as f64);
            write!(out, "{parameters} parameters ({share})")?;
            let forward = quantity(totals.forward as f64, "FLOP");
            let part = self::share(totals.forward as f64, whole.forward as f64);
            writeln!(out, ", forward {forward} ({part})")
        })
    }
}

/// Writes the `count` largest `modules` by `size` in one line.
fn write_top(
    out: &mut impl Write,
    name: &str,
    modules: &[(String, FlopsTotals)],
    count: usize,
    size: impl Fn(&FlopsTotals) -> f64,
    unit: &str,
) -> fmt::Result {
    let mut sizes: Vec<_> = modules.iter().map(|(name, totals)| (name, size(totals))).collect();
    // A stable sort: modules of the same size stay in the order of the model.
    sizes.sort_by(|a, b| b.1.total_cmp(&a.1));
    let shown: Vec<_> = sizes
        .iter()
        .take(count)
        .map(|(name, size)| format!("{name} {}", quantity(*size, unit)))
        .collect();
    writeln!(out, "    {name:<18}{}", shown.join(", "))
}

/// Returns the operations that the device executes in a step, including recomputation.
fn hardware_flops(totals: FlopsTotals, options: &FlopsOptions) -> f64 {
    (1.0 + options.recompute_fwd_factor) * totals.forward as f64 + totals.backward as f64
}

/// Returns the utilization of the device in one step: `flops` divided by the operations that the
/// device could have executed in the same time. `None` without a time or a peak rate.
fn utilization(flops: f64, options: &FlopsOptions) -> Option<f64> {
    let (seconds, peak) = (options.step_seconds?, options.peak_flops?);
    (seconds > 0.0 && peak > 0.0).then(|| flops / seconds / peak)
}

/// Returns the operations per second; 0 if the time is 0.
fn rate(flops: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { flops / seconds } else { 0.0 }
}

/// Formats `part / whole` in per cent; 0 if `whole` is 0.
fn share(part: f64, whole: f64) -> String {
    percent(if whole > 0.0 { part / whole } else { 0.0 })
}

/// Formats a number with a decimal prefix: `124.44 M`, `1.5 TFLOP`.
fn quantity(value: f64, unit: &str) -> String {
    const PREFIXES: [(f64, &str); 5] =
        [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    // From the largest one, so that the first that fits is the right one.
    let prefix = PREFIXES.iter().find(|(size, _)| value.abs() >= *size);
    let (number, prefix) = match prefix {
        Some((size, prefix)) => (format!("{:.2}", value / size), *prefix),
        // Small counts are whole numbers.
        None if value.fract() == 0.0 => (format!("{value:.0}"), ""),
        None => (format!("{value:.2}"), ""),
    };
    format!("{number} {prefix}{unit}").trim_end().to_owned()
}

/// Formats a time in the largest unit (s, ms, us) in which it is at least 1, or else in us.
fn duration(seconds: f64) -> String {
    match seconds {
        _ if seconds >= 1.0 => format!("{seconds:.2} s"),
        _ if seconds >= 1e-3 => format!("{:.2} ms", 1e3 * seconds),
        _ => format!("{:.2} us", 1e6 * seconds),
    }
}

#[cfg(test)]
mod tests;
