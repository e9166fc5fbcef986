//! Rewrites the tags of a template that minijinja reads differently from Jinja2.
//!
//! - `{% generation %}` ... `{% endgeneration %}`, an extension of `transformers`, becomes a filter block. Only the
//!   words inside the tag change, so whitespace control stays the same. The `with` block inside it has a scope of its
//!   own, as the extension's macro has.
//! - `{% for x in y %}` checks that `y` is not `none`, over which Python does not iterate.
//!
//! Comments, `raw` blocks, and strings inside tags are skipped. Line numbers stay the same.

/// The name of the filter that marks generated text.
pub(super) const GENERATION: &str = "__deepburn_generation";

/// The name of the filter that rejects `none`.
pub(super) const ITERABLE: &str = "__deepburn_iterable";

/// A template with rewritten tags.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rewritten {
    /// The template for minijinja.
    pub(super) source: String,
    /// Whether it has a `generation` tag.
    pub(super) marks_generation: bool,
}

/// Rewrites the tags of `source`.
pub(super) fn rewrite(source: &str) -> Rewritten {
    let mut marks_generation = false;
    let source = with_statements(source, |open, body, close| match body.trim() {
        "generation" => {
            marks_generation = true;
            Some(format!("{{%{open} filter {GENERATION} %}}{{% with {close}%}}"))
        }
        "endgeneration" => Some(format!("{{%{open} endwith %}}{{% endfilter {close}%}}")),
        _ => iterated(body).map(|(start, end)| {
            format!(
                "{{%{open}{} ({})|{ITERABLE} {}{close}%}}",
                &body[..start],
                &body[start..end],
                &body[end..]
            )
        }),
    });
    Rewritten { source, marks_generation }
}

/// Returns `source` without `generation` tags, for programs that do not know them. A condition that is always true takes
/// their place, because a statement removes spaces and line ends around it. Variables that are set inside are visible
/// after it.
pub(super) fn without_generation(source: &str) -> String {
    with_statements(source, |open, body, close| match body.trim() {
        "generation" => Some(format!("{{%{open} if true {close}%}}")),
        "endgeneration" => Some(format!("{{%{open} endif {close}%}}")),
        _ => None,
    })
}

/// Returns `source` with other statements. `replace` gets the mark of whitespace control at the start of a statement, its
/// body, and the mark at its end; it returns `None` to keep the statement.
fn with_statements(
    source: &str,
    mut replace: impl FnMut(&str, &str, &str) -> Option<String>,
) -> String {
    let mut written = String::new();
    let mut rest = source;
    while let Some(start) = next_opening(rest) {
        written.push_str(&rest[..start]);
        rest = &rest[start..];
        let length = match &rest[..2] {
            "{#" => rest.find("#}").map(|end| end + 2),
            "{{" => tag_length(rest, "}}"),
            _ => raw_length(rest).or_else(|| tag_length(rest, "%}")),
        };
        // An unclosed tag is reported by the parser.
        let (tag, after) = rest.split_at(length.unwrap_or(rest.len()));
        match statement(tag).and_then(|[open, body, close]| {
            let replaced = replace(open, body, close)?;
            Some((replaced, close.len() + 2))
        }) {
            Some((replaced, end)) => {
                // The lines of the tag stay, so that errors name the right line.
                let lost = newlines(tag).saturating_sub(newlines(&replaced));
                let (inner, end) = replaced.split_at(replaced.len() - end);
                written.extend([inner, &"\n".repeat(lost), end]);
            }
            None => written.push_str(tag),
        }
        rest = after;
    }
    written.push_str(rest);
    written
}

/// Returns the parts of a statement: the mark of whitespace control at its start, its body, and the mark at its end.
fn statement(tag: &str) -> Option<[&str; 3]> {
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let open = inner.len() - inner.trim_start_matches(['-', '+']).len();
    let close = inner.trim_end_matches(['-', '+']).len().max(open);
    Some([&inner[..open], &inner[open..close], &inner[close..]])
}

fn newlines(text: &str) -> usize {
    text.bytes().filter(|it| *it == b'\n').count()
}

/// Returns the position of the next `{%`, `{{` or `{#`.
fn next_opening(text: &str) -> Option<usize> {
    let mut from = 0;
    while let Some(found) = text[from..].find('{') {
        let start = from + found;
        if matches!(text.as_bytes().get(start + 1), Some(b'%' | b'{' | b'#')) {
            return Some(start);
        }
        from = start + 1;
    }
    None
}

/// The strings and brackets around the bytes of an expression.
#[derive(Default)]
struct Nesting {
    /// The number of open brackets.
    depth: usize,
    /// The quote that opened a string.
    quote: Option<u8>,
    /// Whether the byte before is a backslash in a string.
    is_escaped: bool,
}

impl Nesting {
    /// Returns whether the next byte is outside of strings and brackets.
    fn is_outside(&self) -> bool {
        self.depth == 0 && self.quote.is_none()
    }

    /// Moves behind the next byte.
    fn pass(&mut self, byte: u8) {
        match self.quote {
            Some(_) if self.is_escaped => self.is_escaped = false,
            Some(_) if byte == b'\\' => self.is_escaped = true,
            Some(open) if byte == open => self.quote = None,
            Some(_) => {}
            None => match byte {
                b'"' | b'\'' => self.quote = Some(byte),
                b'(' | b'[' | b'{' => self.depth += 1,
                b')' | b']' | b'}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            },
        }
    }
}

/// Returns the length of a tag that ends with `close`, which strings and brackets may contain.
fn tag_length(text: &str, close: &str) -> Option<usize> {
    let mut nesting = Nesting::default();
    for (index, byte) in text.bytes().enumerate().skip(2) {
        if nesting.is_outside() && text.as_bytes()[index..].starts_with(close.as_bytes()) {
            return Some(index + 2);
        }
        nesting.pass(byte);
    }
    None
}

/// Returns the length of a `raw` block that starts the text.
fn raw_length(text: &str) -> Option<usize> {
    fn word(text: &str) -> Option<(&str, usize)> {
        let inner = text.get(2..)?;
        let inner = &inner[..inner.find("%}")?];
        Some((inner.trim_matches(['-', '+']).trim(), inner.len() + 4))
    }
    let (first, mut from) = word(text)?;
    if first != "raw" {
        return None;
    }
    loop {
        from += text[from..].find("{%")?;
        let (name, length) = word(&text[from..])?;
        if name == "endraw" {
            return Some(from + length);
        }
        from += 2;
    }
}

/// Returns the range of the iterated expression in the body of a `for` tag.
///
/// In Jinja2, the expression ends at a condition (`if`) or at `recursive`, outside of brackets and strings.
fn iterated(body: &str) -> Option<(usize, usize)> {
    let mut words = words(body);
    if words.next()? != (body.len() - body.trim_start().len(), "for") {
        return None;
    }
    let (keyword, _) = words.by_ref().find(|(_, word)| *word == "in")?;
    let start = keyword + 2;
    let end = words.find(|(_, word)| matches!(*word, "if" | "recursive"));
    let end = end.map_or(body.len(), |(end, _)| end);
    (!body[start..end].trim().is_empty()).then_some((start, end))
}

/// Returns the words of an expression that are outside of strings and brackets, with their positions.
fn words(body: &str) -> impl Iterator<Item = (usize, &str)> {
    let bytes = body.as_bytes();
    let (mut index, mut nesting) = (0, Nesting::default());
    std::iter::from_fn(move || {
        while index < bytes.len() {
            let start = index;
            index += 1;
            if nesting.is_outside() && is_word(bytes[start]) {
                while index < bytes.len() && is_word(bytes[index]) {
                    index += 1;
                }
                return Some((start, &body[start..index]));
            }
            nesting.pass(bytes[start]);
        }
        None
    })
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_filters() {
        let it = rewrite("a{%- generation -%}b{%+ endgeneration %}c");
        let expected = format!(
            "a{{%- filter {GENERATION} %}}{{% with -%}}b{{%+ endwith %}}{{% endfilter %}}c"
        );
        assert_eq!(it, Rewritten { source: expected, marks_generation: true });
    }

    #[test]
    fn generation_tags_are_replaced_with_their_whitespace_control() {
        let text = "a{%- generation -%}b{%+ endgeneration %}c{% for x in y %}";
        let expected = "a{%- if true -%}b{%+ endif %}c{% for x in y %}";
        assert_eq!(without_generation(text), expected);
        assert_eq!(without_generation("{%\ngeneration\n-%}"), "{% if true \n\n-%}");
    }

    #[test]
    fn strings_comments_and_raw_blocks_stay() {
        for text in [
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{% raw %}{% generation %}{% for a in b %}{%- endraw -%}",
            "{{ {'a': {'b': 1}} }}{% set x = '%}' %}",
            "{% set for_in = 1 %}{% if a in b %}{",
            "{% unclosed '",
            "{%} {% raw %} {%}",
            "{",
        ] {
            assert_eq!(rewrite(text), Rewritten { source: text.into(), marks_generation: false });
            assert_eq!(without_generation(text), text);
        }
    }

    #[test]
    fn iterated_expressions_are_checked() {
        let of = |text: &str| rewrite(text).source.replace(ITERABLE, "i");
        assert_eq!(of("{%- for a in b -%}"), "{%- for a in ( b )|i -%}");
        assert_eq!(of("{% for a, b in c.items() %}"), "{% for a, b in ( c.items() )|i %}");
        assert_eq!(
            of("{% for a in [x if y else z] if a %}"),
            "{% for a in ( [x if y else z] )|i if a %}"
        );
        assert_eq!(
            of("{% for a in 'in if' recursive %}"),
            "{% for a in ( 'in if' )|i recursive %}"
        );
        assert_eq!(of("{% for a in 1, 2 %}"), "{% for a in ( 1, 2 )|i %}");
        assert_eq!(of("{%\nfor a in\n b %}"), "{%\nfor a in (\n b )|i %}");
    }

    #[test]
    fn lines_stay() {
        for text in ["{%\ngeneration\n%}x{%- endgeneration\n-%}y", "{%\nfor\na in\n b\nif c\n-%}"] {
            assert_eq!(newlines(&rewrite(text).source), newlines(text), "{text}");
        }
    }
}
