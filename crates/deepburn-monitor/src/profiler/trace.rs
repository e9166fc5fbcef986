//! Chrome's trace format as a JSON object: complete events, counters and names of tracks. Times are
//! in microseconds.
//!
//! Every thread is a track (`tid`) with its name, and the memory of each rank is a counter, which
//! viewers draw as a stacked area. See "Trace Event Format" in the documentation of Chromium.

use super::Recording;
use serde_json::{Map, Value, json};

/// A completed span, for an `X` event.
#[derive(Debug, Clone)]
pub(super) struct Complete {
    /// The name of the span.
    pub(super) name: &'static str,
    /// The index of its thread in `Recording::threads`.
    pub(super) track: usize,
    /// Microseconds since the start of the profiler.
    pub(super) begun: f64,
    /// The duration in microseconds.
    pub(super) lasted: f64,
    /// The fields of the span.
    pub(super) args: Map<String, Value>,
}

/// Returns the complete trace.
///
/// The whole text is built in memory.
pub(super) fn to_json(recording: &Recording) -> String {
    let pid = std::process::id();
    let mut events = vec![json!({
        "name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": "DeepBurn"},
    })];
    // Tracks are sorted by name, so ranks are in order.
    let mut order: Vec<usize> = (0..recording.threads.len()).collect();
    order.sort_by_key(|track| natural(&recording.threads[*track].1));
    for (place, track) in order.into_iter().enumerate() {
        let name = &recording.threads[track].1;
        let head = |kind: &str, args: Value| json!({"name": kind, "ph": "M", "pid": pid, "tid": track, "args": args});
        events.push(head("thread_name", json!({"name": name})));
        events.push(head("thread_sort_index", json!({"sort_index": place})));
    }
    events.extend(recording.spans.iter().map(|span| {
        json!({
            "name": span.name, "cat": "deepburn", "ph": "X", "pid": pid, "tid": span.track,
            "ts": span.begun, "dur": span.lasted, "args": span.args,
        })
    }));
    events.extend(recording.memory.iter().map(|sample| {
        let bytes: Map<_, _> =
            sample.bytes.iter().map(|(name, bytes)| (name.clone(), json!(bytes))).collect();
        json!({
            "name": format!("memory of rank {} in bytes", sample.rank), "ph": "C", "pid": pid,
            "ts": sample.at, "args": bytes,
        })
    }));
    let other = json!({"dropped_spans": recording.dropped});
    json!({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}).to_string()
}

/// Returns a sort key that puts `rank 10` after `rank 2`.
fn natural(name: &str) -> (&str, u64) {
    // Names are compared by text first and by number second.
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem, name[stem.len()..].parse().unwrap_or(0))
}
