//! Checks of the output paths of monitors and profiles, before training starts.
//!
//! A run writes `metrics.jsonl`, `generated.jsonl`, `job.json`, `report.html`, `test.json`,
//! `model/` and `wandb/` to its output folder. Monitors may write to the same folder, but not to
//! these paths. For example, a TensorBoard folder called `model` would be replaced at the end of
//! the run.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf, absolute};

use deepburn_config::{MonitorPlan, WandbPlan};

use crate::failure::Failure;
use crate::job::made_folders::MadeFolders;
use crate::run::result_files::GENERATED;
use crate::whole_file::is_same_file;

/// Files and folders that the run itself writes to its output folder.
const OWN: [&str; 7] = [
    "metrics.jsonl",
    GENERATED,
    "job.json",
    "report.html",
    "test.json",
    "model",
    WandbPlan::FOLDER,
];

/// Refuses output paths that cannot be written to, that are the run's own files, or that would
/// overwrite the job file. Folders that the check creates are removed again.
///
/// # Errors
/// Returns a user's mistake that names the key of the path.
pub(crate) fn check_monitors(
    output: &Path,
    plan: &MonitorPlan,
    config: &Path,
) -> Result<(), Failure> {
    let folders = [
        ("deepspeed.tensorboard", plan.tensorboard.as_ref().map(|it| it.under(output))),
        ("deepspeed.csv_monitor", plan.csv.as_ref().map(|it| it.under(output))),
        ("deepspeed.profiling.output_folder", plan.profile.as_ref().map(|it| it.under(output))),
    ];
    for (key, folder) in folders {
        let Some(folder) = folder else { continue };
        check_free(key, &folder, output)?;
        check_folder(key, &folder)?;
    }
    if plan.wandb.is_some() {
        check_folder("deepspeed.wandb", &output.join(WandbPlan::FOLDER))?;
    }
    let file = plan.flops.as_ref().and_then(|flops| flops.output_file.as_ref());
    file.map_or(Ok(()), |file| check_file(file, output, config))
}

/// Refuses a path that is one of the run's own files or folders, or is inside one.
///
/// Links are not resolved. Names are compared case-sensitively.
fn check_free(key: &str, path: &Path, output: &Path) -> Result<(), Failure> {
    // Paths that do not exist yet cannot be canonicalized, so they are compared in absolute form.
    let whole = |path: &Path| absolute(path).unwrap_or_else(|_| path.to_owned());
    let path_whole = whole(path);
    let taken = OWN.iter().find(|name| path_whole.starts_with(whole(&output.join(name))));
    match taken {
        None => Ok(()),
        Some(name) => Err(Failure::mistake(format!(
            "{key}: {} is where the run writes its own {name}; give another path",
            path.display()
        ))),
    }
}

/// Refuses a folder that cannot be written to.
///
/// # Errors
/// Returns a user's mistake if the folder cannot be created or written to.
fn check_folder(key: &str, folder: &Path) -> Result<(), Failure> {
    MadeFolders::make_writable(folder).map(drop).map_err(|error| refused(key, folder, &error))
}

/// Refuses a file that cannot be written to. An existing file is opened for appending, so that it
/// stays unchanged.
///
/// # Errors
/// Returns a user's mistake if the file cannot be opened, or is the job file or one of the run's
/// own files.
fn check_file(file: &PathBuf, output: &Path, config: &Path) -> Result<(), Failure> {
    const KEY: &str = "deepspeed.flops_profiler.output_file";
    check_free(KEY, file, output)?;
    if is_same_file(file, config) {
        return Err(Failure::mistake(format!(
            "{KEY}: {} is the job file, which would be overwritten; give another path",
            file.display()
        )));
    }
    let folder = file.parent().unwrap_or(Path::new(""));
    // New folders are removed when the check ends.
    let _made = MadeFolders::make(folder).map_err(|error| refused(KEY, file, &error))?;
    // Permissions alone do not show whether a file can be written, so it is opened. A new file is
    // removed again.
    let existed = file.exists();
    OpenOptions::new()
        .append(true)
        .create(true)
        .open(file)
        .and_then(|_| if existed { Ok(()) } else { fs::remove_file(file) })
        .map_err(|error| refused(KEY, file, &error))
}

/// Returns the error of an unwritable path.
fn refused(key: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::mistake(format!(
        "{key}: {} cannot be written to ({error}); give a writable path",
        path.display()
    ))
}
