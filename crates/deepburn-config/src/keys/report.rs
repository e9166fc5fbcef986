//! What is printed, measured and sent to monitors.

use crate::key::{Asks, Key, Literal};

use crate::kind::{Integers, Kind, Reals};
use crate::plan::ReportPlan;
use crate::section::Section;

const METRICS: &str = "set it to false; metrics.jsonl and report.html hold every step's numbers";

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

/// The section that one published guide writes; no DeepSpeed version reads it.
pub(crate) const PROFILING: Key = Key::section(
    "profiling",
    &[
        Key::flag("enabled", false, "Profile some steps."),
        Key::optional("profile_steps", Kind::List, "Steps that are profiled."),
        Key::optional("output_folder", Kind::Text, "Where the profile is written."),
    ],
    "Profile of single steps. No DeepSpeed version reads this section.",
)
.unavailable("the step profiler", Asks::Enabled, "set profiling.enabled to false");

pub(crate) const FLOPS_PROFILER: Key = Key::section(
    "flops_profiler",
    &[
        Key::flag("enabled", false, "Count operations of one step."),
        Key::real(
            "recompute_fwd_factor",
            Reals::NotNegative,
            0.0,
            "Part of forward that is computed again in backward.",
        ),
        Key::positive("profile_step", 1, "The step that is profiled."),
        Key::new(
            "module_depth",
            Kind::Integer(Integers::ANY),
            Literal::Integer(-1),
            "Depth of the printed module tree; -1 for all.",
        ),
        Key::positive("top_modules", 1, "Modules printed per depth."),
        Key::flag("detailed", true, "Print the whole tree."),
        Key::optional("output_file", Kind::Text, "File instead of the screen."),
    ],
    "Count of floating-point operations.",
)
.unavailable("the flops profiler", Asks::Enabled, "set flops_profiler.enabled to false");

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

const OUTPUT_PATH: Key =
    Key::new("output_path", Kind::Text, Literal::Text(""), "Folder of the output.");
const JOB_NAME: Key =
    Key::new("job_name", Kind::Text, Literal::Text("DeepSpeedJobName"), "Name of the run.");

pub(crate) const TENSORBOARD: Key = Key::section(
    "tensorboard",
    &[Key::flag("enabled", false, "Write TensorBoard events."), OUTPUT_PATH, JOB_NAME],
    "TensorBoard monitor.",
)
.unavailable("the TensorBoard monitor", Asks::Enabled, METRICS);

pub(crate) const CSV_MONITOR: Key = Key::section(
    "csv_monitor",
    &[Key::flag("enabled", false, "Write one CSV file a metric."), OUTPUT_PATH, JOB_NAME],
    "CSV monitor.",
)
.unavailable("the CSV monitor", Asks::Enabled, METRICS);

pub(crate) const WANDB: Key = Key::section(
    "wandb",
    &[
        Key::flag("enabled", false, "Send metrics to Weights & Biases."),
        Key::optional("group", Kind::Text, "Group of the run."),
        Key::optional("team", Kind::Text, "Team of the run."),
        Key::new("project", Kind::Text, Literal::Text("deepspeed"), "Project of the run."),
    ],
    "Weights & Biases monitor.",
)
.unavailable("the Weights & Biases monitor", Asks::Enabled, METRICS);

pub(crate) const COMET: Key = Key::section(
    "comet",
    &[
        Key::flag("enabled", false, "Send metrics to Comet."),
        Key::positive("samples_log_interval", 100, "Samples between two messages.").unit("samples"),
        Key::optional("project", Kind::Text, "Project of the run."),
        Key::optional("workspace", Kind::Text, "Workspace of the project."),
        Key::optional("api_key", Kind::Text, "Key of the account."),
        Key::optional("experiment_name", Kind::Text, "Name of the run."),
        Key::optional("experiment_key", Kind::Text, "Identity of a run to go on with."),
        Key::optional("online", Kind::Flag, "Send at once rather than keep for later."),
        Key::optional("mode", Kind::Text, "Whether to create a run or go on with one."),
    ],
    "Comet monitor.",
)
.unavailable("the Comet monitor", Asks::Enabled, METRICS);

pub(crate) fn resolve(top: &Section<'_>) -> ReportPlan {
    ReportPlan {
        steps_per_print: top.optional_count(STEPS_PER_PRINT.name),
        wall_clock_breakdown: top.flag(WALL_CLOCK_BREAKDOWN.name),
    }
}
