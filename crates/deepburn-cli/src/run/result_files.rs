//! The names of the files that a run writes to its output folder, beside models and checkpoints.

/// The file with the texts that the model generated after evaluations.
pub(crate) const GENERATED: &str = "generated.jsonl";

/// Files that a run writes from its start.
pub(crate) const REPLACED: [&str; 3] = ["metrics.jsonl", GENERATED, "job.json"];

/// Files that a run removes at its start and writes at its end.
pub(crate) const REMOVED: [&str; 2] = ["report.html", "test.json"];
