//! Paths of keys: `zero_optimization.stage`, `param_groups[0].lr`.

/// Returns `path.name`, or `name` if `path` is empty.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Returns whether `path` is `section` or a key below it.
pub(crate) fn is_at_or_below(path: &str, section: &str) -> bool {
    let rest = path.strip_prefix(section);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Removes the type of a variant or the brackets of a list from a path: `optimizer.params.lr` for
/// `optimizer.params[AdamW].lr`.
pub(crate) fn without_brackets(path: &str) -> String {
    match (path.find('['), path.find(']')) {
        (Some(start), Some(end)) if start < end => {
            format!("{}{}", &path[..start], &path[end + 1..])
        }
        _ => path.to_owned(),
    }
}
