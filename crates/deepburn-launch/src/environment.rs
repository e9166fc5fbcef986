//! Selects the environment variables of the ranks on all hosts.
//!
//! Ranks on this machine inherit the environment of `mpirun`. Ranks on other hosts get the
//! variables that their remote shell sets and the variables that are forwarded with `-x`. Variables
//! are forwarded by name, so that secret values do not appear on a command line.

use thiserror::Error;

/// Prefixes of forwarded variables.
const PREFIXES: [&str; 12] = [
    "CUDA_",
    "DEEPBURN_",
    "HF_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "RAYON_",
    "RUST_",
    "TORCH_",
    "UCX_",
    "VK_",
    "WGPU_",
];

/// Names of forwarded variables.
const NAMES: [&str; 10] = [
    "ALL_PROXY",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "LD_LIBRARY_PATH",
    "LIBTORCH",
    "NO_PROXY",
    "PATH",
    "XDG_CACHE_HOME",
    "http_proxy",
    "https_proxy",
];

/// The devices of a rank. The launcher sets this variable and ignores its own value.
pub(crate) const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// The time of the job's first start in seconds since 1970.
pub(crate) const STARTED: &str = "DEEPBURN_STARTED";
/// The number of restarts so far; unset before the first restart.
pub(crate) const RESTART: &str = "DEEPBURN_RESTART";

/// The reason why a variable cannot be forwarded.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ForwardError {
    /// The variable is not set, and no value was given.
    #[error(
        "-x: `{name}` is not set; a variable is given as NAME, which is set, or NAME=VALUE; set it or give a value"
    )]
    Unset {
        /// Name of the variable.
        name: String,
    },
    /// The argument is not a variable name.
    #[error("-x: bad variable: `{given}`; a variable is given as NAME or NAME=VALUE; correct it")]
    BadName {
        /// The argument.
        given: String,
    },
    /// The launcher sets this variable itself.
    #[error("-x: `{name}` is set by the launcher; {remedy}")]
    Reserved {
        /// Name of the variable.
        name: String,
        /// How to fix the problem.
        remedy: &'static str,
    },
}

/// Returns the variables to forward, as arguments of `mpirun -x`: the variables in `set` that ranks
/// read, and the variables that the user requested in `asked` as `NAME` or `NAME=VALUE`.
///
/// # Errors
/// Returns an error if a requested variable has an invalid name, is not set, or is set by the
/// launcher.
pub fn forwarded_variables(
    set: impl IntoIterator<Item = String>,
    asked: &[String],
) -> Result<Vec<String>, ForwardError> {
    let set: Vec<String> = set.into_iter().collect();
    let mut forwarded: Vec<String> = Vec::new();
    for given in asked {
        let name = given.split('=').next().unwrap_or_default();
        let valid = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        if name.is_empty() || !name.bytes().all(valid) {
            return Err(ForwardError::BadName { given: given.clone() });
        }
        if let Some(remedy) = reserved(name) {
            return Err(ForwardError::Reserved { name: name.to_owned(), remedy });
        }
        if !given.contains('=') && !set.iter().any(|other| other == name) {
            return Err(ForwardError::Unset { name: name.to_owned() });
        }
        forwarded.push(given.clone());
    }
    let names = forwarded.iter().map(|given| given.split('=').next().unwrap_or_default());
    let names: Vec<String> = names.map(str::to_owned).collect();
    let read = |name: &String| {
        let known = PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            || NAMES.contains(&name.as_str());
        known && reserved(name).is_none() && !names.contains(name)
    };
    forwarded.extend(set.into_iter().filter(read));
    forwarded.sort();
    Ok(forwarded)
}

/// If the launcher sets this variable itself, returns what the user should do instead.
fn reserved(name: &str) -> Option<&'static str> {
    match name {
        VISIBLE_DEVICES => Some("choose devices with --include HOST:0,1"),
        STARTED | RESTART => Some("leave it out"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn what_ranks_read_is_forwarded() {
        let set = names(&[
            "HOME",
            "RUST_LOG",
            "PATH",
            "HF_TOKEN",
            "CUDA_VISIBLE_DEVICES",
            "DEEPBURN_RESTART",
            "DEEPBURN_STARTED",
            "DEEPBURN_LAUNCHER",
            "NCCL_DEBUG",
            "AWS_SECRET_ACCESS_KEY",
        ]);
        assert_eq!(
            forwarded_variables(set, &[]),
            Ok(names(&["DEEPBURN_LAUNCHER", "HF_TOKEN", "NCCL_DEBUG", "PATH", "RUST_LOG"]))
        );
    }

    #[test]
    fn what_is_asked_for_comes_along_once() {
        let set = names(&["HOME", "RUST_LOG"]);
        let asked = names(&["HOME", "RUST_LOG=debug", "EMPTY="]);
        assert_eq!(
            forwarded_variables(set, &asked),
            Ok(names(&["EMPTY=", "HOME", "RUST_LOG=debug"]))
        );
    }

    #[test]
    fn what_cannot_be_forwarded_is_named() {
        let message = |given: &str| {
            forwarded_variables(names(&["HOME"]), &names(&[given])).unwrap_err().to_string()
        };
        assert!(message("NOWHERE").starts_with("-x: `NOWHERE` is not set;"));
        for given in ["", "=1", "A B", "A-B=1"] {
            assert!(message(given).starts_with(&format!("-x: bad variable: `{given}`;")));
        }
        for name in ["CUDA_VISIBLE_DEVICES", "DEEPBURN_STARTED=1", "DEEPBURN_RESTART"] {
            assert!(message(name).contains("is set by the launcher;"), "{name}");
        }
    }
}
