//! The programs that show the metrics of a run, for `training.report_to`.
//!
//! Main type: [`Reporter`]. `report_to` is transformers' way of asking for a monitor, and a section
//! of the DeepSpeed configuration is DeepSpeed's. The former enables the latter, so that the rules
//! and the plan know only one of them.

use crate::choice::{Choice, choices};
use crate::node::{Node, Value};

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

    /// Enables the sections of the programs that `training.report_to` of the job file `job` names,
    /// in the DeepSpeed configuration `deepspeed`. Values of wrong types are left for the checks.
    pub(crate) fn enable_sections(job: &Node, deepspeed: &mut Node) {
        let Some(names) = job.get("training").and_then(|training| training.get("report_to")) else {
            return;
        };
        let names = names.as_list().unwrap_or(std::slice::from_ref(names));
        for reporter in names.iter().filter_map(Node::as_text).filter_map(Self::named) {
            reporter.enable_section(deepspeed);
        }
    }

    /// Sets the key `enabled` of the program's section.
    fn enable_section(self, deepspeed: &mut Node) {
        let Some(sections) = deepspeed.entries_mut() else { return };
        let index = sections.iter().position(|(name, _)| name == self.name());
        let index = index.unwrap_or_else(|| {
            sections.push((self.name().to_owned(), Node::map(Vec::new())));
            sections.len() - 1
        });
        let section = &mut sections[index].1;
        if section.is_null() || section.is_auto() {
            *section = Node::map(Vec::new());
        }
        let Some(keys) = section.entries_mut() else { return };
        // Also over `false`, because the job asks for this program.
        keys.retain(|(name, _)| name != "enabled");
        keys.push(("enabled".to_owned(), Node::new(Value::Flag(true))));
    }
}
