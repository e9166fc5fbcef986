//! Errors in the environment of a launcher.

use super::Launcher;

/// The reason why the environment does not define the rank of this process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// A variable has a value that no launcher sets.
    #[error(
        "{name} is `{value}`, but {rule}; launchers set this variable: unset it and start the job \
         again, or set DEEPBURN_LAUNCHER=none to run all ranks in this process"
    )]
    Malformed {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// The rule that the value violates.
        rule: String,
    },

    /// Only some variables of a launcher are set.
    #[error(
        "{name} is not set, but {present} is `{value}`; {launcher} sets both: start the job with a \
         launcher that is supported (Open MPI, MPICH, Intel MPI, srun), or set DEEPBURN_LAUNCHER=none \
         to run all ranks in this process"
    )]
    Missing {
        /// The variable that is not set.
        name: &'static str,
        /// A variable of the same launcher that is set.
        present: &'static str,
        /// Its value.
        value: String,
        /// The launcher that sets both.
        launcher: Launcher,
    },

    /// Two launchers report different ranks or numbers of ranks.
    #[error("{name} is {value}, but {other_name} is {other_value}; both must be equal: {remedy}")]
    Contradiction {
        /// A variable of the first launcher.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The equivalent variable of the second launcher.
        other_name: &'static str,
        /// Its value.
        other_value: usize,
        /// How to fix the problem.
        remedy: &'static str,
    },

    /// torchrun or a PyTorch job operator started this process as one of several.
    #[error(
        "RANK is {rank} and WORLD_SIZE is {world_size}: this process was started by torchrun or for \
         PyTorch, and its processes cannot find each other; start the job with mpirun or `deepburn \
         launch`, or set DEEPBURN_LAUNCHER=none to run all ranks in this process"
    )]
    Torch {
        /// The value of RANK.
        rank: usize,
        /// The value of WORLD_SIZE.
        world_size: usize,
    },

    /// The value of `DEEPBURN_LAUNCHER` is unknown.
    #[error(
        "DEEPBURN_LAUNCHER is `{value}`; allowed are none, mpi and slurm: unset it to detect the launcher"
    )]
    UnknownOverride {
        /// Its value.
        value: String,
    },

    /// `DEEPBURN_LAUNCHER` names a launcher that did not start this process.
    #[error(
        "DEEPBURN_LAUNCHER is {value}, which needs {names}, and that is not set; start the job with \
         {}, or unset DEEPBURN_LAUNCHER",
        if value == "mpi" { "mpirun" } else { "srun" }
    )]
    NotStarted {
        /// Its value.
        value: String,
        /// The variables that it needs.
        names: &'static str,
    },
}
