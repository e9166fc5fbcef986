//! Profiles of threads that simulate ranks.

use super::*;

fn profiler(windows: Vec<RangeInclusive<u64>>, folder: &Path) -> Profiler {
    let profiler = Profiler::idle();
    profiler.profile(windows, folder);
    profiler
}
use tracing_subscriber::layer::SubscriberExt;

/// Runs steps 1 to 4 with spans on two ranks, and profiles the steps in `windows`.
fn profiled(windows: Vec<RangeInclusive<u64>>, folder: &Path) -> Profiler {
    let profiler = profiler(windows, folder);
    // The filter of log messages belongs to the layer that prints them.
    let subscriber = tracing_subscriber::registry().with(profiler.layer());
    let dispatch = tracing::Dispatch::new(subscriber);
    thread::scope(|scope| {
        for rank in 0..2_usize {
            let (profiler, dispatch) = (profiler.clone(), dispatch.clone());
            let work = move || {
                tracing::dispatcher::with_default(&dispatch, || run_rank(&profiler, rank));
            };
            thread::Builder::new().name(format!("rank {rank}")).spawn_scoped(scope, work).unwrap();
        }
    });
    profiler
}

fn run_rank(profiler: &Profiler, rank: usize) {
    for step in 1..=4_u64 {
        profiler.begin_step(step);
        {
            let _forward = tracing::info_span!("forward", layer = 3, name = "h.0").entered();
            let _inside = tracing::trace_span!("gather", bytes = tracing::field::Empty)
                .entered()
                .record("bytes", 4096_u64);
            let _foreign = tracing::info_span!(target: "other", "foreign").entered();
        }
        profiler.memory(rank, &[("parameters", 1 << 20), ("gradients", step << 20)]);
        profiler.end_step(step);
    }
}

fn read(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("trace.json")).unwrap()).unwrap()
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["name"] == name).collect()
}

#[test]
fn a_trace_has_a_track_for_each_rank_and_the_steps_that_were_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let profiler = profiler(vec![2..=3], folder.path());
    let subscriber = tracing_subscriber::registry().with(profiler.layer());
    let dispatch = tracing::Dispatch::new(subscriber);
    // The ranks run one after the other: while a rank is inside a step, the memory of all ranks is
    // recorded.
    for rank in [1, 0] {
        let (profiler, dispatch) = (profiler.clone(), dispatch.clone());
        let work =
            move || tracing::dispatcher::with_default(&dispatch, || run_rank(&profiler, rank));
        thread::Builder::new().name(format!("rank {rank}")).spawn(work).unwrap().join().unwrap();
    }
    assert!(profiler.finish().unwrap());
    let trace = read(folder.path());
    let events = trace["traceEvents"].as_array().unwrap();
    let tracks = named(events, "thread_name");
    let tracks: Vec<_> = tracks.iter().map(|it| (&it["args"]["name"], &it["tid"])).collect();
    assert_eq!(tracks, [(&json!("rank 0"), &json!(1)), (&json!("rank 1"), &json!(0))]);
    let steps: Vec<_> = named(events, "step")
        .iter()
        .map(|it| (it["tid"].clone(), it["args"]["step"].clone()))
        .collect();
    let expected = [(0, 2), (0, 3), (1, 2), (1, 3)].map(|(tid, step)| (json!(tid), json!(step)));
    assert_eq!(steps, expected);
    assert_eq!(named(events, "forward").len(), 4);
    assert_eq!(named(events, "forward")[0]["args"], json!({"layer": 3, "name": "h.0"}));
    assert_eq!(named(events, "gather")[0]["args"], json!({"bytes": 4096}));
    assert_eq!(named(events, "foreign").len(), 0);
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        assert!(ts >= 0.0 && dur >= 0.0 && event["pid"] == std::process::id());
    }
    // The spans of a step are inside the step's own span.
    let (step, gather) = (named(events, "step")[0], named(events, "gather")[0]);
    let end = |it: &Value| it["ts"].as_f64().unwrap() + it["dur"].as_f64().unwrap();
    assert!(step["ts"].as_f64() <= gather["ts"].as_f64() && end(gather) <= end(step));
    let counters = named(events, "memory of rank 1 in bytes");
    assert_eq!(counters.len(), 2);
    assert_eq!(counters[1]["args"], json!({"parameters": 1 << 20, "gradients": 3 << 20}));
}

#[test]
fn ranks_at_the_same_time_leave_a_memory_timeline() {
    let folder = tempfile::tempdir().unwrap();
    let profiler = profiled(vec![1..=1, 3..=4], &folder.path().join("a/b"));
    assert!(profiler.finish().unwrap());
    let table = fs::read_to_string(folder.path().join("a/b/memory.csv")).unwrap();
    let lines: Vec<_> = table.lines().collect();
    assert_eq!(lines[0], "microseconds,rank,category,bytes");
    // Step 2 of one rank may overlap a step of the other rank.
    assert!((13..=17).contains(&lines.len()), "{table}");
    assert!(lines.iter().any(|line| line.ends_with(",1,gradients,4194304")), "{table}");
    let page = fs::read_to_string(folder.path().join("a/b/memory.html")).unwrap();
    assert!(page.contains("<figcaption>Rank 0</figcaption>") && page.contains("Rank 1"));
    assert_eq!(page.matches("</svg>").count(), 2);
}

#[test]
fn a_run_that_ends_before_its_window_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let profiler = profiled(vec![100..=110], &folder.path().join("profile"));
    assert!(!profiler.finish().unwrap());
    assert!(!folder.path().join("profile").exists());
}

#[test]
fn a_step_that_was_never_ended_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let profiler = profiler(vec![1..=2], folder.path());
    profiler.begin_step(1);
    profiler.begin_step(2);
    profiler.end_step(7);
    assert!(profiler.is_on());
    assert!(profiler.finish().unwrap() && !profiler.is_on());
    assert_eq!(named(read(folder.path())["traceEvents"].as_array().unwrap(), "step").len(), 2);
}

#[test]
fn errors_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    fs::write(&taken, "").unwrap();
    let profiler = profiler(vec![1..=1], &taken);
    profiler.begin_step(1);
    let message = profiler.finish().unwrap_err().to_string();
    assert!(message.contains("taken"), "{message}");
}

#[test]
fn many_categories_and_moments_fit_a_page() {
    let bytes: Vec<_> = (0..20).map(|i| (format!("category {i}"), 1 << 20)).collect();
    let samples: Vec<_> = (0..1000)
        .map(|i| MemorySample { at: f64::from(i), rank: 3, bytes: bytes.clone() })
        .collect();
    let page = memory::to_html(&samples).unwrap();
    assert!(page.contains("Rank 3") && page.contains("</i>other</span>") && page.len() < 200_000);
}
