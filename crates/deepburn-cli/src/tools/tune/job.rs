//! The job of a search: prepared as a run is, and measured on the backend of the job.
//!
//! Main type: [`TunedJob`].

use std::path::{Path, PathBuf};

use deepburn::comm::Placement;
use deepburn::cost::{Network, RankSpeed};
use deepburn::tune::{
    CandidateConfig, MeasuredSteps, Measurement, SearchSpace, Tuner, narrow, policy_name,
    search_space, split,
};
use deepburn::zero::{check_folder, disk_bandwidth};
use deepburn::{
    MeasuredSizes, dtype_of, machine_speed, shared_by_threads, shared_cores, thread_latency,
};
use deepburn_config::{AutotuningPlan, Job, JobRequest, Plan};
use deepburn_launch::quoted;
use serde_json::Value;

use crate::allocator::release_free_memory;
use crate::failure::Failure;
use crate::job::devices::{Devices, VisibleDevices, set_matmul_precision, with_backend};
use crate::run::forecast::{HostLimits, longest};
use crate::run::preparation::{Preparation, Resumed, prepare};
use crate::tools::tune::{MemoryArguments, TuneArguments};

/// A job whose DeepSpeed configuration is searched for.
pub(crate) struct TunedJob {
    /// Job, model and data.
    pub(crate) preparation: Preparation,
    /// What the section `autotuning` asks for.
    pub(crate) autotuning: AutotuningPlan,
    /// The configuration without `autotuning`, in which no value is `"auto"`.
    pub(crate) config: Value,
    /// Tokens of the longest sequence.
    pub(crate) length: u64,
    /// Numbers of ranks to try.
    pub(crate) ranks: Vec<usize>,
    /// Numbers of pipeline stages to try.
    pub(crate) pipeline_stages: Vec<usize>,
    /// Folder for states on NVMe.
    pub(crate) nvme: Option<PathBuf>,
    /// The memory of this host.
    pub(crate) limits: HostLimits,
    /// The command line.
    arguments: TuneArguments,
}

impl TunedJob {
    /// Reads and checks the job. Nothing is written.
    ///
    /// # Errors
    /// Returns a user's mistake if the job is not valid or cannot be tuned.
    pub(crate) fn read(arguments: &TuneArguments) -> Result<Self, Failure> {
        refuse_processes()?;
        let mut request = JobRequest {
            config: arguments.config.clone(),
            sets: arguments.sets.clone(),
            deepspeed: arguments.deepspeed.clone(),
            // With several numbers, the batch size of a step is the one that the job has on its own
            // number of ranks.
            ranks: match arguments.ranks[..] {
                [only] => Some(only.into()),
                _ => None,
            },
            backend: arguments.backend.clone(),
            ..JobRequest::default()
        };
        let (_, written) = Job::load(&request).map_err(Failure::mistake)?;
        let (_, autotuning) = split(&written).map_err(Failure::mistake)?;
        // A run refuses the section.
        if written.to_json().get("autotuning").is_some() {
            request.sets.push("deepspeed.autotuning=null".to_owned());
        }
        deepburn::start_threads().map_err(Failure::run)?;
        let preparation = prepare(&request, |job, plan| {
            refuse_untunable(job, plan)?;
            Ok(Resumed::default())
        })?;
        set_matmul_precision(&preparation.job.training);
        let pipeline_stages = match arguments.pipeline_stages.is_empty() {
            true => vec![preparation.plan.mesh.pipeline_stages],
            false => arguments.pipeline_stages.iter().copied().map(usize::from).collect(),
        };
        refuse_profile(&preparation.plan, &pipeline_stages)?;
        let config = without_autos(&preparation.record);
        let MemoryArguments { memory, disk, nvme } = &arguments.memory;
        let nvme = nvme.clone().or_else(|| nvme_path(&config));
        if let Some(folder) = &nvme {
            check_folder(folder, 0).map_err(Failure::of_key("--nvme"))?;
        }
        let on_host = preparation.job.training.placement.backend.is_host();
        let [memory, disk] = [memory, disk].map(|size| size.map(|size| size.0));
        let ranks = match arguments.ranks.is_empty() {
            true => vec![preparation.job.training.placement.ranks],
            false => arguments.ranks.iter().copied().map(usize::from).collect(),
        };
        Ok(Self {
            length: longest(&preparation),
            preparation,
            autotuning,
            config,
            ranks,
            pipeline_stages,
            limits: HostLimits::new(memory, disk, nvme.as_deref(), on_host),
            nvme,
            arguments: arguments.clone(),
        })
    }

    /// Returns the name of the job file.
    pub(crate) fn name(&self) -> String {
        self.arguments.config.display().to_string()
    }

    /// Returns the search space.
    ///
    /// # Errors
    /// Returns a user's mistake if the limits of the job leave no candidate.
    pub(crate) fn space(&self) -> Result<SearchSpace, Failure> {
        let Preparation { plan, context, .. } = &self.preparation;
        let mut space = search_space(plan, context, self.ranks.clone(), self.nvme.is_some());
        space.pipeline_stages.clone_from(&self.pipeline_stages);
        let TuneArguments { stages, recompute, .. } = &self.arguments;
        if !stages.is_empty() {
            space.stages.retain(|stage| stages.contains(&stage.number()));
        }
        if !recompute.is_empty() {
            space.recompute.retain(|policy| recompute.contains(&policy_name(*policy)));
        }
        narrow(&mut space, &self.autotuning, plan.batch.train_batch_size)
            .map_err(Failure::mistake)?;
        Ok(space)
    }

    /// Returns the tuner of this job on this machine, whose speed is measured.
    ///
    /// # Errors
    /// Returns a user's mistake if the disk cannot be used, or a failure while running if threads
    /// cannot be started.
    pub(crate) fn tuner(&self) -> Result<Tuner<'_>, Failure> {
        // The job's own settings, which a candidate's settings would contradict.
        let mut context = self.preparation.context.clone();
        context.gradient_checkpointing = None;
        context.pipeline.stages = None;
        let on_host = self.preparation.job.training.placement.backend.is_host();
        let speed = self.speed()?;
        Ok(Tuner {
            config: self.config.clone(),
            context,
            nvme: self.nvme.clone(),
            speed: Box::new(speed),
            cores: on_host.then(shared_cores),
            forecast: Box::new(|plan| {
                let sequences = plan.batch.micro_batch_size as u64;
                let shape = deepburn_models::BatchShape { sequences, length: self.length };
                self.preparation.subject.forecast(plan, shape)
            }),
            fit: Box::new(|plan, stages| {
                self.limits.fit(&self.preparation, plan, self.length, stages)
            }),
        })
    }

    /// Measures the machine, and returns the speed of a rank by the number of ranks.
    fn speed(&self) -> Result<impl Fn(usize) -> (RankSpeed, Network) + use<>, Failure> {
        let plan = &self.preparation.plan;
        let most = self.ranks.iter().copied().max().unwrap_or(1);
        // Over all ranks, a matrix product of the candidate with the largest micro-batches has this
        // many rows.
        let rows = (plan.batch.train_batch_size as u64).saturating_mul(self.length);
        let width = self.preparation.subject.info().architecture().width() as u64;
        let dtype = dtype_of(plan.precision.of_products());
        let sizes = MeasuredSizes { rows, fewest_rows: self.length, width, dtype };
        let (mut speed, devices) = self.machine_speed(sizes);
        // Without a figure for the bus, copies take as long as in host memory.
        speed.host_bandwidth = Some(speed.memory_bandwidth);
        if let Some(folder) = &self.nvme {
            let bandwidth = disk_bandwidth(folder).map_err(Failure::of_key("--nvme"))?;
            speed.disk_bandwidth = Some(bandwidth);
        }
        let latency = thread_latency(most).map_err(Failure::run)?;
        Ok(move |ranks: usize| match devices {
            // Ranks on devices of their own do not share their speed.
            Some(devices) => shared_by_threads(speed, latency, ranks.div_ceil(devices)),
            None => shared_by_threads(speed, latency, ranks),
        })
    }

    /// Returns the measured speed of the job's backend, and the number of its devices if they are
    /// not the host.
    fn machine_speed(&self, sizes: MeasuredSizes) -> (RankSpeed, Option<usize>) {
        let backend = self.preparation.job.training.placement.backend;
        let (speed, devices) =
            with_backend!(backend, B, devices => of_devices::<B>(devices, sizes));
        (speed, (!backend.is_host()).then_some(devices))
    }

    /// Measures steps of a plan.
    ///
    /// # Errors
    /// Returns the failure of a rank.
    pub(crate) fn measure(&self, plan: &Plan, steps: MeasuredSteps) -> Result<Measurement, String> {
        // This candidate does not use the memory that an earlier one needed.
        release_free_memory();
        let backend = self.preparation.job.training.placement.backend;
        with_backend!(backend, B, devices => self.measure_on::<B>(plan, devices, steps))
    }

    /// Measures steps of a plan on backend `B`. Ranks use the `visible` devices that the job
    /// selects.
    fn measure_on<B: deepburn::ops::FusedOps + deepburn::ops::OptimizerOps>(
        &self,
        plan: &Plan,
        visible: &VisibleDevices<B::Device>,
        steps: MeasuredSteps,
    ) -> Result<Measurement, String> {
        let ranks = plan.mesh.world_size();
        let devices = Devices::choose(visible, &self.preparation.job.training, ranks);
        let devices = devices.map_err(|failure| failure.to_string())?;
        // Ranks share devices if there are fewer of them.
        let devices: Vec<_> = (0..ranks).map(|rank| devices.of(rank).clone()).collect();
        self.preparation.subject.measure::<B>(plan, self.length, &devices, steps)
    }

    /// Returns the command that trains a candidate whose configuration is in `file`.
    pub(crate) fn command(&self, candidate: &CandidateConfig, file: &Path) -> String {
        let config = self.arguments.config.display().to_string();
        let mut words = vec!["finetune".to_owned(), "--config".to_owned(), config];
        words.extend(self.options(candidate, file));
        quoted(&words)
    }

    /// Returns the options of `finetune` that select a candidate whose configuration is in `file`,
    /// beside those that name the job.
    pub(crate) fn options(&self, candidate: &CandidateConfig, file: &Path) -> Vec<String> {
        let mut options = vec!["--deepspeed".to_owned(), file.display().to_string()];
        options.extend(["--ranks".to_owned(), candidate.ranks.to_string()]);
        // Values of the DeepSpeed configuration are in its file.
        let of_job = self.arguments.sets.iter().filter(|set| !set.starts_with("deepspeed"));
        options.extend(of_job.flat_map(|set| ["--set".to_owned(), set.clone()]));
        if self.preparation.job.training.deepspeed_defaults.gradient_checkpointing.is_some() {
            options.extend(["--set", "training.gradient_checkpointing=null"].map(str::to_owned));
        }
        if self.preparation.job.training.placement.pipeline.stages.is_some() {
            // The file has the number of pipeline stages.
            options.extend(["--set", "training.pipeline_stages=null"].map(str::to_owned));
        }
        if let Some(backend) = &self.arguments.backend {
            options.extend(["--backend".to_owned(), backend.clone()]);
        }
        options
    }
}

/// Returns the speed of the first device, and the number of devices.
fn of_devices<B: deepburn::ops::OptimizerOps>(
    visible: &VisibleDevices<B::Device>,
    sizes: MeasuredSizes,
) -> (RankSpeed, usize) {
    let first = visible.devices.first().cloned().unwrap_or_default();
    (machine_speed::<B>(&first, sizes), visible.devices.len().max(1))
}

/// Refuses to run as one of several processes.
///
/// # Errors
/// Returns a user's mistake if a launcher started several processes.
fn refuse_processes() -> Result<(), Failure> {
    match Placement::detect().map_err(Failure::mistake)? {
        Some(placement) if placement.world_size > 1 => Err(Failure::mistake(format!(
            "{} started {} processes, and configurations are measured on rank threads of one process; start deepburn tune \
             without a launcher",
            placement.launcher, placement.world_size
        ))),
        _ => Ok(()),
    }
}

/// Refuses jobs whose batches are not set by the DeepSpeed configuration.
///
/// # Errors
/// Returns a user's mistake that names the key.
fn refuse_untunable(job: &Job, plan: &Plan) -> Result<(), Failure> {
    if plan.data_efficiency.dynamic_batching.is_some() {
        return Err(Failure::mistake(
            "deepspeed.data_efficiency.data_sampling.dynamic_batching: its token budget sets the micro-batches, so they \
             cannot be tuned; set enabled to false while tuning",
        ));
    }
    if !job.training.batch_size_schedule.is_empty() {
        return Err(Failure::mistake(
            "training.batch_size_schedule: sets the batch size of each step, and one batch size is tuned; remove it while \
             tuning",
        ));
    }
    Ok(())
}

/// Refuses a profile of a pipeline, with which no candidate would train.
///
/// # Errors
/// Returns a user's mistake that names the key.
fn refuse_profile(plan: &Plan, pipeline_stages: &[usize]) -> Result<(), Failure> {
    let has_pipeline = pipeline_stages.iter().any(|stages| *stages > 1);
    match plan.outputs.monitor.flops.is_some() && has_pipeline {
        true => Err(Failure::mistake(
            "deepspeed.flops_profiler.enabled: a pipeline stage counts its own operations only; set it to false, or tune \
             with one stage",
        )),
        false => Ok(()),
    }
}

/// Returns the DeepSpeed configuration of a record (`job.json`), with a value in place of each
/// `"auto"`.
fn without_autos(record: &Value) -> Value {
    let mut config = record["deepspeed"].clone();
    if !config.is_object() {
        config = Value::Object(serde_json::Map::new());
    }
    if let Some(keys) = config.as_object_mut() {
        keys.remove("autotuning");
    }
    for (path, answer) in record["resolved"]["autos"].as_object().into_iter().flatten() {
        let pointer = format!("/{}", path.replace('.', "/"));
        // A path may have the key's other name, which is then resolved again.
        if let Some(value) = config.pointer_mut(&pointer) {
            *value = answer["value"].clone();
        }
    }
    config
}

/// Returns the folder for offload that the configuration names.
fn nvme_path(config: &Value) -> Option<PathBuf> {
    let zero = &config["zero_optimization"];
    let path = |section: &str| zero[section]["nvme_path"].as_str();
    path("offload_optimizer").or_else(|| path("offload_param")).map(PathBuf::from)
}
