//! What is printed and measured.

use crate::key::{Asks, Key};

use crate::kind::{Integers, Kind};
use crate::plan::ReportPlan;
use crate::section::Section;

pub(crate) const STEPS_PER_PRINT: Key = Key::optional(
    "steps_per_print",
    Kind::Integer(Integers::POSITIVE),
    "Optimizer steps between two printed lines; none are printed without it.",
)
.unit("steps");

pub(crate) const WALL_CLOCK_BREAKDOWN: Key =
    Key::flag("wall_clock_breakdown", false, "Time forward, backward and step apart.");

pub(crate) const MEMORY_BREAKDOWN: Key =
    Key::flag("memory_breakdown", false, "Print the memory in use at every phase.").unavailable(
        "the printed memory breakdown",
        Asks::Differs,
        "set it to false; metrics.jsonl holds the memory by category of every step",
    );

pub(crate) const DUMP_STATE: Key =
    Key::flag("dump_state", false, "Print the resolved configuration.")
        .inert("job.json always holds the resolved configuration");

pub(crate) const LOG_LEVEL: Key =
    Key::optional("log_level", Kind::Text, "Level of DeepSpeed's own log.")
        .inert("the program that trains decides what is logged");

pub(crate) const TIMERS: Key = Key::section(
    "timers",
    &[Key::section(
        "throughput",
        &[
            Key::flag("enabled", true, "Measure throughput."),
            Key::flag("synchronized", true, "Wait for the device before the time is taken."),
        ],
        "The throughput timer.",
    )],
    "Timers.",
)
.inert("throughput is always measured");

pub(crate) const COMMS_LOGGER: Key = Key::section(
    "comms_logger",
    &[
        Key::flag("enabled", false, "Log collectives."),
        Key::flag("verbose", false, "Log each one as it happens."),
        Key::flag("prof_all", true, "Log all kinds."),
        Key::optional("prof_ops", Kind::List, "Kinds that are logged."),
        Key::flag("debug", false, "Name the caller."),
    ],
    "Log of collectives.",
)
.unavailable("the communication log", Asks::Enabled, "set comms_logger.enabled to false");

pub(crate) fn resolve(top: &Section<'_>) -> ReportPlan {
    ReportPlan {
        steps_per_print: top.optional_count(STEPS_PER_PRINT.name),
        wall_clock_breakdown: top.flag(WALL_CLOCK_BREAKDOWN.name),
    }
}
