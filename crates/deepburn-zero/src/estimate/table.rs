//! The table output of an [`Estimate`].
//!
//! It has one row per quantity, in binary units. Rows that are 0 in most runs
//! (module buffers, directions, offloaded states) are printed only if they are
//! not 0. The rows of a training pass are printed only if the activations are
//! known.

use std::fmt;

use super::Estimate;

/// The label of the row for the temporary buffers of an optimizer step.
const DIRECTIONS: &str = "optimizer directions, at most";

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks =
            if self.ranks == 1 { "1 rank".to_owned() } else { format!("{} ranks", self.ranks) };
        writeln!(f, "ZeRO stage {}, {ranks}, per rank", self.stage.number())?;
        let mut rows = vec![
            ("parameters", self.states.parameters),
            ("gradients", self.states.gradients),
            ("optimizer states", self.states.optimizer),
            ("model states", self.states.total()),
            ("module buffers", self.module_buffers),
            ("gradient buckets, at most", self.buffers.buckets),
            (DIRECTIONS, self.buffers.directions),
            ("largest gathered parameter", self.buffers.largest_gathered),
            ("gathered parameters, at most", self.buffers.gathered_limit),
            ("all, at most (no activations)", self.peak()),
            ("while sharding, at most", self.starting),
            ("model states, on the host", self.host),
            ("model states, on NVMe", self.disk),
        ];
        if let Some(pass) = self.pass {
            let kept = self.states.parameters.saturating_add(self.states.optimizer);
            // The peak of the pass includes gradients, buckets and gathered
            // parameters, so only parameters, optimizer states and module
            // buffers are added.
            let all = kept.saturating_add(self.module_buffers).saturating_add(pass.device);
            rows.push(("activations, at most", pass.activations));
            rows.push(("a training pass, at most", all));
        }
        let optional =
            ["module buffers", DIRECTIONS, "model states, on the host", "model states, on NVMe"];
        rows.retain(|(what, bytes)| *bytes > 0 || !optional.contains(what));
        for (what, bytes) in rows {
            writeln!(f, "  {what:<30} {:>12}", Bytes(bytes).to_string())?;
        }
        Ok(())
    }
}

/// A number of bytes, printed in binary units with two decimals.
///
/// Values below 1 KiB are printed in bytes. The largest unit is PiB, so larger
/// values have more digits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bytes(pub(super) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut amount = self.0 as f64 / 1024.0;
        let mut unit = UNITS[0];
        // Selects the largest unit in which the number is at least 1.
        for larger in &UNITS[1..] {
            if amount < 1024.0 {
                break;
            }
            amount /= 1024.0;
            unit = larger;
        }
        write!(f, "{amount:.2} {unit}")
    }
}
