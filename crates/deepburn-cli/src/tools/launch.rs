//! `deepburn launch`: the command line of `deepburn-launch`.
//!
//! The launcher is implemented in the crate `deepburn-launch`. This module parses the options of
//! DeepSpeed's launcher: `--include`, `--exclude`, `--num_nodes` and `--num_gpus` have the same
//! meaning, and for unsupported options the error names an alternative. `--dry-run` prints the
//! command line of mpirun.
//!
//! With `--autotuning`, the configuration of the job is searched for first ([`tune`]), on rank
//! threads of this process.
//!
//! A restart (`--max-restarts`) repeats the whole job. Ranks resume from the newest checkpoint of
//! the launch ([`resume`](crate::run::resume)).

use std::env;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Parser, ValueEnum};
use deepburn_launch::{
    HostSlots, JobEnd, Launch, LaunchError, Mpirun, Selection, forwarded_variables, quoted,
    read_hostfile, this_machine, training_command,
};

use crate::console;
use crate::failure::Failure;
use crate::run::finetune;
use crate::tools::tune::tune;

/// Options of `deepburn launch`.
#[derive(Debug, Args)]
pub(crate) struct LaunchArguments {
    #[command(flatten)]
    hosts: HostArguments,
    /// Restart a failed job up to N times.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    max_restarts: u32,
    /// Seconds for ranks to save and stop after SIGTERM or SIGINT.
    #[arg(long, value_name = "SECONDS", default_value_t = 120, allow_negative_numbers = true)]
    grace_seconds: u32,
    /// Seconds for remote hosts to answer before the job starts.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, allow_negative_numbers = true)]
    connect_timeout: u32,
    /// Remote shell, with arguments separated by spaces.
    #[arg(long, value_name = "AGENT", default_value = "ssh", allow_hyphen_values = true)]
    remote_shell: String,
    /// Name or path of Open MPI's mpirun.
    #[arg(long, value_name = "PATH", default_value = "mpirun")]
    mpirun: String,
    /// Forward another environment variable to ranks on remote hosts; repeatable.
    #[arg(short = 'x', value_name = "NAME[=VALUE]")]
    forward: Vec<String>,
    /// Find the fastest configuration of the job first, as `deepburn tune` does: `tune` stops after
    /// it, `run` trains with it.
    #[arg(long, value_name = "MODE", conflicts_with = "dry_run")]
    autotuning: Option<Autotuning>,
    /// Print the command line of mpirun without running it.
    #[arg(long)]
    dry_run: bool,
    /// Program of every rank and its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
    #[command(flatten)]
    unsupported: Unsupported,
}

/// Options that select hosts and their slots.
#[derive(Debug, Args)]
struct HostArguments {
    /// Hostfile with a line `HOST slots=N` for each host [default: this machine alone].
    #[arg(short = 'H', long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Use only these hosts and slots: `HOST[:SLOT,...][@HOST...]`.
    #[arg(short, long, value_name = "LIST")]
    include: Option<String>,
    /// Use all hosts and slots except these: `HOST[:SLOT,...][@HOST...]`.
    #[arg(short, long, value_name = "LIST")]
    exclude: Option<String>,
    /// Use the first N hosts of the hostfile.
    #[arg(
        long = "num_nodes",
        alias = "num-nodes",
        value_name = "N",
        allow_negative_numbers = true
    )]
    num_nodes: Option<usize>,
    /// Ranks per host, on its devices 0 to N - 1 [default: one per slot; without a hostfile one per
    /// NVIDIA GPU, or 1].
    #[arg(
        long = "num_gpus",
        aliases = ["num-gpus", "num_accelerators"],
        value_name = "N",
        allow_negative_numbers = true
    )]
    num_gpus: Option<usize>,
}

/// What happens after a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Autotuning {
    /// Nothing.
    Tune,
    /// The job is launched with the best configuration.
    Run,
}

/// Options of DeepSpeed's launcher that are not supported. They are parsed so that the error can
/// name an alternative.
#[derive(Debug, Args)]
struct Unsupported {
    #[arg(long = "master_addr", alias = "master-addr", hide = true)]
    master_addr: Option<String>,
    #[arg(long = "master_port", alias = "master-port", hide = true)]
    master_port: Option<String>,
    #[arg(long, hide = true)]
    launcher: Option<String>,
    #[arg(
        long = "launcher_args",
        alias = "launcher-args",
        hide = true,
        allow_hyphen_values = true
    )]
    launcher_args: Option<String>,
    #[arg(long = "ssh_port", alias = "ssh-port", hide = true)]
    ssh_port: Option<String>,
}

impl Unsupported {
    /// Refuses the first option that was given.
    ///
    /// # Errors
    /// Returns a user's mistake that names the alternative.
    fn refuse(&self) -> Result<(), Failure> {
        let rendezvous = "mpirun connects the ranks; leave it out";
        let options = [
            ("--master_addr", &self.master_addr, rendezvous),
            ("--master_port", &self.master_port, rendezvous),
            ("--launcher", &self.launcher, "jobs start with Open MPI's mpirun; leave it out"),
            ("--launcher_args", &self.launcher_args, "set OMPI_MCA_* variables instead"),
            ("--ssh_port", &self.ssh_port, "use --remote-shell 'ssh -p PORT'"),
        ];
        for (option, value, remedy) in options {
            if let Some(value) = value {
                return Err(Failure::mistake(format!("{option}: unsupported: {value}; {remedy}")));
            }
        }
        Ok(())
    }
}

/// Launches a job and waits until it ends.
///
/// # Errors
/// Returns a user's mistake, a failure while running if a host does not answer, or the failure of a
/// rank. In the last case the exit status is the status of the rank that failed first.
pub(crate) fn launch(mut arguments: LaunchArguments) -> Result<(), Failure> {
    if let Some(mode) = arguments.autotuning {
        let command = tuned_command(&arguments)?;
        match mode {
            Autotuning::Tune => return Ok(()),
            Autotuning::Run => arguments.command = command,
        }
    }
    let dry_run = arguments.dry_run;
    let launch = planned(arguments)?;
    // The command line is always printed, so that users can start mpirun themselves.
    let line = quoted(&launch.words());
    if dry_run {
        return console::print(&line);
    }
    console::eprint(&line);
    let end = launch.run().map_err(|error| match error {
        LaunchError::NoMpirun { .. }
        | LaunchError::OtherMpirun { .. }
        | LaunchError::NoProgram { .. } => Failure::mistake(error),
        LaunchError::Connect(_) | LaunchError::Watch(_) => Failure::run(error),
    })?;
    let message = launch.reason(end);
    match end {
        JobEnd::Success => Ok(()),
        JobEnd::Failed { status, .. } => Err(Failure::Program { status, message }),
        JobEnd::Interrupted { signal } => Err(Failure::Interrupted { signal, message }),
    }
}

/// Searches for the configuration of the job, and returns the command that trains with it.
///
/// # Errors
/// Returns a user's mistake if the job cannot be tuned, or an error of the search.
fn tuned_command(arguments: &LaunchArguments) -> Result<Vec<String>, Failure> {
    let hosts = selected_hosts(&arguments.hosts)?;
    let [host] = &hosts[..] else {
        return Err(Failure::mistake(format!(
            "--autotuning: {} hosts are selected, and configurations are measured on one; select one host with --include \
             or --num_nodes",
            hosts.len()
        )));
    };
    // A program of the user has no job file to tune.
    let program = arguments.command.first().map(PathBuf::from);
    if program.as_deref().and_then(|program| program.file_stem()) != Some("finetune".as_ref()) {
        return Err(Failure::mistake(
            "--autotuning: tunes jobs of finetune; give `-- finetune --config FILE`, and in a program of your own call \
             deepburn::tune",
        ));
    }
    let job = finetune::Arguments::try_parse_from(&arguments.command);
    let job = job.map_err(Failure::of_key("--autotuning"))?;
    let options = tune(&job.tuned_for(host.slots.len())?)?;
    Ok(job.with_options(&arguments.command[0], options))
}

/// Returns the launch that the command line describes.
///
/// # Errors
/// Returns a user's mistake. No host has been contacted then.
fn planned(arguments: LaunchArguments) -> Result<Launch, Failure> {
    arguments.unsupported.refuse()?;
    let hosts = selected_hosts(&arguments.hosts)?;
    // If `finetune` is not on PATH, it is searched in the folder of this program.
    let own = env::current_exe().ok();
    let beside = own.as_deref().and_then(|file| file.parent());
    let path = env::var_os("PATH");
    let command = training_command(&arguments.command, beside, path.as_deref());
    let names = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    Ok(Launch {
        mpirun: Mpirun {
            program: arguments.mpirun,
            hosts,
            remote_shell: arguments.remote_shell,
            forwarded: forwarded_variables(names, &arguments.forward).map_err(Failure::mistake)?,
            command: command.map_err(Failure::mistake)?,
        },
        started: SystemTime::now(),
        connect_timeout: Duration::from_secs(arguments.connect_timeout.into()),
        grace: Duration::from_secs(arguments.grace_seconds.into()),
        max_restarts: arguments.max_restarts,
    })
}

/// Returns the hosts of the hostfile, or this machine, with the slots that the options select.
///
/// # Errors
/// Returns a user's mistake if the hostfile cannot be read, if a host or slot is unknown, or if
/// options exclude each other.
fn selected_hosts(arguments: &HostArguments) -> Result<Vec<HostSlots>, Failure> {
    let selection = Selection {
        include: arguments.include.clone(),
        exclude: arguments.exclude.clone(),
        num_nodes: arguments.num_nodes,
        num_gpus: arguments.num_gpus,
    };
    let hosts = match &arguments.hostfile {
        Some(file) => read_hostfile(file).map_err(Failure::mistake)?,
        None => {
            // Without a hostfile, the slots are the visible devices of this machine.
            let visible = env::var("CUDA_VISIBLE_DEVICES").ok();
            vec![this_machine(&selection, visible.as_deref()).map_err(Failure::mistake)?]
        }
    };
    selection.apply(&hosts).map_err(Failure::mistake)
}
