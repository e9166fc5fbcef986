//! `curriculum_learning`: short sequences first.
//!
//! The section that DeepSpeed had at the top level before 0.19. It refuses schedules that fall, whose
//! stages are out of order, or that leave their bounds.

use crate::curriculum::{CurriculumPlan, CurriculumSchedule, CurriculumStage};
use crate::key::{Key, Literal};
use crate::keys::elsewhere::ENABLED;
use crate::kind::{Integers, Kind, Reals};
use crate::resolve::Context;
use crate::section::Section;

const CUSTOM: &str = "custom";
const TOTAL: &str = "total_curriculum_step";
const STEP: &str = "difficulty_step";
const ROOT: &str = "root_degree";
const DIFFICULTY: &str = "difficulty";
const MAX_STEP: &str = "max_step";

/// Tensor cores multiply 16-bit matrices whose sizes are multiples of it at full speed.
const TENSOR_CORE_MULTIPLE: usize = 8;

const SCHEDULE: &[Key] = &[
    Key::optional(
        DIFFICULTY,
        Kind::Integers(Integers::POSITIVE),
        "fixed_discrete: length of sequences in each stage.",
    )
    .unit("tokens"),
    Key::optional(
        MAX_STEP,
        Kind::Integers(Integers::POSITIVE),
        "fixed_discrete: last step of each stage but the last one.",
    )
    .unit("steps"),
    Key::optional(
        TOTAL,
        Kind::Integer(Integers::POSITIVE),
        "fixed_linear and fixed_root: steps until the longest sequences.",
    )
    .unit("steps"),
    Key::optional(
        STEP,
        Kind::Integer(Integers::POSITIVE),
        "fixed_linear and fixed_root: lengths are multiples of it.",
    )
    .unit("tokens"),
    Key::optional(ROOT, Kind::Real(Reals::Positive), "fixed_root: degree of the root."),
];

pub(crate) const KEYS: &[Key] = &[
    ENABLED,
    Key::new(
        "curriculum_type",
        Kind::Choice(&["seqlen"]),
        Literal::Text("seqlen"),
        "What rises: the length of sequences.",
    ),
    Key::optional("min_difficulty", Kind::Integer(Integers::POSITIVE), "Shortest length.")
        .unit("tokens"),
    Key::optional("max_difficulty", Kind::Integer(Integers::POSITIVE), "Longest length.")
        .unit("tokens"),
    Key::optional(
        "schedule_type",
        Kind::Choice(&["fixed_discrete", "fixed_linear", "fixed_root", CUSTOM]),
        "How it rises.",
    ),
    Key::section("schedule_config", SCHEDULE, "Parameters of the rise."),
];

/// The section's part of the plan; `None` where it is off or wrong.
pub(crate) fn resolve(top: &Section<'_>, context: &mut Context<'_>) -> Option<CurriculumPlan> {
    let section = top.section("curriculum_learning");
    if !section.flag(ENABLED.name) {
        return None;
    }
    // All three are asked for before the first that is missing ends it.
    let min = require(&section, "min_difficulty", context);
    let max = require(&section, "max_difficulty", context);
    let kind = section.optional_choice("schedule_type");
    if section.given("schedule_type").is_none() {
        missing(&section, "schedule_type", context);
    }
    let (min_difficulty, max_difficulty, kind) = (min?, max?, kind?);
    if min_difficulty > max_difficulty {
        let message = format!("{min_difficulty} is above max_difficulty {max_difficulty}");
        let remedy = "lower it or raise max_difficulty";
        context.findings.push(section.error("min_difficulty", message, remedy));
        return None;
    }
    let config = section.section("schedule_config");
    let schedule = match kind {
        CUSTOM => {
            let message = "\"custom\" asks for a schedule written in Python";
            let remedy = "use fixed_discrete, fixed_linear or fixed_root";
            context.findings.push(section.error("schedule_type", message, remedy));
            return None;
        }
        "fixed_discrete" => discrete(&config, [min_difficulty, max_difficulty], context)?,
        "fixed_linear" => root(&config, Some(1.0), context)?,
        _ => root(&config, None, context)?,
    };
    Some(CurriculumPlan { min_difficulty, max_difficulty, schedule })
}

/// `fixed_linear` is the root of degree 1; `fixed_root` gives its own.
fn root(
    config: &Section<'_>,
    degree: Option<f64>,
    context: &mut Context<'_>,
) -> Option<CurriculumSchedule> {
    unused(config, &[DIFFICULTY, MAX_STEP], context);
    let total_steps = require(config, TOTAL, context);
    let difficulty_step = require(config, STEP, context);
    let root_degree = match degree {
        Some(degree) => {
            unused(config, &[ROOT], context);
            Some(degree)
        }
        None => {
            if config.given(ROOT).is_none() {
                missing(config, ROOT, context);
            }
            config.optional_real(ROOT)
        }
    };
    if difficulty_step.is_some_and(|step| step % TENSOR_CORE_MULTIPLE != 0) {
        let message =
            "is no multiple of 8: 16-bit products of such lengths are slower on tensor cores";
        context.findings.push(config.note(STEP, message));
    }
    Some(CurriculumSchedule::Root {
        total_steps: total_steps?,
        difficulty_step: difficulty_step?,
        root_degree: root_degree?,
    })
}

fn discrete(
    config: &Section<'_>,
    [min, max]: [usize; 2],
    context: &mut Context<'_>,
) -> Option<CurriculumSchedule> {
    unused(config, &[TOTAL, STEP, ROOT], context);
    for name in [DIFFICULTY, MAX_STEP] {
        if config.given(name).is_none() {
            missing(config, name, context);
        }
    }
    let (lengths, ends) = (config.counts(DIFFICULTY)?, config.counts(MAX_STEP)?);
    let mut refuse = |name, message: String, remedy: &str| {
        context.findings.push(config.error(name, message, remedy));
        None
    };
    if ends.is_empty() || lengths.len() != ends.len() + 1 {
        let message =
            format!("has {} stages, of which max_step ends {}", lengths.len(), ends.len());
        return refuse(DIFFICULTY, message, "give one max_step for each stage but the last one");
    }
    if let Some(pair) = lengths.windows(2).find(|pair| pair[0] > pair[1]) {
        let message = format!("falls from {} to {}", pair[0], pair[1]);
        return refuse(DIFFICULTY, message, "give lengths that rise");
    }
    if let Some(pair) = ends.windows(2).find(|pair| pair[0] >= pair[1]) {
        let message = format!("{} does not come after {}", pair[1], pair[0]);
        return refuse(MAX_STEP, message, "give steps that rise");
    }
    if let Some(length) = lengths.iter().find(|length| !(min..=max).contains(*length)) {
        let message = format!("{length} is not from min_difficulty {min} to max_difficulty {max}");
        return refuse(DIFFICULTY, message, "change the stage or the bounds");
    }
    let (&last, lengths) = lengths.split_last()?;
    let stage = |(&difficulty, last_step)| CurriculumStage { difficulty, last_step };
    Some(CurriculumSchedule::Discrete {
        stages: lengths.iter().zip(ends).map(stage).collect(),
        last,
    })
}

fn require(section: &Section<'_>, name: &str, context: &mut Context<'_>) -> Option<usize> {
    if section.given(name).is_none() {
        missing(section, name, context);
    }
    section.optional_count(name)
}

fn missing(section: &Section<'_>, name: &str, context: &mut Context<'_>) {
    let remedy =
        format!("add it: {}, or set curriculum_learning.enabled to false", section.key(name).kind);
    context.findings.push(section.error(name, "is missing, and the curriculum needs it", remedy));
}

fn unused(config: &Section<'_>, names: &[&str], context: &mut Context<'_>) {
    for name in names.iter().filter(|name| config.given(name).is_some()) {
        let message = "changes nothing: it belongs to another schedule_type";
        context.findings.push(config.warning(name, message, "remove it"));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{CurriculumPlan, CurriculumSchedule, CurriculumStage, Facts, Resolved, Written};

    fn resolve(section: Value) -> Result<Resolved, String> {
        let json = json!({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "curriculum_learning": section});
        let written = Written::from_value(&json).unwrap();
        crate::resolve(&written, &Facts::on_host(1)).map_err(|report| report.to_string())
    }

    fn section(kind: &str, config: Value) -> Value {
        json!({"enabled": true, "curriculum_type": "seqlen", "min_difficulty": 8,
            "max_difficulty": 64, "schedule_type": kind, "schedule_config": config})
    }

    fn schedule(kind: &str, config: Value) -> CurriculumSchedule {
        let CurriculumPlan { min_difficulty, max_difficulty, schedule } =
            resolve(section(kind, config)).unwrap().plan.curriculum.unwrap();
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
            assert_eq!(resolve(off).unwrap().plan.curriculum, None);
        }
    }

    #[test]
    fn what_changes_little_is_noted() {
        let config = json!({"total_curriculum_step": 9, "difficulty_step": 2, "root_degree": 2});
        let notes = resolve(section("fixed_linear", config)).unwrap().notes;
        let notes: Vec<_> = notes.iter().map(ToString::to_string).collect();
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].contains("root_degree: changes nothing"), "{notes:?}");
        assert!(notes[1].contains("difficulty_step: is no multiple of 8"), "{notes:?}");
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
            (section("fixed_cubic", json!({})), ["schedule_type", "none of the choices"]),
            (section("fixed_linear", json!({})), ["total_curriculum_step", "is missing"]),
            (section("fixed_root", json!({"difficulty_step": 8})), ["root_degree", "is missing"]),
            (
                section("fixed_linear", json!({"difficulty_step": 0})),
                ["difficulty_step", "at least 1"],
            ),
            (section("fixed_root", json!({"root_degree": 0})), ["root_degree", "above 0"]),
            (section("fixed_discrete", json!({})), ["schedule_config.max_step", "is missing"]),
            (stages(json!([8, 16]), json!([])), ["difficulty", "each stage but the last"]),
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
