//! The outputs of a run for other programs.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// The outputs in addition to the metrics and the report; `None` is off.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct MonitorPlan {
    /// TensorBoard's event files.
    pub tensorboard: Option<MonitorFolder>,
    /// One CSV file per metric.
    pub csv: Option<MonitorFolder>,
    /// A W&B offline run.
    pub wandb: Option<WandbPlan>,
    /// A timeline of some steps.
    pub profile: Option<ProfilePlan>,
    /// The operations of one step.
    pub flops: Option<FlopsPlan>,
}

/// The output folder of a monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MonitorFolder {
    /// Parent folder, relative to the working directory; `None` for the job's output folder.
    pub output_path: Option<PathBuf>,
    /// Name of the run: one folder, never empty.
    pub job_name: String,
}

impl MonitorFolder {
    /// Returns the folder of the run, for a job that writes to `output_dir`.
    ///
    /// ```
    /// use std::path::Path;
    ///
    /// use deepburn_config::MonitorFolder;
    ///
    /// let own = MonitorFolder { output_path: None, job_name: "gpt2".into() };
    /// assert_eq!(own.under(Path::new("output")), Path::new("output/gpt2"));
    /// let shared = MonitorFolder { output_path: Some("runs".into()), ..own };
    /// assert_eq!(shared.under(Path::new("output")), Path::new("runs/gpt2"));
    /// ```
    pub fn under(&self, output_dir: &Path) -> PathBuf {
        self.output_path.as_deref().unwrap_or(output_dir).join(&self.job_name)
    }
}

/// A W&B offline run, which is always written to the job's output folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WandbPlan {
    /// Project of the run; never empty.
    pub project: String,
    /// Group of the run.
    pub group: Option<String>,
    /// Team of the run; `None` for the default of the account that uploads the run.
    pub team: Option<String>,
}

impl WandbPlan {
    /// Name of the folder in the job's output folder, with a folder for each start of a run.
    pub const FOLDER: &'static str = "wandb";
}

/// A timeline of some steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProfilePlan {
    /// First and last step of each window, from 1; at least one window.
    pub steps: Vec<RangeInclusive<u64>>,
    /// Output folder, relative to the working directory; `None` for a folder in the job's output
    /// folder.
    pub output_folder: Option<PathBuf>,
}

impl ProfilePlan {
    /// Returns the folder of the profile, for a job that writes to `output_dir`.
    pub fn under(&self, output_dir: &Path) -> PathBuf {
        self.output_folder.clone().unwrap_or_else(|| output_dir.join("profile"))
    }
}

/// The count of floating-point operations, and how it is printed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlopsPlan {
    /// Fraction of forward that is recomputed in backward.
    pub recompute_fwd_factor: f64,
    /// The step that is profiled, from 1.
    pub profile_step: u64,
    /// Depth to which the top modules are printed; `None` for all.
    pub module_depth: Option<usize>,
    /// Modules printed per depth.
    pub top_modules: usize,
    /// Whether the whole tree is printed.
    pub detailed: bool,
    /// Output file; `None` for the console.
    pub output_file: Option<PathBuf>,
    /// Peak performance of the device, in FLOP/s.
    pub peak_flops: Option<f64>,
}
