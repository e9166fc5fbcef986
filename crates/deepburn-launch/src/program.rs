//! The command that every rank runs.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use thiserror::Error;

/// The programs of DeepBurn, which are also looked up in the folder of the launcher.
const OWN: [&str; 2] = ["finetune", "deepburn"];

/// The reason why `mpirun` cannot run a command.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CommandError {
    /// There is no command.
    #[error(
        "no command to launch; give it after `--`, for example `deepburn launch --num_gpus 2 -- finetune --config gpt2.json`"
    )]
    Missing,
    /// `mpirun` would read the program as an option.
    #[error(
        "bad program: `{0}`; mpirun takes a leading `-` for an option of its own; give the path of a program"
    )]
    Option(String),
    /// `mpirun` would read the argument as the end of the command.
    #[error("bad argument: `:`; mpirun takes it for the end of the command; leave it out")]
    Colon,
}

/// Returns the command for the ranks. `finetune` and `deepburn` are looked up in the folder
/// `beside` if they are not on `path`, the value of `PATH`.
///
/// # Errors
/// Returns an error if there is no command, or if `mpirun` would misinterpret it.
pub fn training_command(
    command: &[String],
    beside: Option<&Path>,
    path: Option<&OsStr>,
) -> Result<Vec<String>, CommandError> {
    let (program, arguments) = command.split_first().ok_or(CommandError::Missing)?;
    if program.is_empty() {
        return Err(CommandError::Missing);
    }
    if program.starts_with('-') {
        return Err(CommandError::Option(program.clone()));
    }
    if command.iter().any(|word| word == ":") {
        return Err(CommandError::Colon);
    }
    let program = own_program(program, beside, path).unwrap_or_else(|| program.clone());
    Ok([&[program], arguments].concat())
}

/// Returns the path of one of DeepBurn's programs that is not on `path` but in the folder `beside`.
fn own_program(program: &str, beside: Option<&Path>, path: Option<&OsStr>) -> Option<String> {
    if !OWN.contains(&program) || is_program(program, path) {
        return None;
    }
    let file = beside?.join(program);
    is_executable(&file).then(|| file.to_str().map(str::to_owned)).flatten()
}

/// Returns true if `program` is the path of an executable file or the name of one on `path`.
pub(crate) fn is_program(program: &str, path: Option<&OsStr>) -> bool {
    if program.contains('/') {
        return is_executable(Path::new(program));
    }
    path.is_some_and(|path| {
        std::env::split_paths(path).any(|folder| is_executable(&folder.join(program)))
    })
}

/// Returns true if `file` is a regular file with an execute permission.
fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn own_programs_are_found_beside_the_launcher() {
        let (beside, path) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let make = |folder: &Path, mode| {
            let file = folder.join("finetune");
            fs::write(&file, "").unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            file.to_str().unwrap().to_owned()
        };
        let found = |program: &str| {
            let command = words(&[program, "job.yaml"]);
            training_command(&command, Some(beside.path()), Some(path.path().as_os_str())).unwrap()
        };
        assert_eq!(found("finetune"), ["finetune", "job.yaml"], "it is nowhere");
        let file = make(beside.path(), 0o644);
        assert_eq!(found("finetune"), ["finetune", "job.yaml"], "it is not a program");
        make(beside.path(), 0o755);
        assert_eq!(found("finetune"), [file.as_str(), "job.yaml"]);
        assert_eq!(found("./finetune"), ["./finetune", "job.yaml"], "a path stays");
        assert_eq!(found("train"), ["train", "job.yaml"], "so does another name");
        make(path.path(), 0o755);
        assert_eq!(found("finetune"), ["finetune", "job.yaml"], "it is on PATH");
    }

    #[test]
    fn what_mpirun_would_misread_is_refused() {
        let refused = |command: &[&str]| training_command(&words(command), None, None).unwrap_err();
        assert_eq!(refused(&[]), CommandError::Missing);
        assert_eq!(refused(&[""]), CommandError::Missing);
        assert_eq!(refused(&["-np", "2"]), CommandError::Option("-np".to_owned()));
        assert_eq!(refused(&["finetune", ":", "finetune"]), CommandError::Colon);
    }

    #[test]
    fn programs_are_found_by_name_or_path() {
        let path = OsStr::new("/nowhere:/bin");
        assert!(is_program("sh", Some(path)) && is_program("/bin/sh", None));
        for missing in ["no-such-program", "/bin/no-such-program", "/bin", "./sh"] {
            assert!(!is_program(missing, Some(path)), "{missing}");
        }
    }
}
