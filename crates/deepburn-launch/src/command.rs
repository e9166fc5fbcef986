//! The command line of Open MPI's `mpirun`.
//!
//! Main type: [`Mpirun`]. For two hosts with 2 and 1 slots, the command line looks like this:
//!
//! ```text
//! mpirun --map-by slot --bind-to none --mca … --tag-output
//!   -np 2 -H a:2 -x CUDA_VISIBLE_DEVICES=0,1 -x DEEPBURN_STARTED=… finetune job.yaml
//!   : -np 1 -H b:1 -x CUDA_VISIBLE_DEVICES=0 -x DEEPBURN_STARTED=… finetune job.yaml
//! ```

use std::time::{SystemTime, UNIX_EPOCH};

use crate::environment::{RESTART, STARTED, VISIBLE_DEVICES};
use crate::{HostSlots, is_this_machine, usable_cores};

/// The parts of an `mpirun` command line.
#[derive(Debug, Clone)]
pub struct Mpirun {
    /// The name or path of `mpirun`.
    pub program: String,
    /// The hosts with at least one slot each, in rank order.
    pub hosts: Vec<HostSlots>,
    /// A command that runs another command on a host, such as `ssh`. It is called as
    /// `AGENT HOST COMMAND...`.
    pub remote_shell: String,
    /// The variables that are forwarded to all ranks, as returned by
    /// [`forwarded_variables`](crate::forwarded_variables).
    pub forwarded: Vec<String>,
    /// The command of every rank: a program and its arguments.
    pub command: Vec<String>,
}

/// TCP keep-alive settings for the connections between hosts. After 10 s without traffic, 3 probes
/// follow 5 s apart, so a lost host ends the job after 25 s. With Open MPI's defaults it takes 8
/// minutes.
const KEEPALIVE: [(&str, &str); 3] = [
    ("oob_tcp_keepalive_time", "10"),
    ("oob_tcp_keepalive_intvl", "5"),
    ("oob_tcp_keepalive_probes", "3"),
];

/// One start of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempt {
    /// The time of the job's first start.
    pub started: SystemTime,
    /// The number of restarts so far.
    pub restarts: u32,
}

impl Mpirun {
    /// Returns the program and its arguments.
    ///
    /// Every host has its own app context, `-np N -H HOST:N ... COMMAND`, separated by `:`. Ranks
    /// are thus numbered in host order even if hosts have different numbers of slots, and each host
    /// gets its own devices.
    pub fn words(&self, attempt: &Attempt) -> Vec<String> {
        let mut words = vec![self.program.clone()];
        words.extend(self.options().iter().map(|word| (*word).to_owned()));
        if self.remote_hosts().next().is_some() {
            words.extend(["--mca", "plm_rsh_agent", &self.remote_shell].map(str::to_owned));
            words.extend(
                KEEPALIVE.iter().flat_map(|(key, value)| ["--mca", key, value]).map(str::to_owned),
            );
        }
        for (index, host) in self.hosts.iter().enumerate() {
            if index > 0 {
                words.push(":".to_owned());
            }
            words.extend(self.app_context(host, attempt));
        }
        words
    }

    /// Returns the options that apply to all hosts.
    fn options(&self) -> Vec<&'static str> {
        let mut options = Vec::new();
        if rustix::process::geteuid().is_root() {
            options.push("--allow-run-as-root");
        }
        options.extend(["--map-by", "slot", "--bind-to", "none"]);
        let local = self.hosts.iter().filter(|host| is_this_machine(&host.name));
        if local.map(|host| host.slots.len()).sum::<usize>() > usable_cores() {
            options.push("--oversubscribe");
        }
        // Waiting ranks yield their core to computing ones.
        options.extend(["--mca", "mpi_yield_when_idle", "1"]);
        options.extend(["--mca", "orte_abort_on_non_zero_status", "1"]);
        // mpirun always waits this long, once before SIGTERM and once before SIGKILL.
        options.extend(["--mca", "odls_base_sigkill_timeout", "1"]);
        options.push("--tag-output");
        options
    }

    /// Returns the options and the command of one host.
    fn app_context(&self, host: &HostSlots, attempt: &Attempt) -> Vec<String> {
        let count = host.slots.len();
        let devices: Vec<String> = host.slots.iter().map(usize::to_string).collect();
        let started = attempt.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut variables = self.forwarded.clone();
        variables.push(format!("{VISIBLE_DEVICES}={}", devices.join(",")));
        variables.push(format!("{STARTED}={:.3}", started.as_secs_f64()));
        if attempt.restarts > 0 {
            variables.push(format!("{RESTART}={}", attempt.restarts));
        }
        let mut words = vec!["-np".to_owned(), count.to_string()];
        words.extend(["-H".to_owned(), format!("{}:{count}", host.name)]);
        words.extend(variables.into_iter().flat_map(|variable| ["-x".to_owned(), variable]));
        words.extend_from_slice(&self.command);
        words
    }

    /// Returns the hosts that are reached through the remote shell.
    pub(crate) fn remote_hosts(&self) -> impl Iterator<Item = &HostSlots> {
        self.hosts.iter().filter(|host| !is_this_machine(&host.name))
    }

    /// Returns the host of a rank.
    pub(crate) fn host_of(&self, rank: usize) -> Option<&str> {
        let owners = self.hosts.iter().flat_map(|host| host.slots.iter().map(|_| &host.name));
        owners.map(String::as_str).nth(rank)
    }
}

/// Joins words to one line that a POSIX shell splits into the same words.
pub fn quoted(words: &[String]) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-./:=,@%+".contains(&b);
    let quote = |word: &String| match !word.is_empty() && word.bytes().all(plain) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    fn line(hosts: &[HostSlots], restarts: u32) -> String {
        let mpirun = Mpirun {
            program: "mpirun".to_owned(),
            hosts: hosts.to_vec(),
            remote_shell: "ssh -p 2222".to_owned(),
            forwarded: vec!["HF_TOKEN".to_owned(), "NOTE=it's".to_owned()],
            command: vec!["finetune".to_owned(), "my job.yaml".to_owned()],
        };
        let started = UNIX_EPOCH + Duration::from_millis(1_700_000_000_250);
        let line = quoted(&mpirun.words(&Attempt { started, restarts }));
        // This option depends on the user who runs the test.
        line.replace("--allow-run-as-root ", "")
    }

    const OPTIONS: &str = "--mca mpi_yield_when_idle 1 --mca orte_abort_on_non_zero_status 1 --mca \
                           odls_base_sigkill_timeout 1 --tag-output";

    #[test]
    fn one_machine() {
        assert_eq!(
            line(&[HostSlots::new("localhost", 1)], 0),
            format!(
                "mpirun --map-by slot --bind-to none {OPTIONS} -np 1 -H localhost:1 -x HF_TOKEN -x \
                 'NOTE=it'\\''s' -x CUDA_VISIBLE_DEVICES=0 -x DEEPBURN_STARTED=1700000000.250 \
                 finetune 'my job.yaml'"
            )
        );
    }

    #[test]
    fn more_ranks_than_cores_oversubscribe() {
        let many = line(&[HostSlots::new("localhost", usable_cores() + 1)], 0);
        assert!(many.contains("--bind-to none --oversubscribe --mca"), "{many}");
    }

    #[test]
    fn hosts_with_unequal_slots_get_their_own_devices() {
        let slots = |name: &str, slots: &[usize]| HostSlots {
            name: name.to_owned(),
            slots: slots.to_vec(),
        };
        let hosts = [slots("worker-1", &[0, 2]), slots("worker-0", &[1])];
        let variables = |devices: &str| {
            format!(
                "-x HF_TOKEN -x 'NOTE=it'\\''s' -x CUDA_VISIBLE_DEVICES={devices} -x \
                 DEEPBURN_STARTED=1700000000.250 -x DEEPBURN_RESTART=2 finetune 'my job.yaml'"
            )
        };
        assert_eq!(
            line(&hosts, 2),
            format!(
                "mpirun --map-by slot --bind-to none {OPTIONS} --mca plm_rsh_agent 'ssh -p 2222' \
                 --mca oob_tcp_keepalive_time 10 --mca oob_tcp_keepalive_intvl 5 --mca \
                 oob_tcp_keepalive_probes 3 -np 2 -H worker-1:2 {} : -np 1 -H worker-0:1 {}",
                variables("0,2"),
                variables("1")
            )
        );
    }

    #[test]
    fn a_shell_reads_the_same_words() {
        let words =
            ["plain", "", "two words", "it's", "$HOME `id` \\ \" * ? ; & | < > ~ # !", "a\nb"];
        let words = words.map(str::to_owned);
        let script = format!("printf '%s\\0' {}", quoted(&words));
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        let read = String::from_utf8(output.stdout).unwrap();
        assert_eq!(read.trim_end_matches('\0').split('\0').collect::<Vec<_>>(), words);
    }
}
