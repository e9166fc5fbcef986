//! Paths of keys: `zero_optimization.stage`, `param_groups[0].lr`.

/// `path.name`, or `name` at the top.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Whether `path` is `section` or a key inside of it.
pub(crate) fn is_at_or_below(path: &str, section: &str) -> bool {
    let rest = path.strip_prefix(section);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// A path without the type of a variant, and without the mark of a list: `optimizer.params.lr` for `optimizer.params[AdamW].lr`.
pub(crate) fn without_brackets(path: &str) -> String {
    match (path.find('['), path.find(']')) {
        (Some(start), Some(end)) if start < end => {
            format!("{}{}", &path[..start], &path[end + 1..])
        }
        _ => path.to_owned(),
    }
}
