//! Lists and dictionaries that count how often they are walked.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{
    DynObject, Enumerator, Kwargs, Object, ObjectRepr, Tuple, Value, ValueKind, ValueOrKwargs,
};
use minijinja::{Error, State};

use super::{invalid, work};

/// The maximum nesting of tuples in tuples.
const MAX_TUPLES: usize = 8;

/// How often a text can be read for the work of an item with this text. Most reads are followed by
/// operations that the engine charges.
const READS_OF_ITEM: usize = 32;

/// The maximum bytes of a text in a tuple that is repeated.
const MAX_REPEATED_TEXT: usize = 1024;

/// A list or a dictionary whose walks count as [work](super::work), as do walks of the lists and
/// dictionaries in it.
///
/// All values that a template reads or stores are counted. A value that contains another one many
/// times, or a list that is repeated, therefore consists of counted ones, apart from the values of
/// a single expression.
pub(super) struct Counted(DynObject);

impl Counted {
    fn items(&self) -> Option<impl Iterator<Item = Value> + use<>> {
        work::walk();
        Some(self.0.try_iter()?.map(|item| {
            work::item(text_bytes(&item));
            of_container(item)
        }))
    }

    fn pairs(&self) -> Option<impl Iterator<Item = (Value, Value)> + use<>> {
        work::walk();
        Some(self.0.try_iter_pairs()?.map(|(key, value)| {
            work::item(text_bytes(&key) + text_bytes(&value));
            (key, of_container(value))
        }))
    }
}

impl Object for Counted {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        self.0.repr()
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get_value(key).map(of_read)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.0.get_value_by_str(key).map(of_read)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let enumerator = match self.0.repr() {
            ObjectRepr::Map => self.pairs().map(|it| Enumerator::KeyValueIter(Box::new(it))),
            _ => self.items().map(|it| Enumerator::Iter(Box::new(it))),
        };
        enumerator.unwrap_or(Enumerator::NonEnumerable)
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        work::walk();
        self.0.enumerator_len()
    }

    fn call(self: &Arc<Self>, state: &mut State, args: &[Value]) -> Result<Value, Error> {
        self.0.call(state, args)
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        self.0.call_method(state, method, args)
    }
}

impl fmt::Debug for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.repr() {
            ObjectRepr::Map => f.debug_map().entries(self.pairs().into_iter().flatten()).finish(),
            _ => f.debug_list().entries(self.items().into_iter().flatten()).finish(),
        }
    }
}

fn text_bytes(value: &Value) -> usize {
    value.as_str().map_or(0, str::len)
}

/// Returns a value of a container that is read on its own.
fn of_read(value: Value) -> Value {
    work::item(text_bytes(&value) / READS_OF_ITEM);
    of_container(value)
}

/// Returns a value of a container as a counted one. The engine reports values that are errors.
fn of_container(value: Value) -> Value {
    counted(value).unwrap_or_else(Value::from)
}

/// The filter of values that a template reads or stores: lists and dictionaries become counted
/// ones, and lists that are computed while they are walked become lists of items.
///
/// # Errors
/// Returns an error if an item could not be computed, or if tuples are nested too deeply.
pub(super) fn counted(value: Value) -> Result<Value, Error> {
    let Some(object) = value.as_object() else { return Ok(value) };
    if object.downcast_ref::<Counted>().is_some() {
        return Ok(value);
    }
    // A namespace is changed in place, so a counted copy would not see the changes.
    if is_namespace(object) {
        object
            .try_iter_pairs()
            .into_iter()
            .flatten()
            .for_each(|(_, it)| work::item(text_bytes(&it)));
        return Ok(value);
    }
    match object.repr() {
        ObjectRepr::Plain => Ok(value),
        _ if value.is_tuple() => tuple(&value, 0),
        ObjectRepr::Iterable => {
            // Stored as items, because computing them again in each walk would not be charged.
            let mut items = Vec::new();
            for item in value.try_iter()?.checked() {
                work::item(0);
                items.push(item?);
            }
            Ok(of(DynObject::new(Arc::new(items))))
        }
        _ => Ok(of(object.clone())),
    }
}

fn of(object: DynObject) -> Value {
    Value::from_object(Counted(object))
}

/// Returns a tuple of counted values. The engine knows tuples by their type.
fn tuple(value: &Value, depth: usize) -> Result<Value, Error> {
    if depth > MAX_TUPLES {
        return Err(invalid(format!("tuples are nested more than {MAX_TUPLES} times")));
    }
    let items = value.try_iter()?.map(|item| {
        work::item(text_bytes(&item));
        if item.is_tuple() { tuple(&item, depth + 1) } else { counted(item) }
    });
    Ok(Value::from(Tuple::from(items.collect::<Result<Vec<_>, _>>()?)))
}

/// The filter of iterated values. Python does not iterate over `None`; minijinja does.
///
/// # Errors
/// Returns an error for `None`, and like [`counted`].
pub(super) fn iterable(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::None => Err(invalid("'NoneType' object is not iterable")),
        _ => counted(value),
    }
}

/// The filter of values that `*` repeats. The engine compares tuples itself, so long texts in them
/// would not be counted.
///
/// # Errors
/// Returns an error for a tuple that contains a long text or a tuple, and like [`counted`].
pub(super) fn factor(value: Value) -> Result<Value, Error> {
    let is_long = |it: Value| it.is_tuple() || text_bytes(&it) > MAX_REPEATED_TEXT;
    match value.is_tuple() && value.try_iter()?.any(is_long) {
        true => Err(invalid(format!(
            "a tuple that contains a tuple or a text of more than {MAX_REPEATED_TEXT} bytes cannot be repeated; use a list"
        ))),
        false => counted(value),
    }
}

/// The function `dict`.
///
/// # Errors
/// Returns an error like minijinja's function.
pub(super) fn dict(value: Option<Value>, update_with: Kwargs) -> Result<Value, Error> {
    counted(minijinja::functions::dict(value, update_with)?)
}

/// The function `range`.
///
/// # Errors
/// Returns an error like minijinja's function.
pub(super) fn range(
    lower: isize,
    upper: Option<isize>,
    step: Option<isize>,
) -> Result<Value, Error> {
    counted(minijinja::functions::range(lower, upper, step)?)
}

/// The filter of values that become attributes of a namespace. A namespace in itself would be
/// walked without an end.
///
/// # Errors
/// Returns an error if the value is a namespace, and like [`counted`].
pub(super) fn attribute(value: Value) -> Result<Value, Error> {
    match value.as_object().is_some_and(is_namespace) {
        true => Err(invalid("a namespace cannot be an attribute of a namespace")),
        false => counted(value),
    }
}

/// The function `namespace`.
///
/// # Errors
/// Returns an error like [`attribute`] and minijinja's function.
pub(super) fn namespace(defaults: Option<ValueOrKwargs>) -> Result<Value, Error> {
    let Some(defaults) = defaults.map(Value::from) else {
        return minijinja::functions::namespace(None);
    };
    let pairs = defaults.as_object().filter(|it| matches!(it.repr(), ObjectRepr::Map));
    let Some(pairs) = pairs.and_then(DynObject::try_iter_pairs) else {
        return minijinja::functions::namespace(Some(defaults.into()));
    };
    let named = pairs.filter_map(|(key, value)| Some((key.as_str()?.to_owned(), value)));
    let named = named.map(|(key, value)| {
        work::item(text_bytes(&value));
        Ok((key, attribute(value)?))
    });
    let named: Kwargs = named.collect::<Result<Vec<_>, Error>>()?.into_iter().collect();
    minijinja::functions::namespace(Some(Value::from(named).into()))
}

fn is_namespace(object: &DynObject) -> bool {
    // The engine does not export the type.
    object.type_name().ends_with("::Namespace")
}
