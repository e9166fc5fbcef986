//! Rewrites the tags of a template that minijinja reads differently from Jinja2.
//!
//! - `{% generation %}` ... `{% endgeneration %}`, an extension of `transformers`, becomes a filter
//!   block. Only the words inside the tag change, so whitespace control stays the same. The `with`
//!   block inside it has a scope of its own, as the extension's macro has.
//! - `{% for x in y %}` checks that `y` is not `none`, over which Python does not iterate.
//! - Values that are stored are counted (`counted.rs`): in `{% set %}`, `{% with %}`, and by macros
//!   and loops, as are values that `*` repeats, and values that are compared, indexed or kept in
//!   lists (`loads.rs`).
//! - Strings have the escapes of Python (`escapes.rs`).
//! - `{% raw %}` keeps the line end after it.
//!
//! Comments, texts of `raw` blocks, and strings inside tags are skipped. Line numbers stay the
//! same.

use std::ops::Range;

use super::escapes::with_escapes;
use super::expression::{Token, TokenKind, tokens, weight, with_filtered_products};
use super::loads::with_charged_loads;

/// The name of the filter that marks generated text.
pub(super) const GENERATION: &str = "__deepburn_generation";

/// The name of the filter that rejects `none`.
pub(super) const ITERABLE: &str = "__deepburn_iterable";

/// The filter of values that are stored, and of values that are read by operations that the engine
/// does not charge.
pub(super) const COUNTED: &str = "__deepburn_counted";

/// The filter of values that are repeated.
pub(super) const FACTOR: &str = "__deepburn_factor";

/// The filter of values that become attributes of a namespace.
pub(super) const COUNTED_ATTRIBUTE: &str = "__deepburn_counted_attribute";

/// A template with rewritten tags.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rewritten {
    /// The template for minijinja.
    pub(super) source: String,
    /// Whether it has a `generation` tag.
    pub(super) marks_generation: bool,
    /// The [weight] of its heaviest tag.
    pub(super) heaviest: usize,
}

/// Rewrites the tags of `source`.
pub(super) fn rewrite(source: &str) -> Rewritten {
    let (mut marks_generation, mut heaviest) = (false, 0);
    let source = with_tags(source, |tag| {
        let TemplateTag { open, body, close, .. } = tag;
        if let Some((raw, text)) = raw_text(body).filter(|_| !tag.is_output()) {
            //= jinja2 3.1.6 lexer.py raw_begin
            // Jinja2 keeps a line end after `{% raw %}`; minijinja removes it without the mark.
            let mark = if raw.ends_with(['-', '+']) { "" } else { "+" };
            return Some(format!("{{%{open}{raw}{mark}%}}{text}{close}%}}"));
        }
        let escaped = with_escapes(body);
        let body = escaped.as_deref().unwrap_or(body);
        heaviest = heaviest.max(weight(body));
        let factors = with_filtered_products(body, FACTOR);
        let charged =
            with_charged_loads(factors.as_deref().unwrap_or(body), tag.is_output(), COUNTED);
        let counted = charged.or(factors);
        let is_changed = counted.is_some() || escaped.is_some();
        let counted = counted.as_deref().unwrap_or(body);
        if tag.is_output() {
            return is_changed.then(|| format!("{{{{{open}{counted}{close}}}}}"));
        }
        match body.trim() {
            "generation" => {
                marks_generation = true;
                return Some(format!("{{%{open} filter {GENERATION} %}}{{% with {close}%}}"));
            }
            "endgeneration" => {
                return Some(format!("{{%{open} endwith %}}{{% endfilter {close}%}}"));
            }
            _ => {}
        }
        match with_counted_values(counted) {
            Some((body, names)) => {
                let sets = names.iter().map(|it| format!("%}}{{% set {it} = {it}|{COUNTED} "));
                Some(format!("{{%{open}{body}{}{close}%}}", sets.collect::<String>()))
            }
            None => is_changed.then(|| format!("{{%{open}{counted}{close}%}}")),
        }
    });
    Rewritten { source, marks_generation, heaviest }
}

/// Returns the tag and the text of a `raw` block without its ends, `None` for other tags.
fn raw_text(block: &str) -> Option<(&str, &str)> {
    let (tag, text) = block.split_once("%}")?;
    (tag.trim_end_matches(['-', '+']).trim() == "raw").then_some((tag, text))
}

/// Returns the body of a statement that stores values, with the filters that count them, and the
/// names of variables to filter after it; `None` for other statements.
fn with_counted_values(body: &str) -> Option<(String, Vec<&str>)> {
    let tokens = tokens(body);
    let filtered = |range: Range<usize>, filter: &str| {
        let [before, value, after] =
            [&body[..range.start], &body[range.clone()], &body[range.end..]];
        format!("{before} ({value})|{filter} {after}")
    };
    match tokens.first()?.text {
        "for" => {
            let keyword = tokens.iter().position(|it| it.is_word("in"))?;
            let value = iterated(body, &tokens[keyword..])?;
            // Calls of a recursive loop bring values that the filter of the tag has not seen.
            let is_recursive = tokens.iter().any(|it| it.is_word("recursive"));
            let targets =
                tokens[1..keyword].iter().filter(|it| it.kind == TokenKind::Word && is_recursive);
            Some((filtered(value, ITERABLE), targets.map(|it| it.text).collect()))
        }
        "set" => {
            let equals = tokens.iter().position(|it| it.is_symbol("="))?;
            let is_attribute = tokens[..equals].iter().any(|it| it.text == ".");
            let filter = if is_attribute { COUNTED_ATTRIBUTE } else { COUNTED };
            let value = tokens[equals].end()..body.len();
            (!body[value.clone()].trim().is_empty()).then(|| (filtered(value, filter), Vec::new()))
        }
        "with" => {
            // Counted after the tag, because the end of each value is not known.
            let names = tokens.windows(2).filter(|it| it[1].is_symbol("="));
            Some((body.to_owned(), names.map(|it| it[0].text).collect()))
        }
        "macro" | "call" => {
            let open = tokens.iter().position(|it| it.kind == TokenKind::Open)?;
            let is_declaration = tokens[0].text == "macro" || open == 1;
            let parameters = tokens[open..].windows(2).take_while(|it| it[1].depth > 0);
            let names = parameters.filter(|it| it[0].depth <= 1 && matches!(it[0].text, "(" | ","));
            let names = names.filter(|it| it[1].kind == TokenKind::Word && it[1].depth == 1);
            let names = names.map(|it| it[1].text).collect();
            is_declaration.then(|| (body.to_owned(), names))
        }
        _ => None,
    }
}

/// Returns `source` without `generation` tags, for programs that do not know them. A condition that
/// is always true takes their place, because a statement removes spaces and line ends around it.
/// Variables that are set inside are visible after it.
pub(super) fn without_generation(source: &str) -> String {
    with_tags(source, |TemplateTag { opening, open, body, close }| match (*opening, body.trim()) {
        ("{%", "generation") => Some(format!("{{%{open} if true {close}%}}")),
        ("{%", "endgeneration") => Some(format!("{{%{open} endif {close}%}}")),
        _ => None,
    })
}

/// Returns `source` with other tags. `replace` returns `None` to keep a tag.
fn with_tags(source: &str, mut replace: impl FnMut(&TemplateTag<'_>) -> Option<String>) -> String {
    let mut written = String::new();
    let mut rest = source;
    while let Some(start) = next_opening(rest) {
        written.push_str(&rest[..start]);
        rest = &rest[start..];
        let length = match &rest[..2] {
            // Quotes and brackets mean nothing in a comment.
            "{#" => rest.find("#}").map(|end| end + 2),
            "{{" => tag_length(rest, "}}"),
            // A `raw` block is passed as a whole, because tags in it are text.
            _ => raw_length(rest).or_else(|| tag_length(rest, "%}")),
        };
        // An unclosed tag is reported by the parser.
        let (text, after) = rest.split_at(length.unwrap_or(rest.len()));
        let tag = TemplateTag::read(text);
        match tag.as_ref().and_then(|tag| Some((replace(tag)?, tag.close.len() + 2))) {
            Some((replaced, end)) => {
                // The lines of the tag stay, so that errors name the right line.
                let lost = newlines(text).saturating_sub(newlines(&replaced));
                let (inner, end) = replaced.split_at(replaced.len() - end);
                written.extend([inner, &"\n".repeat(lost), end]);
            }
            None => written.push_str(text),
        }
        rest = after;
    }
    written.push_str(rest);
    written
}

/// A tag with a statement or an expression.
struct TemplateTag<'a> {
    /// `{%` or `{{`.
    opening: &'a str,
    /// The mark of whitespace control at its start.
    open: &'a str,
    /// The statement or the expression.
    body: &'a str,
    /// The mark of whitespace control at its end.
    close: &'a str,
}

impl<'a> TemplateTag<'a> {
    fn read(tag: &'a str) -> Option<Self> {
        let (opening, inner) = tag.split_at_checked(2)?;
        let inner = match opening {
            "{%" => inner.strip_suffix("%}")?,
            "{{" => inner.strip_suffix("}}")?,
            _ => return None,
        };
        let open = inner.len() - inner.trim_start_matches(['-', '+']).len();
        let close = inner.trim_end_matches(['-', '+']).len().max(open);
        Some(Self {
            opening,
            open: &inner[..open],
            body: &inner[open..close],
            close: &inner[close..],
        })
    }

    /// Returns whether the tag prints an expression.
    fn is_output(&self) -> bool {
        self.opening == "{{"
    }
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

/// Returns the range of the iterated expression in the body of a `for` tag. `tokens` begin with the
/// keyword `in`.
///
/// In Jinja2, the expression ends at a condition (`if`) or at `recursive`, outside of brackets and
/// strings.
fn iterated(body: &str, tokens: &[Token<'_>]) -> Option<Range<usize>> {
    let start = tokens.first()?.end();
    let end = tokens.iter().find(|it| it.is_word("if") || it.is_word("recursive"));
    let end = end.map_or(body.len(), |it| it.start);
    (!body[start..end].trim().is_empty()).then_some(start..end)
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
        assert_eq!(it, Rewritten { source: expected, marks_generation: true, heaviest: 1 });
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
            "{% raw +%}{% generation %}{% for a in b %}{{ a == b }}{%- endraw -%}",
            "{%- raw -%}{{ '\\U0001F600' }}{% endraw %}",
            "{{ {'a': {'b': 1}} }}{% if '%}' %}",
            "{% do for_in(1) %}{% if 'a' in b %}{",
            "{% unclosed '",
            "{%} {% raw %} {%}",
            "{",
        ] {
            let it = rewrite(text);
            assert_eq!((it.source.as_str(), it.marks_generation), (text, false));
            assert_eq!(without_generation(text), text);
        }
    }

    //= jinja2 3.1.6 lexer.py raw_begin
    #[test]
    fn raw_blocks_keep_their_first_line_end() {
        let of = |text: &str| rewrite(text).source;
        assert_eq!(of("a{% raw %}\nb{% endraw %}"), "a{% raw +%}\nb{% endraw %}");
        assert_eq!(of("{%-raw%}\nb{%- endraw -%}"), "{%-raw+%}\nb{%- endraw -%}");
    }

    #[test]
    fn iterated_expressions_are_checked() {
        let of = |text: &str| {
            rewrite(text).source.replace(ITERABLE, "i").replace(&format!("|{COUNTED}"), "")
        };
        assert_eq!(of("{%- for a in b -%}"), "{%- for a in ( b )|i -%}");
        assert_eq!(of("{% for a, b in c.items() %}"), "{% for a, b in ( c.items() )|i %}");
        assert_eq!(
            of("{% for a in [x if y else z] if a %}"),
            "{% for a in ( [x if y else z] )|i if a %}"
        );
        assert_eq!(of("{% for a in 'in if' if b %}"), "{% for a in ( 'in if' )|i if b %}");
        assert_eq!(of("{% for a in 1, 2 %}"), "{% for a in ( 1, 2 )|i %}");
        assert_eq!(of("{%\nfor a in\n b %}"), "{%\nfor a in (\n b )|i %}");
    }

    #[test]
    fn stored_values_are_counted() {
        let of = |text: &str| {
            let source = rewrite(text).source.replace(COUNTED_ATTRIBUTE, "n");
            source.replace(COUNTED, "c").replace(FACTOR, "r")
        };
        assert_eq!(of("{%- set a = b == 1 -%}"), "{%- set a = ( b == 1 )|c -%}");
        assert_eq!(of("{% set a, b = 1, 2 %}"), "{% set a, b = ( 1, 2 )|c %}");
        assert_eq!(of("{% set n.a = b * c %}"), "{% set n.a = ( b|r * c|r )|n %}");
        assert_eq!(of("{% set a %}{% set b | upper %}"), "{% set a %}{% set b | upper %}");
        assert_eq!(
            of("{% macro m(a, b=f(c, d=1)) -%}"),
            "{% macro m(a, b=f(c, d=1)) %}{% set a = a|c %}{% set b = b|c -%}"
        );
        assert_eq!(of("{% call(a) m(b) %}"), "{% call(a) m(b) %}{% set a = a|c %}");
        assert_eq!(of("{% call m(b) %}{% macro m() %}"), "{% call m(b) %}{% macro m() %}");
        assert_eq!(
            of("{%- with a = b, c = f(d=1) %}"),
            "{%- with a = b, c = f(d=1) %}{% set a = a|c %}{% set c = c|c %}"
        );
        assert_eq!(
            of("{% for a, b in c recursive %}").replace(ITERABLE, "i"),
            "{% for a, b in ( c )|i recursive %}{% set a = a|c %}{% set b = b|c %}"
        );
        assert_eq!(of("{{- a * b -}}"), "{{- a|r * b|r -}}");
        assert_eq!(of("{%- if a[1:] == b -%}"), "{%- if (a|c)[1:]|c == b|c -%}");
        assert_eq!(of("{% set a = b == c %}"), "{% set a = ( b|c == c|c )|c %}");
    }

    #[test]
    fn lines_stay() {
        for text in ["{%\ngeneration\n%}x{%- endgeneration\n-%}y", "{%\nfor\na in\n b\nif c\n-%}"] {
            assert_eq!(newlines(&rewrite(text).source), newlines(text), "{text}");
        }
    }
}
