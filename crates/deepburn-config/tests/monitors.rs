//! Sections of monitors and profilers: resolved plans and errors.

use std::path::Path;

use deepburn_config::{
    FlopsPlan, Job, JobRequest, MonitorPlan, RawConfig, Reporter, Resolved, RunContext, Severity,
    WandbPlan, resolve,
};

fn outcome(sections: &str) -> Result<Resolved, String> {
    let json = format!(r#"{{"train_micro_batch_size_per_gpu": 1, {sections}}}"#);
    let facts = RunContext { total_steps: Some(100), ..RunContext::on_host(1) };
    let written = RawConfig::from_json(&json).map_err(|error| error.to_string())?;
    resolve(&written, &facts).map_err(|report| report.to_string())
}

fn plan(sections: &str) -> MonitorPlan {
    outcome(sections).unwrap_or_else(|report| panic!("{report}")).plan.outputs.monitor
}

#[test]
fn nothing_is_written_unless_it_is_asked_for() {
    assert_eq!(plan(r#""tensorboard": null"#), MonitorPlan::default());
    let off = r#""tensorboard": {"enabled": false, "job_name": ""}, "csv_monitor": {"job_name": "a/b"},
        "profiling": {"enabled": false, "profile_steps": [2, 1]}, "flops_profiler": {"profile_step": 7}"#;
    assert_eq!(plan(off), MonitorPlan::default());
}

#[test]
fn monitors_write_to_their_folder_or_to_the_job_s() {
    let both = plan(
        r#""tensorboard": {"enabled": true},
           "csv_monitor": {"enabled": true, "output_path": "logs/csv", "job_name": "run 1"}"#,
    );
    let (tensorboard, csv) = (both.tensorboard.unwrap(), both.csv.unwrap());
    assert_eq!(tensorboard.under(Path::new("out")), Path::new("out/DeepSpeedJobName"));
    assert_eq!(csv.under(Path::new("out")), Path::new("logs/csv/run 1"));
}

#[test]
fn a_job_name_is_one_folder() {
    for section in ["tensorboard", "csv_monitor"] {
        for (name, rule) in [
            ("", "is empty"),
            ("  ", "is empty"),
            ("..", "cannot name a new folder"),
            (".", "cannot name a new folder"),
            ("a/b", "path separator"),
            ("/etc", "path separator"),
            (r"a\\b", "path separator"),
            (r"a\u0000b", "control character"),
        ] {
            let json = format!(r#""{section}": {{"enabled": true, "job_name": "{name}"}}"#);
            let report = outcome(&json).unwrap_err();
            for part in [&format!("{section}.job_name"), rule, "DeepSpeedJobName"] {
                assert!(report.contains(part), "no {part:?} in {report}");
            }
        }
    }
}

#[test]
fn a_wandb_run_has_a_project() {
    let all =
        plan(r#""wandb": {"enabled": true, "project": "Projekt Köln", "group": "g", "team": "t"}"#);
    let text = |text: &str| text.to_owned();
    assert_eq!(
        all.wandb.unwrap(),
        WandbPlan { project: text("Projekt Köln"), group: Some(text("g")), team: Some(text("t")) }
    );
    let defaults = plan(r#""wandb": {"enabled": true, "group": "", "team": null}"#).wandb.unwrap();
    assert_eq!(defaults, WandbPlan { project: text("deepspeed"), group: None, team: None });
    assert_eq!(plan(r#""wandb": {"enabled": "auto"}"#).wandb, None);
    assert_eq!(plan(r#""wandb": {"enabled": false, "project": "a/b"}"#).wandb, None);
    for (project, rule) in [
        ("", "is empty"),
        ("a/b", "does not allow"),
        ("a:b", "does not allow"),
        (&"x".repeat(129), "128"),
    ] {
        let json = format!(r#""wandb": {{"enabled": true, "project": "{project}"}}"#);
        let report = outcome(&json).unwrap_err();
        for part in ["wandb.project", rule, "\"deepspeed\""] {
            assert!(report.contains(part), "no {part:?} in {report}");
        }
    }
}

/// Returns a job with its monitors. `training` and `deepspeed` are the contents of both sections.
fn job(training: &str, deepspeed: &str) -> (Job, MonitorPlan) {
    let text = format!(
        r#"{{"training": {{"max_steps": 9, {training}}}, "deepspeed": {{"train_micro_batch_size_per_gpu": 1{deepspeed}}}}}"#
    );
    let request = JobRequest::default();
    let (job, written) = Job::parse(&text, "job.json", Path::new(""), &request).unwrap();
    let resolved =
        resolve(&written, &job.run_context()).unwrap_or_else(|report| panic!("{report}"));
    (job, resolved.plan.outputs.monitor)
}

#[test]
fn report_to_enables_the_sections_of_its_programs() {
    let (_, of_section) = job(r#""seed": 1"#, r#", "wandb": {"enabled": true}"#);
    for report_to in [r#""wandb""#, r#"["wandb"]"#, r#"["WandB", "wandb"]"#] {
        for section in
            ["", r#", "wandb": {"enabled": false}"#, r#", "wandb": null"#, r#", "wandb": "auto""#]
        {
            let (job, monitor) = job(&format!(r#""report_to": {report_to}"#), section);
            assert_eq!(job.training.logging.report_to, [Reporter::Wandb]);
            assert_eq!(monitor, of_section, "{report_to}, {section}");
        }
    }
    let (_, both) = job(
        r#""report_to": ["tensorboard", "wandb"]"#,
        r#", "wandb": {"project": "p"}, "tensorboard": {"job_name": "n"}"#,
    );
    assert_eq!(both.wandb.unwrap().project, "p");
    assert_eq!(both.tensorboard.unwrap().job_name, "n");
    for none in [r#""none""#, r#"["none"]"#, "[]", "null"] {
        let (job, monitor) = job(&format!(r#""report_to": {none}"#), "");
        assert_eq!(
            (job.training.logging.report_to, monitor),
            (vec![], MonitorPlan::default()),
            "{none}"
        );
    }
}

#[test]
fn steps_are_a_window_or_a_list() {
    for (steps, windows) in [
        ("[1, 10]", vec![1..=10]),
        ("[4, 4]", vec![4..=4]),
        ("[7]", vec![7..=7]),
        ("[9, 2, 5, 2]", vec![2..=2, 5..=5, 9..=9]),
        ("[1, 1e9]", vec![1..=1_000_000_000]),
    ] {
        let json = format!(r#""profiling": {{"enabled": true, "profile_steps": {steps}}}"#);
        let profile = plan(&json).profile.unwrap();
        assert_eq!(profile.steps, windows, "{steps}");
        assert_eq!(profile.under(Path::new("out")), Path::new("out/profile"));
    }
    for (steps, rule) in [
        ("null", "is missing"),
        ("[]", "is empty"),
        ("[10, 1]", "ends before it begins"),
        ("[0, 3]", "has 0, but steps are integers of at least 1"),
        ("[1, -3]", "has -3"),
        ("[1, 2.5]", "has 2.5"),
        ("[1, \"2\"]", "has \"2\""),
        ("5", "a list"),
        ("\"1-10\"", "a list"),
    ] {
        let json = format!(r#""profiling": {{"enabled": true, "profile_steps": {steps}}}"#);
        let report = outcome(&json).unwrap_err();
        assert!(report.contains("profiling.profile_steps") && report.contains(rule), "{report}");
    }
}

#[test]
fn the_flops_profiler_has_deepspeed_s_defaults() {
    let defaults = FlopsPlan {
        recompute_fwd_factor: 0.0,
        profile_step: 1,
        module_depth: None,
        top_modules: 1,
        detailed: true,
        output_file: None,
        peak_flops: None,
    };
    assert_eq!(plan(r#""flops_profiler": {"enabled": true}"#).flops, Some(defaults));
    let given = r#""flops_profiler": {"enabled": true, "recompute_fwd_factor": 1, "profile_step": 3,
        "module_depth": 2, "top_modules": 5, "detailed": false, "output_file": "flops.txt", "peak_tflops": 989.4}"#;
    let flops = plan(given).flops.unwrap();
    assert_eq!((flops.profile_step, flops.module_depth, flops.top_modules), (3, Some(2), 5));
    assert_eq!(flops.output_file.as_deref(), Some(Path::new("flops.txt")));
    assert!(!flops.detailed && (flops.peak_flops.unwrap() - 989.4e12).abs() < 1.0);
    for (key, value) in [
        ("recompute_fwd_factor", "-1"),
        ("recompute_fwd_factor", "true"),
        ("profile_step", "0"),
        ("profile_step", "1.5"),
        ("module_depth", "-2"),
        ("top_modules", "0"),
        ("detailed", "1"),
        ("output_file", "3"),
        ("peak_tflops", "0"),
        ("depth", "1"),
    ] {
        let json = format!(r#""flops_profiler": {{"enabled": true, "{key}": {value}}}"#);
        let report = outcome(&json).unwrap_err();
        assert!(report.contains(&format!("flops_profiler.{key}")), "{report}");
    }
}

#[test]
fn steps_beyond_the_run_are_warned_about() {
    for (section, key) in [
        (r#""profiling": {"enabled": true, "profile_steps": [101, 110]}"#, "profile_steps"),
        (r#""flops_profiler": {"enabled": true, "profile_step": 101}"#, "profile_step"),
    ] {
        let notes = outcome(section).unwrap().notes;
        let warned = notes.iter().any(|note| {
            note.severity == Severity::Warning
                && note.key.ends_with(key)
                && note.message.contains("step 101 is never reached")
        });
        assert!(warned, "{notes:#?}");
    }
    let early = r#""profiling": {"enabled": true, "profile_steps": [100, 110]}"#;
    let notes = outcome(early).unwrap().notes;
    assert!(notes.iter().all(|note| !note.message.contains("never reached")), "{notes:#?}");
}
