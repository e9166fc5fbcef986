//! HTML of pages with charts: escaping, tables, the page frame and its style.
//!
//! A page is self-contained: style and curves are inline, and there is no script. Names, paths and
//! values of a job are untrusted, so every text that is not a literal of this crate is escaped with
//! [`Escaped`].

use deepburn_files::PartialFile;
use serde_json::Value;
use std::fmt::{self, Write};
use std::io;
use std::path::Path;

/// The style sheet, with a light and a dark theme.
const STYLE: &str = include_str!("style.css");

/// Untrusted text, escaped for HTML text and quoted attributes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Escaped<'a>(pub(super) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // Control characters are invalid in HTML. A visible character replaces them.
                control if control.is_control() && control != '\n' && control != '\t' => {
                    f.write_char(char::REPLACEMENT_CHARACTER)?;
                }
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}

/// Appends formatted text.
pub(crate) fn push(html: &mut String, text: fmt::Arguments<'_>) {
    // Writing to a string fails only if a `Display` fails, and none of these does.
    let _ = html.write_fmt(text);
}

/// Appends a heading and a table of names and values, or nothing if there are no values.
///
/// Both columns are escaped.
pub(crate) fn table(html: &mut String, heading: &str, rows: &[(String, String)]) {
    if rows.is_empty() {
        return;
    }
    push(html, format_args!("<section>\n<h2>{}</h2>\n<table>\n", Escaped(heading)));
    for (name, value) in rows {
        let (name, value) = (Escaped(name), Escaped(value));
        push(html, format_args!("<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>\n"));
    }
    html.push_str("</table>\n</section>\n");
}

/// The number of columns that fit on a phone. On phones, rows with more columns are shown as lists.
const NARROW: usize = 4;

/// Appends a heading and a table with column titles.
///
/// `head` contains the column titles. Each row has one cell per column, and the first cell is the
/// heading of the row.
pub(crate) fn grid(html: &mut String, heading: &str, head: &[String], rows: &[Vec<String>]) {
    push(html, format_args!("<section>\n<h2>{}</h2>\n", Escaped(heading)));
    // A wide table cannot be read on a phone; there the style sheet shows each row as a list.
    let class = if head.len() > NARROW { "grid lists" } else { "grid" };
    push(html, format_args!("<div class=\"wide\"><table class=\"{class}\">\n<thead><tr>"));
    for name in head {
        push(html, format_args!("<th scope=\"col\">{}</th>", Escaped(name)));
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        html.push_str("<tr>");
        for (column, (cell, name)) in row.iter().zip(head).enumerate() {
            let (cell, name) = (Escaped(cell), Escaped(name));
            match column {
                0 => push(html, format_args!("<th scope=\"row\">{cell}</th>")),
                _ => push(html, format_args!("<td data-name=\"{name}\">{cell}</td>")),
            }
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody>\n</table></div>\n</section>\n");
}

/// Appends a collapsible section with a value as indented JSON.
pub(crate) fn folded_json(html: &mut String, summary: &str, value: &Value) {
    push(
        html,
        format_args!(
            "<details>\n<summary>{}</summary>\n<pre>{}</pre>\n</details>\n",
            Escaped(summary),
            Escaped(&format!("{value:#}"))
        ),
    );
}

/// Formats a number with its digits in groups of three.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a share of 1 in per cent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

/// Writes a file atomically: it contains either the old or the new text.
///
/// The text is written to `PATH.partial`, which is then renamed. The file is not synced to disk, so
/// the page may be missing after a power failure.
///
/// # Errors
/// Returns the error of the operating system.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    // In the same folder, because a rename cannot cross file systems.
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    PartialFile::replace(path, partial, text)
}

/// Returns the complete page. Its content security policy prevents the browser from loading or
/// running anything.
pub(crate) fn page(title: &str, body: &str) -> String {
    let title = Escaped(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
}
