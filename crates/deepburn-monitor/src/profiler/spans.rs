//! The `tracing` layer that receives spans.
//!
//! A span is recorded when a thread exits it. Until then, its start time and fields are stored in
//! the extensions of the registry's span. A span that is entered several times is recorded once for
//! each entry.

use super::Profiler;
use serde_json::{Map, Value};
use std::fmt;
use std::time::Instant;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Returns a layer that records while the profiler is on. At other times its filter rejects all
/// spans.
pub(super) fn layer<S>(profiler: Profiler) -> impl Layer<S> + use<S>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
{
    // A dynamic filter is asked for each span, so recording can begin and end while the program
    // runs.
    let switch = profiler.clone();
    Spans(profiler).with_filter(dynamic_filter_fn(move |metadata, _| {
        metadata.is_span() && metadata.target().starts_with("deepburn") && switch.is_on()
    }))
}

/// The layer, with the profiler that receives the records.
struct Spans(Profiler);

/// The fields of a span and the time at which it was entered.
#[derive(Default)]
struct Timing {
    /// The fields, as JSON.
    args: Map<String, Value>,
    /// The time of the last entry; `None` outside of the span.
    begun: Option<Instant>,
}

impl<S: tracing::Subscriber + for<'span> LookupSpan<'span>> Layer<S> for Spans {
    /// Attaches the fields that the span was created with.
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut timing = Timing::default();
            attributes.record(&mut FieldVisitor(&mut timing.args));
            span.extensions_mut().insert(timing);
        }
    }

    /// Adds fields that are set later, such as the size of a result.
    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(timing) = span.extensions_mut().get_mut::<Timing>()
        {
            values.record(&mut FieldVisitor(&mut timing.args));
        }
    }

    /// Remembers the time of the entry. A span from before the profiled steps has no timing and is
    /// ignored.
    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(timing) = span.extensions_mut().get_mut::<Timing>()
        {
            timing.begun = Some(Instant::now());
        }
    }

    /// Records the time since the entry. The fields are copied, because the span may be entered
    /// again.
    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let left = span.extensions_mut().get_mut::<Timing>().and_then(|timing| {
            // A span may be exited in a profiled step that was entered before it.
            let begun = timing.begun.take()?;
            Some((begun, timing.args.clone()))
        });
        if let Some((begun, args)) = left {
            self.0.record(span.name(), begun, args);
        }
    }
}

/// A visitor that collects fields as JSON.
struct FieldVisitor<'a>(&'a mut Map<String, Value>);

impl FieldVisitor<'_> {
    /// Sets a field.
    fn insert(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for FieldVisitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.insert(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert(field, value);
    }
}
