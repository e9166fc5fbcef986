//! The programs that show the metrics of a run, for `training.report_to`.
//!
//! Main type: [`Reporter`]. `report_to` is transformers' way of asking for a monitor, and a section
//! of the DeepSpeed configuration is DeepSpeed's. The former enables the latter, so that the rules
//! and the plan know only one of them.

use crate::choice::choices;

/// A program that shows the metrics of a run, and for which the run writes files. Its name is also
/// the name of its section in a DeepSpeed configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reporter {
    /// W&B, with an offline run.
    Wandb,
    /// TensorBoard, with event files.
    Tensorboard,
}

choices!(Reporter { "wandb" => Wandb, "tensorboard" => Tensorboard });

impl Reporter {
    /// Value of `report_to` for no program.
    pub(crate) const NONE: &'static str = "none";
}
