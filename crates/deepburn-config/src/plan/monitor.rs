//! What a run leaves for other programs: part of the plan.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// What is written besides the record and the report; `None` is off.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct MonitorPlan {
    /// TensorBoard's event files.
    pub tensorboard: Option<MonitorFolder>,
    /// One CSV file a metric.
    pub csv: Option<MonitorFolder>,
    /// A timeline of some steps.
    pub profile: Option<ProfilePlan>,
    /// The operations of one step.
    pub flops: Option<FlopsPlan>,
}

/// Where a monitor writes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MonitorFolder {
    /// Folder of the folder, relative to the working directory; `None` is the job's own.
    pub output_path: Option<PathBuf>,
    /// Name of the run: one folder, never empty.
    pub job_name: String,
}

impl MonitorFolder {
    /// The folder of the run, for a job that writes to `output_dir`.
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

/// A timeline of some steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProfilePlan {
    /// First and last step of each window, from 1; at least one window.
    pub steps: Vec<RangeInclusive<u64>>,
    /// Where it is written, relative to the working directory; `None` is in the job's own folder.
    pub output_folder: Option<PathBuf>,
}

impl ProfilePlan {
    /// The folder of the profile, for a job that writes to `output_dir`.
    pub fn under(&self, output_dir: &Path) -> PathBuf {
        self.output_folder.clone().unwrap_or_else(|| output_dir.join("profile"))
    }
}

/// The count of floating-point operations, and how it is printed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlopsPlan {
    /// Part of forward that is computed again in backward.
    pub recompute_fwd_factor: f64,
    /// The step that is profiled, from 1.
    pub profile_step: u64,
    /// Depth to which the top modules are printed; `None` for all.
    pub module_depth: Option<usize>,
    /// Modules printed per depth.
    pub top_modules: usize,
    /// Whether the whole tree is printed.
    pub detailed: bool,
    /// File instead of the screen.
    pub output_file: Option<PathBuf>,
    /// Operations a second that the device can do at best, in FLOP/s.
    pub peak_flops: Option<f64>,
}
