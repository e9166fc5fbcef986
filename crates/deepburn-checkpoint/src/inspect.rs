//! A readable description of a checkpoint, which `deepburn inspect` prints.
//!
//! ```text
//! checkpoint  step-00000010 (PATH)
//! state       intact, every byte verified
//! job         NAME
//! step        10
//! stage       3, 2 ranks, BF16 ops            and the pipeline stages, if there are several
//! written     2026-01-02 03:04:05 UTC by deepburn X.Y.Z
//!
//! elements    N in M parameters, T trainable
//!   weights      SIZE
//!   exp_avg      SIZE
//!   in all       SIZE
//!
//! states of all ranks      one field a line
//! states of rank 0
//! files                    name, size, checksum
//! parameters               path, shape, arrays with their types
//! ```
//!
//! Values of tensors are not shown. Sizes are decimal: 1 MB is a million bytes.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use chrono::DateTime;
use serde_json::Value;

use crate::manifest::Manifest;
use crate::rank_file::rank_file_name;
use crate::{Checkpoint, EntryKind, ParamEntry, StateKind};

/// The longest path to which the list of parameters is aligned.
const WIDEST: usize = 60;
/// The longest value of a state that is shown, in bytes of JSON text.
///
/// Longer values, such as random streams, are replaced by their length.
const LONGEST: usize = 300;

impl Checkpoint {
    /// Verifies the checkpoint and describes its contents: run, sizes by kind, states, files,
    /// parameters.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        _ = self.describe_to(&mut text);
        text
    }

    /// Writes the description. A damaged checkpoint is described too, because its manifest is
    /// intact.
    fn describe_to(&self, text: &mut String) -> fmt::Result {
        let Manifest { writer, tag, run, layout, ranks, saved_at, .. } = &self.manifest;
        let state = match self.verify() {
            Ok(()) => "intact, every byte verified".to_owned(),
            Err(error) => format!("NOT INTACT: {error}"),
        };
        writeln!(text, "checkpoint  {tag} ({})", self.path().display())?;
        writeln!(text, "state       {state}")?;
        writeln!(text, "job         {}", run.job)?;
        writeln!(text, "step        {}", run.step)?;
        let plural = if ranks.len() == 1 { "" } else { "s" };
        let pipeline = match layout.stages() {
            1 => String::new(),
            stages => format!(" in {stages} pipeline stages"),
        };
        writeln!(
            text,
            "stage       {}, {} rank{plural}{pipeline}, {} ops",
            run.stage,
            ranks.len(),
            run.working
        )?;
        if let Some(metric) = run.metric {
            writeln!(text, "metric      {metric}")?;
        }
        writeln!(text, "written     {} by {writer}", date(*saved_at))?;
        self.describe_sizes(text)?;
        describe_state("states of all ranks", &run.state, text)?;
        for (rank, entry) in ranks.iter().enumerate() {
            describe_state(&format!("states of rank {rank}"), &entry.state, text)?;
        }

        writeln!(text, "\nfiles")?;
        for (rank, entry) in ranks.iter().enumerate() {
            let name = rank_file_name(rank);
            writeln!(text, "  {name}  {:>12}  blake3 {}", size(entry.length), entry.checksum)?;
        }
        writeln!(text, "\nparameters")?;
        let paths = layout.entries().iter().map(|entry| entry.path.len());
        let width = paths.max().unwrap_or(0).min(WIDEST);
        layout.entries().iter().try_for_each(|entry| describe_entry(entry, width, text))
    }

    /// Writes the number of elements, and the number of bytes of each kind of array, summed over
    /// all ranks without padding. Only checkpoints in the middle of a step contain gradients.
    fn describe_sizes(&self, text: &mut String) -> fmt::Result {
        let layout = self.layout();
        let mut sizes = BTreeMap::<&StateKind, u64>::new();
        let (mut count, mut all, mut trainable) = (0, 0, 0);
        let (mut buffers, mut in_buffers) = (0, 0);
        for (index, entry) in layout.entries().iter().enumerate() {
            let numel = layout.numel(index) as u64;
            match entry.kind {
                EntryKind::Parameter => (count, all) = (count + 1, all + numel),
                EntryKind::Buffer => (buffers, in_buffers) = (buffers + 1, in_buffers + numel),
            }
            trainable += if entry.trainable { numel } else { 0 };
            for stored in &entry.states {
                *sizes.entry(&stored.kind).or_default() += numel * stored.element.size() as u64;
            }
        }
        writeln!(text, "\nelements    {all} in {count} parameters, {trainable} trainable")?;
        if buffers > 0 {
            writeln!(text, "buffers     {in_buffers} elements in {buffers}")?;
        }
        let sizes_of_omitted = self.omitted().filter_map(|(entry, _)| entry.checked_numel());
        let omitted: usize = sizes_of_omitted.sum();
        if omitted > 0 {
            writeln!(text, "omitted     {omitted} elements, which the base model has")?;
        }
        for (kind, bytes) in &sizes {
            writeln!(text, "  {kind:<12} {:>12}", size(*bytes))?;
        }
        writeln!(text, "  {:<12} {:>12}", "in all", size(sizes.values().sum()))
    }
}

/// Writes the fields of a state, one per line; a long value is replaced by its length.
fn describe_state(title: &str, state: &Value, text: &mut String) -> fmt::Result {
    let Some(fields) = state.as_object() else { return Ok(()) };
    writeln!(text, "\n{title}")?;
    for (name, value) in fields {
        let value = value.to_string();
        match value.len() {
            0..=LONGEST => writeln!(text, "  {name:<18} {value}")?,
            len => writeln!(text, "  {name:<18} {len} bytes of JSON")?,
        }
    }
    Ok(())
}

/// Writes the line of one parameter or buffer: path, shape, stored arrays, and whether it is
/// frozen, a buffer or tied. `width` aligns the shapes.
fn describe_entry(entry: &ParamEntry, width: usize, text: &mut String) -> fmt::Result {
    let states = entry.states.iter().map(|stored| format!("{} {}", stored.kind, stored.element));
    let base = entry.base.iter();
    let base = base.map(|it| format!("in the base model, {}, blake3 {}", it.element, it.checksum));
    let states: Vec<_> = states.chain(base).collect();
    let frozen = match (entry.kind, entry.trainable) {
        // A buffer is never trained, so "frozen" would say nothing.
        (EntryKind::Buffer, _) => ", buffer",
        (EntryKind::Parameter, true) => "",
        (EntryKind::Parameter, false) => ", frozen",
    };
    let tied = match &entry.aliases[..] {
        [] => String::new(),
        aliases => format!(", tied to {}", aliases.join(", ")),
    };
    let stage = match entry.pipeline_stage {
        0 => String::new(),
        stage => format!(", pipeline stage {stage}"),
    };
    let (shape, states) = (format!("{:?}", entry.shape), states.join(", "));
    writeln!(text, "  {:<width$}  {shape:<14}  {states}{frozen}{tied}{stage}", entry.path)
}

/// Formats a number of bytes in the largest suitable decimal unit.
fn size(bytes: u64) -> String {
    let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.2} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

/// Formats seconds since 1970 as date and time.
fn date(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    match time {
        Some(time) => time.format("%Y-%m-%d %H:%M:%S UTC").to_string(),
        // The number is from a file, and may be beyond any calendar.
        None => format!("{seconds} seconds after 1970"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::tests::fixture::{TempRoot, layout, parameter, run, save_layout};
    use crate::{Layout, Run, Tag};

    #[test]
    fn the_description_is_complete() {
        let root = TempRoot::new();
        let folder = save_layout(&root, 10, &layout(2), Run { metric: Some(0.25), ..run(10) });
        let checkpoint = Checkpoint::open(&root, None).unwrap();
        assert_eq!(checkpoint.tag(), &Tag::of_step(10));
        let text = checkpoint.describe();
        for expected in [
            "checkpoint  step-00000010",
            "state       intact",
            "job         test job",
            "stage       2, 2 ranks, BF16 ops",
            "metric      0.25",
            "elements    16 in 3 parameters, 15 trainable",
            "weights              62 B",
            "gradient             54 B",
            "exp_avg              60 B",
            "in all              176 B",
            "rank-00001.safetensors",
            "a       [3, 4]          weights F32, exp_avg F32, gradient F32, tied to head",
            "frozen  [1]             weights BF16, frozen",
        ] {
            assert!(text.contains(expected), "{expected:?} is not in\n{text}");
        }
        std::fs::write(folder.join("rank-00001.safetensors"), "").unwrap();
        let text = Checkpoint::open(&root, None).unwrap().describe();
        assert!(text.contains("NOT INTACT") && text.contains("rank-00001.safetensors: damaged"));
    }

    #[test]
    fn pipeline_stages_are_described() {
        let root = TempRoot::new();
        let later = ParamEntry { pipeline_stage: 1, ..parameter("b", &[3]) };
        let layout = Layout::of_mesh(vec![parameter("a", &[2]), later], 4, 2, 1).unwrap();
        save_layout(&root, 10, &Arc::new(layout), run(10));
        let text = Checkpoint::open(&root, None).unwrap().describe();
        for expected in [
            "stage       2, 4 ranks in 2 pipeline stages, BF16 ops",
            "a  [2]             weights F32, exp_avg F32\n",
            "b  [3]             weights F32, exp_avg F32, pipeline stage 1\n",
        ] {
            assert!(text.contains(expected), "{expected:?} is not in\n{text}");
        }
    }

    /// From `date --utc --date=@SECONDS`.
    #[test]
    fn dates_follow_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_200, "2024-03-01 00:00:00 UTC"),
            (1_795_265_707, "2026-11-21 12:55:07 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
            (1_798_761_599, "2026-12-31 23:59:59 UTC"),
        ] {
            assert_eq!(date(seconds), expected);
        }
        date(u64::MAX);
    }

    #[test]
    fn sizes_are_in_units_of_a_thousand() {
        let found = [0, 999, 1000, 1_234_567, 1_500_000_000].map(size);
        assert_eq!(found, ["0 B", "999 B", "1.00 kB", "1.23 MB", "1.50 GB"]);
    }
}
