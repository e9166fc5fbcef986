//! What the processes of a job agree on before and after training: that all of them are ready.
//!
//! Where ranks are threads there is one process, and everything here is free.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use deepburn::Ranks;
use deepburn::comm::RankFailure;

use crate::failure::Failure;

/// Waits for the outcome of all processes. A failure of one is a failure of all; the first one that
/// failed says why.
///
/// # Errors
/// The failure of this process, or that another one has failed.
pub(crate) fn agree<T>(
    ranks: &Ranks,
    what: &'static str,
    outcome: Result<T, Failure>,
) -> Result<T, Failure> {
    let Some(placement) = ranks.placement() else { return outcome };
    // The exit status of a process that has failed; nothing of one that is ready.
    let status: Vec<u8> = outcome.as_ref().err().map(Failure::status).into_iter().collect();
    let statuses =
        ranks.gather_bytes(what, &status).map_err(|failure| shown_by_its_rank(ranks, failure))?;
    let first =
        statuses.iter().enumerate().find_map(|(rank, status)| Some((rank, *status.first()?)));
    match (first, outcome) {
        (None, outcome) => outcome,
        (Some((rank, _)), Err(failure)) if rank == placement.rank => Err(placed(ranks, failure)),
        (Some((_, status)), _) => Err(Failure::Elsewhere { status }),
    }
}

/// Prepares something on one rank of each host, then on the others, which find in the host's caches
/// what the first one downloaded.
///
/// # Errors
/// As [`agree`].
pub(crate) fn one_per_host_first<T>(
    ranks: &Ranks,
    prepare: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let leads = ranks.placement().is_none_or(|placement| placement.local_rank == 0);
    match leads {
        true => {
            let prepared = agree(ranks, "preparation of each host", prepare())?;
            agree(ranks, "preparation", Ok(prepared))
        }
        false => {
            agree(ranks, "preparation of each host", Ok(()))?;
            agree(ranks, "preparation", prepare())
        }
    }
}

/// Checks that all processes see the folder in which rank 0 writes.
///
/// # Errors
/// A user's mistake, with the host that does not see it.
pub(crate) fn check_shared(ranks: &Ranks, folder: &Path) -> Result<(), Failure> {
    let Some(placement) = ranks.placement() else { return Ok(()) };
    let probe = ranks.has_first().then(|| write_probe(folder)).transpose();
    let probe = agree(ranks, "probe of the output folder", probe)?;
    let name = probe.as_ref().and_then(|probe| probe.file_name()).unwrap_or_default();
    let names = ranks.gather_bytes("name of the probe", name.as_encoded_bytes());
    let names = names.map_err(|failure| shown_by_its_rank(ranks, failure))?;
    let name = String::from_utf8_lossy(&names[0]).into_owned();
    let seen = match folder.join(&name).exists() {
        true => Ok(()),
        false => Err(Failure::mistake(format!(
            "training.output_dir: {} is not the folder that rank 0 writes to{}; give a folder that all \
             hosts share, under the same path",
            folder.display(),
            ranks
                .host(placement.rank)
                .map(|host| format!(" (seen from {host})"))
                .unwrap_or_default()
        ))),
    };
    let agreed = agree(ranks, "output folder", seen);
    if let Some(probe) = probe {
        // All have looked; one that cannot be removed harms nothing.
        let _ = fs::remove_file(probe);
    }
    agreed
}

/// Writes an empty file of a name that no earlier run has used.
fn write_probe(folder: &Path) -> Result<PathBuf, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let probe = folder.join(format!(".shared-{}-{now}", std::process::id()));
    fs::write(&probe, b"").map_err(Failure::run)?;
    Ok(probe)
}

/// A failure of ranks: shown by the process of the rank that it names.
pub(crate) fn shown_by_its_rank<E: std::fmt::Display>(
    ranks: &Ranks,
    failure: RankFailure<E>,
) -> Failure {
    match ranks.placement() {
        Some(placement) if placement.rank != failure.rank => Failure::Elsewhere { status: 1 },
        _ => Failure::run(failure.to_string()),
    }
}

/// A failure of this process, with its rank and host where the reader cannot know them.
fn placed(ranks: &Ranks, failure: Failure) -> Failure {
    let Some(placement) = ranks.placement().filter(|placement| placement.rank != 0) else {
        return failure;
    };
    let host = ranks.host(placement.rank).unwrap_or_default();
    let at = |error: Box<dyn std::error::Error + Send + Sync>| {
        format!("rank {} on {host}: {error}", placement.rank).into()
    };
    match failure {
        Failure::Mistake(error) => Failure::Mistake(at(error)),
        Failure::Run(error) => Failure::Run(at(error)),
        other => other,
    }
}
