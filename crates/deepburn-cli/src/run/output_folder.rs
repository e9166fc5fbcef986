//! Checks and locks the output folder of a run.
//!
//! A run locks its folder from its first write to its end, so that two runs never mix their
//! results. The operating system releases the lock when the process exits, even if it is killed.
//!
//! When a run starts, it removes `report.html` and `test.json` of an earlier run, because they
//! could be mistaken for its own results. The earlier `model/` is kept until this run saves its
//! model, because training it again would take long.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;

use crate::failure::Failure;
use crate::job::made_folders::MadeFolders;
use crate::job::model_folder::ADAPTER;
use crate::run::forecast::readable;
use crate::run::preparation::Preparation;
use crate::run::result_files::{REMOVED, REPLACED};
use crate::whole_file::write_whole;

/// Files of models and adapters that a run writes.
const WEIGHTS: [&str; 6] = [
    "model/model.safetensors",
    "model/config.json",
    "model/deepburn.json",
    "model/tokenizer.json",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
];

/// Folders that a run makes.
const FOLDERS: [&str; 3] = ["model", "adapter", "checkpoints"];

/// Locks the output folder, writes `job.json`, and removes the report and the test result of an
/// earlier run.
///
/// The lock is held as long as the returned file is open. It is `None` on file systems without
/// locks.
///
/// # Errors
/// Returns a user's mistake if the folder cannot be used, or a failure while running if `job.json`
/// cannot be written or an old result cannot be removed.
pub(crate) fn open_output(preparation: &Preparation) -> Result<Option<File>, Failure> {
    let output = &preparation.job.training.output_dir;
    // First, because another run may be writing the files below.
    let lock = claim(output)?;
    let record = format!("{:#}", preparation.record);
    write_whole(&output.join("job.json"), &record).map_err(Failure::run)?;
    for name in REMOVED {
        remove_earlier(&output.join(name)).map_err(Failure::run)?;
    }
    // After the first writes, so that the folder exists and its file system can be asked.
    warn_of_full_disk(preparation);
    let has_adapter = preparation.subject.info().adapted().is_some();
    let saves_model = !has_adapter || preparation.job.training.saving.save_merged;
    for (name, is_saved) in [("model", saves_model), (ADAPTER, has_adapter)] {
        let path = output.join(name);
        match (path.exists(), is_saved) {
            (false, _) => {}
            (true, true) => {
                tracing::info!(
                    "{} is from an earlier run until this run saves its own",
                    path.display()
                );
            }
            (true, false) => tracing::warn!(
                "training.output_dir: {} is from an earlier run, and this run has none of its own; remove it, or give \
                 another folder",
                path.display()
            ),
        }
    }
    Ok(lock)
}

/// Removes a file of an earlier run, if it is there.
///
/// # Errors
/// Returns an error that names the path.
pub(crate) fn remove_earlier(path: &Path) -> Result<(), String> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(format!(
            "{} is from an earlier run and cannot be removed: {error}; remove it, or give another folder",
            path.display()
        )),
        _ => Ok(()),
    }
}

/// Warns if the disk has less free space than the trained model takes.
fn warn_of_full_disk(preparation: &Preparation) {
    let output = &preparation.job.training.output_dir;
    let info = preparation.subject.info();
    // An adapter alone is a small part of the model.
    let is_whole = info.adapted().is_none() || preparation.job.training.saving.save_merged;
    let saved = info.architecture().parameters().into_iter();
    let saved = saved.filter(|parameter| is_whole || !parameter.is_frozen);
    let parameters: usize = saved.map(|parameter| parameter.num_elements()).sum();
    let needed = parameters as u64 * size_of::<f32>() as u64;
    // Some file systems report a size of 0, because they do not know their size.
    let space = fs4::statvfs(output).ok().filter(|space| space.total_space() > 0);
    let free = space.map(|space| space.available_space());
    if let Some(warning) = free.and_then(|free| disk_warning(output, needed, free)) {
        tracing::warn!("{warning}");
    }
}

/// Returns the warning about a disk with less free space than the model takes, or `None` if it
/// fits.
///
/// Checkpoints are not counted, because a run whose checkpoint does not fit continues without it.
/// The space of an earlier model is not counted as free, because it is replaced only after the new
/// one has been written. This is not an error, because users can free space during a run of days.
fn disk_warning(output: &Path, needed: u64, free: u64) -> Option<String> {
    (free < needed).then(|| {
        format!(
            "training.output_dir: {} are free in {}, and the trained model takes {} without checkpoints; make room \
             before the run ends, or give another folder",
            readable(free),
            output.display(),
            readable(needed)
        )
    })
}

/// Checks that results can be written, and locks the folder. If the check fails, no folder is
/// created.
///
/// # Errors
/// Returns a user's mistake if the folder cannot be written to, if the path of a result exists with
/// another file type, or if another run has locked the folder.
fn claim(folder: &Path) -> Result<Option<File>, Failure> {
    let refused = |error: io::Error| {
        let no_folder = folder.ancestors().find(|path| path.exists() && !path.is_dir());
        let reason = match no_folder {
            Some(path) if path == folder => "is not a folder".to_owned(),
            Some(path) => format!("cannot be made, because {} is not a folder", path.display()),
            None => format!("cannot be written to ({error})"),
        };
        Failure::mistake(format!(
            "training.output_dir: {} {reason}; give a writable folder",
            folder.display()
        ))
    };
    let made = MadeFolders::make_writable(folder).map_err(refused)?;
    // A folder with the name of a result file would otherwise cause an error only at the end of the
    // run.
    let files = REPLACED.iter().chain(&REMOVED).chain(&WEIGHTS).map(|it| folder.join(it));
    let folders = files.filter(|it| it.is_dir());
    // A signal saves a checkpoint in every run, so the folder of checkpoints is always needed.
    let files = FOLDERS.map(|it| folder.join(it)).into_iter();
    let files = files.filter(|it| it.exists() && !it.is_dir());
    if let Some(path) = folders.chain(files).next() {
        return Err(Failure::mistake(format!(
            "training.output_dir: {} is in the way of the results; move it or give another folder",
            path.display()
        )));
    }
    let lock = match File::open(folder) {
        Ok(handle) => locked(folder, handle.try_lock())?.then_some(handle),
        // Not every system opens folders as files. Such a run has no lock.
        Err(_) => None,
    };
    // Until here, new folders are removed again when `made` is dropped.
    made.keep();
    Ok(lock)
}

/// Refuses a folder that another run has locked.
///
/// This check takes a shared lock, because all processes of a job check at the same time.
///
/// # Errors
/// Returns a user's mistake if another run has locked the folder.
pub(crate) fn refuse_running(folder: &Path) -> Result<(), Failure> {
    match File::open(folder) {
        Ok(handle) => locked(folder, handle.try_lock_shared()).map(drop),
        Err(_) => Ok(()),
    }
}

/// Returns whether the folder was locked. On file systems without locks, the run continues without
/// one.
///
/// # Errors
/// Returns a user's mistake if another run has locked the folder.
fn locked(folder: &Path, outcome: Result<(), TryLockError>) -> Result<bool, Failure> {
    match outcome {
        Err(TryLockError::WouldBlock) => Err(Failure::mistake(format!(
            "training.output_dir: another run is writing to {}; wait for it, or give another folder",
            folder.display()
        ))),
        outcome => Ok(outcome.is_ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_room_for_the_model_is_reported() {
        let output = Path::new("output/gpt2");
        assert_eq!(disk_warning(output, 498_000_000, 498_000_000), None);
        assert_eq!(
            disk_warning(output, 498_000_000, 3_000_000).unwrap(),
            "training.output_dir: 3.00 MB are free in output/gpt2, and the trained model takes 498 MB without \
             checkpoints; make room before the run ends, or give another folder"
        );
    }

    #[test]
    fn what_is_in_the_way_of_a_result_is_named() {
        let message = |make: &dyn Fn(&Path)| {
            let folder = tempfile::tempdir().unwrap();
            make(folder.path());
            claim(folder.path()).unwrap_err().to_string()
        };
        for name in REPLACED.iter().chain(&REMOVED).chain(&WEIGHTS) {
            let message = message(&|folder| fs::create_dir_all(folder.join(name)).unwrap());
            assert!(message.contains(&format!("{name} is in the way")), "{message}");
        }
        for name in FOLDERS {
            let message = message(&|folder| fs::write(folder.join(name), "").unwrap());
            assert!(message.contains(&format!("{name} is in the way")), "{message}");
        }
    }

    #[test]
    fn a_file_in_the_place_of_the_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("notes.txt");
        fs::write(&file, "kept").unwrap();
        for output in [file.clone(), file.join("run")] {
            let message = claim(&output).unwrap_err().to_string();
            assert!(message.contains("notes.txt"), "{message}");
            assert!(message.contains("is not a folder"), "{message}");
            assert!(message.contains(&format!("{}", output.display())), "{message}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    }
}
