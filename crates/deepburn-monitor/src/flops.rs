//! Operations and parameters of a model by module, as DeepSpeed's flops profiler tells them.
//!
//! Main type: [`FlopsProfile`], made of what was counted for each module of one rank in one step. It
//! only adds up and prints. Model FLOPs utilization is what forward and backward need, without what
//! is computed again, over what the device could have done in the time (Chowdhery et al. 2022,
//! appendix B). Hardware FLOPs utilization counts what is computed again too.

mod tree;

use std::fmt::{self, Write};

use tree::Node;

/// What was counted for one module, of one rank and one step. Operations are those of the module
/// itself: what belongs to a module inside of it is an entry of that one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModuleFlops {
    /// Parts with dots between them, `transformer.h.0.attn` for example.
    pub path: String,
    /// Parameters of its own.
    pub parameters: u64,
    /// Floating-point operations of its forward pass; a multiplication and an addition are two.
    pub forward: u64,
    /// Those of its backward pass.
    pub backward: u64,
}

/// The step that was profiled, and how it is told.
#[derive(Debug, Clone, PartialEq)]
pub struct FlopsOptions {
    /// The step, from 1.
    pub step: u64,
    /// Data-parallel ranks.
    pub ranks: usize,
    /// Wall-clock seconds of the step, where they were measured.
    pub step_seconds: Option<f64>,
    /// Operations a second that the device of one rank can do at best, in FLOP/s.
    pub peak_flops: Option<f64>,
    /// Part of forward that is computed again in backward.
    pub recompute_fwd_factor: f64,
    /// Depth to which the top modules are printed; `None` for all.
    pub module_depth: Option<usize>,
    /// Modules printed per depth.
    pub top_modules: usize,
    /// Whether the whole tree is printed.
    pub detailed: bool,
}

/// What a module and all inside of it add up to.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct FlopsTotals {
    /// Parameters.
    pub parameters: u64,
    /// Operations of the forward pass.
    pub forward: u64,
    /// Operations of the backward pass.
    pub backward: u64,
}

/// The modules of a model with what each does.
#[derive(Debug, Clone)]
pub struct FlopsProfile {
    root: Node,
}

impl FlopsProfile {
    /// The profile of the model called `name`. Entries of the same path add up; an entry whose path
    /// is empty belongs to the model itself.
    pub fn new(name: &str, entries: &[ModuleFlops]) -> Self {
        let mut root = Node::new(name);
        for entry in entries {
            let parts = entry.path.split('.').filter(|part| !part.is_empty());
            parts.fold(&mut root, Node::child).add(entry);
        }
        Self { root }
    }

    /// What the whole model adds up to.
    pub fn totals(&self) -> FlopsTotals {
        self.root.totals()
    }

    /// Share of the device's best that the model itself reached, from 0 to 1; `None` without a
    /// measured time or a stated peak.
    pub fn model_flops_utilization(&self, options: &FlopsOptions) -> Option<f64> {
        let totals = self.totals();
        utilization(totals.forward as f64 + totals.backward as f64, options)
    }

    /// The same with what is computed again.
    pub fn hardware_flops_utilization(&self, options: &FlopsOptions) -> Option<f64> {
        utilization(hardware_flops(self.totals(), options), options)
    }

    /// Prints the profile.
    ///
    /// # Errors
    /// When `out` fails.
    pub fn write(&self, out: &mut impl Write, options: &FlopsOptions) -> fmt::Result {
        writeln!(out, "Floating-point operations of step {}, on rank 0", options.step)?;
        self.write_totals(out, options)?;
        self.write_top_modules(out, options)?;
        if options.detailed {
            self.write_tree(out)?;
        }
        Ok(())
    }

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

    fn write_top_modules(&self, out: &mut impl Write, options: &FlopsOptions) -> fmt::Result {
        let levels = self.root.levels();
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

fn write_top(
    out: &mut impl Write,
    name: &str,
    modules: &[(String, FlopsTotals)],
    count: usize,
    size: impl Fn(&FlopsTotals) -> f64,
    unit: &str,
) -> fmt::Result {
    let mut sizes: Vec<_> = modules.iter().map(|(name, totals)| (name, size(totals))).collect();
    sizes.sort_by(|a, b| b.1.total_cmp(&a.1));
    let shown: Vec<_> = sizes
        .iter()
        .take(count)
        .map(|(name, size)| format!("{name} {}", quantity(*size, unit)))
        .collect();
    writeln!(out, "    {name:<18}{}", shown.join(", "))
}

/// Operations that the device does in a step.
fn hardware_flops(totals: FlopsTotals, options: &FlopsOptions) -> f64 {
    (1.0 + options.recompute_fwd_factor) * totals.forward as f64 + totals.backward as f64
}

fn utilization(flops: f64, options: &FlopsOptions) -> Option<f64> {
    let (seconds, peak) = (options.step_seconds?, options.peak_flops?);
    (seconds > 0.0 && peak > 0.0).then(|| flops / seconds / peak)
}

fn rate(flops: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { flops / seconds } else { 0.0 }
}

fn share(part: f64, whole: f64) -> String {
    percent(if whole > 0.0 { part / whole } else { 0.0 })
}

fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

/// A number with a decimal prefix: `124.44 M`, `1.5 TFLOP`.
fn quantity(value: f64, unit: &str) -> String {
    const PREFIXES: [(f64, &str); 5] =
        [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let prefix = PREFIXES.iter().find(|(size, _)| value.abs() >= *size);
    let (number, prefix) = match prefix {
        Some((size, prefix)) => (format!("{:.2}", value / size), *prefix),
        None if value.fract() == 0.0 => (format!("{value:.0}"), ""),
        None => (format!("{value:.2}"), ""),
    };
    format!("{number} {prefix}{unit}").trim_end().to_owned()
}

fn duration(seconds: f64) -> String {
    match seconds {
        _ if seconds >= 1.0 => format!("{seconds:.2} s"),
        _ if seconds >= 1e-3 => format!("{:.2} ms", 1e3 * seconds),
        _ => format!("{:.2} us", 1e6 * seconds),
    }
}

#[cfg(test)]
mod tests;
