//! `curriculum_learning`: a curriculum over the sequence length.
//!
//! DeepSpeed had this section at the top level before 0.19. Decreasing lengths, stages out of order
//! and lengths out of bounds are errors.

use super::*;

/// Tensor cores multiply 16-bit matrices at full speed if their sizes are multiples of this number.
const TENSOR_CORE_MULTIPLE: usize = 8;

/// Resolves the section; `None` if it is off or invalid.
pub(crate) fn resolve(context: &mut Context<'_>) -> Option<CurriculumPlan> {
    let section = &context.top.curriculum_learning.value;
    if !section.enabled.value {
        return None;
    }
    // All three keys are read first, so that each missing key is reported.
    let min = require(&section.min_difficulty, context);
    let max = require(&section.max_difficulty, context);
    let kind = require(&section.schedule_type, context);
    let (min_difficulty, max_difficulty, kind) = (min?, max?, kind?);
    if min_difficulty > max_difficulty {
        refuse!(context, &section.min_difficulty =>
            "{min_difficulty} is above max_difficulty {max_difficulty}"; "lower it or raise max_difficulty");
        return None;
    }
    let schedule = match kind {
        "custom" => {
            refuse!(context, &section.schedule_type =>
                "\"custom\" asks for a schedule written in Python"; "use fixed_discrete, fixed_linear or fixed_root");
            return None;
        }
        "fixed_discrete" => discrete([min_difficulty, max_difficulty], context)?,
        _ => root(kind == "fixed_linear", context)?,
    };
    Some(CurriculumPlan { min_difficulty, max_difficulty, schedule })
}

/// Resolves `fixed_linear`, which is a root of degree 1, or `fixed_root`.
fn root(is_linear: bool, context: &mut Context<'_>) -> Option<CurriculumSchedule> {
    let config = &context.top.curriculum_learning.value.schedule_config.value;
    let degree = &config.root_degree;
    let unused: [&ConfigEntry<'_>; 3] = [&config.difficulty, &config.max_step, degree];
    // A line is a root of degree 1, so it has no use for a degree.
    warn_unused(&unused[..if is_linear { 3 } else { 2 }], context);
    let total_steps = require(&config.total_curriculum_step, context);
    let difficulty_step = require(&config.difficulty_step, context);
    let root_degree = if is_linear { Some(1.0) } else { require(degree, context) };
    note!(if difficulty_step.is_some_and(|step| step % TENSOR_CORE_MULTIPLE != 0); context, &config.difficulty_step =>
        "is not a multiple of 8: 16-bit products of such lengths are slower on tensor cores");
    let (total_steps, difficulty_step) = (total_steps?, difficulty_step?);
    Some(CurriculumSchedule::Root { total_steps, difficulty_step, root_degree: root_degree? })
}

/// Resolves `fixed_discrete`: a length for each stage, in the order of the steps at which stages
/// end.
///
/// Only the first problem is reported, because the other checks need lists of matching lengths in
/// ascending order.
fn discrete([min, max]: [usize; 2], context: &mut Context<'_>) -> Option<CurriculumSchedule> {
    let config = &context.top.curriculum_learning.value.schedule_config.value;
    let ScheduleConfig { total_curriculum_step, difficulty_step, root_degree, .. } = config;
    warn_unused(&[total_curriculum_step, difficulty_step, root_degree], context);
    let (difficulty, max_step) = (&config.difficulty, &config.max_step);
    let (lengths, ends) = (require(difficulty, context), require(max_step, context));
    let (lengths, ends) = (lengths?, ends?);
    if ends.is_empty() || lengths.len() != ends.len() + 1 {
        refuse!(context, difficulty => "has {}, but max_step has {}", counted(lengths.len(), "stage"), counted(ends.len(), "value");
            "give one max_step for each stage except the last");
    } else if let Some(pair) = lengths.windows(2).find(|pair| pair[0] > pair[1]) {
        refuse!(context, difficulty => "falls from {} to {}", pair[0], pair[1]; "give lengths that rise");
    } else if let Some(pair) = ends.windows(2).find(|pair| pair[0] >= pair[1]) {
        refuse!(context, max_step => "{} does not come after {}", pair[1], pair[0]; "give steps that rise");
    } else if let Some(length) = lengths.iter().find(|length| !(min..=max).contains(*length)) {
        refuse!(context, difficulty => "{length} is not from min_difficulty {min} to max_difficulty {max}";
            "change the stage or the bounds");
    } else {
        let (&last, lengths) = lengths.split_last()?;
        let stage = |(&difficulty, last_step)| CurriculumStage { difficulty, last_step };
        let stages = lengths.iter().zip(ends).map(stage).collect();
        return Some(CurriculumSchedule::Discrete { stages, last });
    }
    None
}

/// Returns the value of a key without a default, and reports a missing key.
fn require<T: Clone>(key: &Setting<'_, Option<T>>, context: &mut Context<'_>) -> Option<T> {
    refuse!(if !key.is_given(); context, key => "is missing, and the curriculum needs it";
        "add it: {}, or set curriculum_learning.enabled to false", key.key.kind);
    key.value.clone()
}

/// Warns about keys of another schedule.
fn warn_unused(keys: &[&ConfigEntry<'_>], context: &mut Context<'_>) {
    for key in keys.iter().filter(|key| key.is_given()) {
        warning!(context, *key => "changes nothing: it belongs to another schedule_type"; "remove it");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{
        CurriculumPlan, CurriculumSchedule, CurriculumStage, RawConfig, Resolved, RunContext,
    };

    fn resolve(section: Value) -> Result<Resolved, String> {
        let json = json!({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "curriculum_learning": section});
        let written = RawConfig::from_value(&json).unwrap();
        crate::resolve(&written, &RunContext::on_host(1)).map_err(|report| report.to_string())
    }

    fn section(kind: &str, config: Value) -> Value {
        json!({"enabled": true, "curriculum_type": "seqlen", "min_difficulty": 8,
            "max_difficulty": 64, "schedule_type": kind, "schedule_config": config})
    }

    fn schedule(kind: &str, config: Value) -> CurriculumSchedule {
        let CurriculumPlan { min_difficulty, max_difficulty, schedule } =
            resolve(section(kind, config)).unwrap().plan.data_efficiency.curriculum.unwrap();
        assert_eq!((min_difficulty, max_difficulty), (8, 64));
        schedule
    }

    #[test]
    fn schedules_are_read() {
        let stage = |difficulty, last_step| CurriculumStage { difficulty, last_step };
        assert_eq!(
            schedule("fixed_discrete", json!({"difficulty": [8, 16, 64], "max_step": [5, 1e1]})),
            CurriculumSchedule::Discrete { stages: vec![stage(8, 5), stage(16, 10)], last: 64 }
        );
        let mut config = json!({"total_curriculum_step": 100, "difficulty_step": 8});
        let root = |root_degree| CurriculumSchedule::Root {
            total_steps: 100,
            difficulty_step: 8,
            root_degree,
        };
        assert_eq!(schedule("fixed_linear", config.clone()), root(1.0));
        config["root_degree"] = json!(2);
        assert_eq!(schedule("Fixed_Root", config), root(2.0));
    }

    #[test]
    fn off_is_off() {
        for off in [json!({}), json!({"enabled": false, "min_difficulty": 8})] {
            assert_eq!(resolve(off).unwrap().plan.data_efficiency.curriculum, None);
        }
    }

    #[test]
    fn what_changes_little_is_noted() {
        let config = json!({"total_curriculum_step": 9, "difficulty_step": 2, "root_degree": 2});
        let notes = resolve(section("fixed_linear", config)).unwrap().notes;
        let notes: Vec<_> = notes.iter().map(ToString::to_string).collect();
        assert_eq!(notes.len(), 3, "{notes:?}");
        assert!(notes[0].contains("root_degree: changes nothing"), "{notes:?}");
        assert!(notes[1].contains("curriculum_learning: DeepSpeed 0.19.8 rejects"), "{notes:?}");
        assert!(notes[2].contains("difficulty_step: is not a multiple of 8"), "{notes:?}");
    }

    #[test]
    fn wrong_schedules_are_refused() {
        let on = json!({"enabled": true});
        let swapped = json!({"enabled": true, "min_difficulty": 9, "max_difficulty": 8,
            "schedule_type": "fixed_linear"});
        let stages = |lengths: Value, ends: Value| {
            section("fixed_discrete", json!({"difficulty": lengths, "max_step": ends}))
        };
        for (wrong, parts) in [
            (on.clone(), ["min_difficulty", "is missing"]),
            (on.clone(), ["max_difficulty", "enabled to false"]),
            (on, ["schedule_type", "fixed_discrete, fixed_linear"]),
            (swapped, ["min_difficulty", "9 is above max_difficulty 8"]),
            (section("custom", json!({})), ["schedule_type", "Python"]),
            (section("fixed_cubic", json!({})), ["schedule_type", "not a known value"]),
            (section("fixed_linear", json!({})), ["total_curriculum_step", "is missing"]),
            (section("fixed_root", json!({"difficulty_step": 8})), ["root_degree", "is missing"]),
            (
                section("fixed_linear", json!({"difficulty_step": 0})),
                ["difficulty_step", "at least 1"],
            ),
            (section("fixed_root", json!({"root_degree": 0})), ["root_degree", "above 0"]),
            (section("fixed_discrete", json!({})), ["schedule_config.max_step", "is missing"]),
            (stages(json!([8, 16]), json!([])), ["difficulty", "each stage except the last"]),
            (stages(json!([8, 16]), json!([1, 2])), ["difficulty", "has 2 stages"]),
            (stages(json!([16, 8]), json!([1])), ["difficulty", "falls from 16 to 8"]),
            (stages(json!([8, 9, 10]), json!([2, 2])), ["max_step", "2 does not come after 2"]),
            (stages(json!([8, 65]), json!([2])), ["difficulty", "65 is not from min_difficulty 8"]),
            (stages(json!([8, 1.5]), json!([2])), ["difficulty", "a list of integers"]),
            (stages(json!(8), json!([2])), ["difficulty", "a list of integers"]),
        ] {
            let message = resolve(wrong.clone()).expect_err(&wrong.to_string());
            for part in parts {
                assert!(message.contains(part), "{wrong}: {message}");
            }
        }
    }
}
