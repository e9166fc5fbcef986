//! The device mesh: `pipeline`, `mics_shard_size` and the job's `training.pipeline_stages`.

use super::*;

/// Returns the number of pipeline stages.
pub(super) fn pipeline_stages(context: &mut Context<'_>) -> usize {
    let key = &context.top.pipeline.value.stages;
    let (stages, site) = match context.run.pipeline.stages.filter(|_| !key.is_given()) {
        Some(stages) => (stages, KeyLocation::from("training.pipeline_stages")),
        None => (key.value, key.into()),
    };
    if let Some(of_job) = context.run.pipeline.stages {
        refuse!(if of_job != stages; context, key =>
            "{stages} contradicts training.pipeline_stages: {of_job}"; "remove one of them");
        context.answer(key, stages, "training.pipeline_stages");
    }
    let ranks = context.run.world_size;
    // 0 stages are reported here too: no number of ranks but 0 is a multiple of 0.
    refuse!(if !ranks.is_multiple_of(stages); context, site =>
        "{stages} does not divide the {}: each stage has the same number of ranks", counted(ranks, "rank");
        "use a multiple of {stages} ranks, or a number of stages that divides {ranks}");
    stages.max(1)
}

/// Resolves the mesh, in which `data_parallel_size` ranks have samples of their own. It is the same
/// at all ZeRO stages, so that results are.
pub(super) fn resolve(
    pipeline_stages: usize,
    data_parallel_size: usize,
    stage: Stage,
    optimizer: &OptimizerPlan,
    context: &mut Context<'_>,
) -> MeshPlan {
    let zero = &context.top.zero_optimization.value;
    let (size, hierarchical) = (&zero.mics_shard_size, &zero.mics_hierarchical_params_gather);
    refuse!(if hierarchical.value; context, hierarchical =>
        "true is not supported: all ranks of a shard group gather a parameter together"; "set it to false");
    refuse!(if size.value == 0; context, size => "0 ranks cannot hold states"; "write -1, or the ranks of a shard group");
    // -1 is DeepSpeed's value for one group of all ranks.
    let given = usize::try_from(size.value).ok().filter(|size| *size > 0);
    let group = given.unwrap_or(data_parallel_size);
    refuse!(if !data_parallel_size.is_multiple_of(group); context, size =>
        "{group} does not divide the {}", counted(data_parallel_size, "data-parallel rank");
        "write a divisor, the ranks of one host for example, or -1");
    //= deepspeed 0.19.6 runtime/zero/mics.py MiCS_Optimizer
    // The group is 0 only without ranks, which has been reported.
    let replicate = data_parallel_size.checked_div(group).unwrap_or(1);
    refuse!(if replicate > 1 && optimizer.exchanges_momentum(); context, size =>
        "{} is not supported with shard groups: it exchanges momenta among all data-parallel ranks", optimizer.name();
        "use AdamW, or write -1");
    if given == Some(data_parallel_size) {
        note!(context, size => "{group} are all data-parallel ranks, so there is one shard group, as with -1");
    } else if replicate > 1 && stage == Stage::Disabled {
        note!(context, size =>
            "stage 0 shards nothing: shard groups only determine the order in which gradients are added up, which is \
             the same at stages 1 to 3");
    }
    MeshPlan { pipeline_stages, replicate, shard: group }
}

/// Resolves the pipeline of a mesh with several stages, and checks what runs in it.
pub(super) fn pipeline(
    mesh: &MeshPlan,
    optimizer: &OptimizerPlan,
    stage: Stage,
    context: &mut Context<'_>,
) -> Option<PipelinePlan> {
    let top = context.top;
    let key = &top.pipeline.value.partition;
    // Read even for one stage, so that an invalid partition is always an error.
    let partition = partition(key, context);
    let is_one = mesh.pipeline_stages == 1;
    context.report_unused(key, is_one, "there is one pipeline stage");
    if is_one {
        return None;
    }
    refuse!(if optimizer.exchanges_momentum(); context, &top.optimizer.value.name =>
        "{} is not supported with pipeline stages", optimizer.name(); "use AdamW, or one stage");
    let cost = match stage {
        Stage::Gradients => Some(""),
        Stage::Parameters => {
            Some(", and the ranks of a stage gather its parameters for every micro-batch")
        }
        _ => None,
    };
    if let Some(cost) = cost {
        note!(context, &top.zero_optimization.value.stage =>
            "DeepSpeed supports pipeline stages with ZeRO stages 0 and 1 only{cost}");
    }
    Some(PipelinePlan { schedule: context.run.pipeline.schedule, partition })
}

/// Reads the partition into stages.
fn partition(key: &Setting<'_, &str>, context: &mut Context<'_>) -> StagePartition {
    let is = |name: &str| key.value.eq_ignore_ascii_case(name);
    match key.value.split_once(':') {
        Some((name, pattern)) if name.eq_ignore_ascii_case("type") => {
            //= deepspeed 0.19.8 runtime/pipe/module.py _partition_layers
            match PathPattern::ignoring_case(pattern) {
                Ok(pattern) => return StagePartition::Type(pattern),
                Err(reason) => refuse!(context, key =>
                    "\"{pattern}\" is not a regular expression: {reason}"; "escape literal characters"),
            }
        }
        _ if is("best") => {}
        _ if is("parameters") => return StagePartition::Parameters,
        _ if is("uniform") => return StagePartition::Uniform,
        _ => refuse!(context, key =>
            "unknown partition \"{}\"", key.value; "write \"best\", \"parameters\", \"uniform\" or \"type:REGEX\""),
    }
    StagePartition::Best
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::context::RunContext;
    use crate::job_plan::PipelineRequest;
    use crate::raw_config::RawConfig;
    use crate::resolve::{Resolved, resolve};

    fn resolved(more: &Value, run: &RunContext) -> Result<Resolved, String> {
        let mut config = json!({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
            "optimizer": {"type": "AdamW"}});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        let written = RawConfig::from_value(&config).unwrap();
        resolve(&written, run).map_err(|report| report.to_string())
    }

    fn mesh(pipeline_stages: usize, replicate: usize, shard: usize) -> MeshPlan {
        MeshPlan { pipeline_stages, replicate, shard }
    }

    //= deepspeed 0.19.6 runtime/zero/mics.py MiCS_Optimizer
    #[test]
    fn ranks_are_divided_along_the_axes() {
        let stages = |stages: usize| json!({"pipeline": {"stages": stages}});
        let mics = |stage: u8, size: i64| json!({"zero_optimization": {"stage": stage, "mics_shard_size": size}});
        let both = json!({"pipeline": {"stages": 2}, "zero_optimization": {"stage": 3, "mics_shard_size": 2}});
        for (config, expected) in [
            (json!({}), mesh(1, 1, 8)),
            (stages(1), mesh(1, 1, 8)),
            (stages(4), mesh(4, 1, 2)),
            (stages(8), mesh(8, 1, 1)),
            (mics(3, -1), mesh(1, 1, 8)),
            (mics(3, 2), mesh(1, 4, 2)),
            (mics(1, 8), mesh(1, 1, 8)),
            (mics(2, 1), mesh(1, 8, 1)),
            // Nothing is sharded, but gradients are added up in the same order.
            (mics(0, 2), mesh(1, 4, 2)),
            (both, mesh(2, 2, 2)),
        ] {
            let plan = resolved(&config, &RunContext::on_host(8)).unwrap().plan;
            assert_eq!(plan.mesh, expected, "{config}");
            assert_eq!(plan.mesh.world_size(), 8, "{config}");
            let batch = plan.batch;
            assert_eq!(batch.data_parallel_size, plan.mesh.data_parallel_size(), "{config}");
            assert_eq!(batch.train_batch_size, 2 * 3 * batch.data_parallel_size, "{config}");
            assert_eq!(plan.pipeline.is_some(), plan.mesh.pipeline_stages > 1, "{config}");
        }
    }

    //= deepspeed 0.19.8 runtime/pipe/module.py _partition_layers
    #[test]
    fn the_job_or_the_configuration_sets_the_stages() {
        let gpipe = RunContext {
            pipeline: PipelineRequest { stages: Some(2), schedule: PipelineSchedule::FillDrain },
            ..RunContext::on_host(4)
        };
        for (config, partition) in [
            (json!({}), StagePartition::Best),
            (json!({"stages": 2, "partition": "BEST"}), StagePartition::Best),
            (json!({"stages": "auto", "partition": "Uniform"}), StagePartition::Uniform),
            (json!({"partition": "parameters"}), StagePartition::Parameters),
            (
                json!({"partition": r"type:^H\.\d"}),
                StagePartition::Type(PathPattern::ignoring_case(r"^H\.\d").unwrap()),
            ),
        ] {
            let resolved = resolved(&json!({"pipeline": config}), &gpipe).unwrap();
            assert_eq!(resolved.plan.mesh, mesh(2, 1, 2), "{config}");
            let pipeline = resolved.plan.pipeline.unwrap();
            assert_eq!(pipeline.partition, partition, "{config}");
            assert_eq!(pipeline.schedule, PipelineSchedule::FillDrain, "{config}");
            let answer = resolved.autos.get("pipeline.stages").map(|answer| answer.value.clone());
            assert_eq!(answer.is_some_and(|stages| stages == 2), config["stages"] == "auto");
        }
        let pattern = PathPattern::ignoring_case(r"^H\.\d").unwrap();
        assert!(pattern.occurs_in("h.0"));
        let own = resolved(&json!({"pipeline": {"stages": 4}}), &RunContext::on_host(4)).unwrap();
        assert_eq!(own.plan.mesh, mesh(4, 1, 1));
        let schedule = own.plan.pipeline.unwrap().schedule;
        assert_eq!(schedule, PipelineSchedule::OneForwardOneBackward);
    }

    #[test]
    fn a_secondary_partition_needs_stage_3() {
        let hpz = |stage: u8| json!({"zero_optimization": {"stage": stage, "zero_hpz_partition_size": 2}});
        for (stage, expected) in [(3, Some(2)), (2, None)] {
            let resolved = resolved(&hpz(stage), &RunContext::on_host(4)).unwrap();
            assert_eq!(resolved.plan.zero.parameters.secondary_partition_size, expected);
            let is_reported =
                resolved.notes.iter().any(|it| it.message.contains("only at stage 3"));
            assert_eq!(is_reported, expected.is_none());
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error_with_the_numbers() {
        let of_job = |stages| RunContext {
            pipeline: PipelineRequest { stages: Some(stages), ..PipelineRequest::default() },
            ..RunContext::on_host(4)
        };
        let (job, none) = (of_job(3), of_job(0));
        let host = RunContext::on_host(4);
        let zero = |section: Value| json!({"zero_optimization": section});
        for (config, run, parts) in [
            (
                json!({"pipeline": {"stages": 3}}),
                &host,
                ["pipeline.stages", "3 does not divide the 4 ranks"],
            ),
            (json!({}), &job, ["training.pipeline_stages", "3 does not divide the 4 ranks"]),
            (json!({}), &none, ["training.pipeline_stages", "0 does not divide the 4 ranks"]),
            (
                json!({"pipeline": {"stages": 2}}),
                &job,
                ["pipeline.stages", "2 contradicts training.pipeline_stages: 3"],
            ),
            (
                json!({"pipeline": {"stages": 2, "partition": "type:("}}),
                &host,
                ["pipeline.partition", "is not a regular expression"],
            ),
            (
                json!({"pipeline": {"stages": 2, "partition": "profile"}}),
                &host,
                ["pipeline.partition", "unknown partition \"profile\""],
            ),
            (
                json!({"pipeline": {"activation_checkpoint_interval": 1}}),
                &host,
                ["pipeline.activation_checkpoint_interval", "activation_checkpointing.policy"],
            ),
            (
                json!({"pipeline": {"stages": 2}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}),
                &host,
                ["optimizer.type", "OneBitAdam is not supported with pipeline stages"],
            ),
            (
                json!({"pipeline": {"stages": 2}, "optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3}}}),
                &host,
                ["optimizer.type", "ZeroOneAdam is not supported with pipeline stages"],
            ),
            (
                json!({"pipeline": {"stages": 2}, "train_batch_size": 24, "gradient_accumulation_steps": 3}),
                &host,
                ["train_batch_size", "24 != 2 * 3 * 2"],
            ),
            (
                zero(json!({"stage": 3, "zero_hpz_partition_size": 3})),
                &host,
                ["zero_hpz_partition_size", "3 does not divide the 4 data-parallel ranks"],
            ),
            (
                zero(json!({"stage": 3, "zero_hpz_partition_size": 2, "mics_shard_size": 2})),
                &host,
                ["zero_hpz_partition_size", "is given together with mics_shard_size"],
            ),
            (
                zero(json!({"stage": 2, "mics_shard_size": 3})),
                &host,
                ["mics_shard_size", "3 does not divide the 4 data-parallel ranks"],
            ),
            (
                json!({"zero_optimization": {"stage": 0, "mics_shard_size": 2},
                    "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}),
                &host,
                ["mics_shard_size", "OneBitAdam is not supported with shard groups"],
            ),
            (
                zero(json!({"stage": 3, "mics_shard_size": 0})),
                &host,
                ["mics_shard_size", "0 ranks"],
            ),
            (
                zero(json!({"stage": 3, "mics_shard_size": -2})),
                &host,
                ["mics_shard_size", "must be an integer of at least -1"],
            ),
            (
                zero(
                    json!({"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": true}),
                ),
                &host,
                ["mics_hierarchical_params_gather", "set it to false"],
            ),
        ] {
            let error = resolved(&config, run).unwrap_err();
            let errors = error.lines().filter(|line| line.trim_start().starts_with("error: "));
            let line = errors.clone().find(|line| parts.iter().all(|part| line.contains(part)));
            assert!(line.is_some(), "{config}: {error}");
            assert_eq!(errors.count(), 1, "{config}: {error}");
        }
    }

    #[test]
    fn groups_that_change_less_than_they_seem_to_are_noted() {
        let mics = |stage: u8, size: i64| json!({"stage": stage, "mics_shard_size": size});
        for (zero, expected) in [
            (mics(3, 4), "4 are all data-parallel ranks"),
            (mics(0, 2), "stage 0 shards nothing"),
            (json!({"stage": 3, "zero_hpz_partition_size": 4}), "4 are all data-parallel ranks"),
        ] {
            let resolved = resolved(&json!({"zero_optimization": zero}), &RunContext::on_host(4));
            let notes = resolved.unwrap().notes;
            let noted = notes.iter().any(|note| note.message.contains(expected));
            assert!(noted, "{zero}: {notes:?}");
        }
    }

    #[test]
    fn what_a_stage_costs_in_a_pipeline_is_noted() {
        for (stage, expected) in
            [(0, None), (1, None), (2, Some("stages 0 and 1")), (3, Some("gather its parameters"))]
        {
            let config = json!({"pipeline": {"stages": 2}, "zero_optimization": {"stage": stage}});
            let notes = resolved(&config, &RunContext::on_host(4)).unwrap().notes;
            let noted = notes.iter().find(|note| note.message.contains("supports pipeline stages"));
            assert_eq!(noted.is_some(), expected.is_some(), "{stage}");
            let message = noted.map_or("", |note| &note.message);
            assert!(message.contains(expected.unwrap_or_default()), "{message}");
        }
    }
}
