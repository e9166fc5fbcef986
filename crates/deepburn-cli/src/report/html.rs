//! The page around the curves: escaping, tables, the frame and its style.

use serde_json::Value;
use std::fmt::{self, Write};

const STYLE: &str = include_str!("style.css");

/// Text that came from outside, safe in HTML text and in quoted attributes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Escaped<'a>(pub(super) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // Control characters are no HTML; a reader should still see that they were there.
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
pub(super) fn push(html: &mut String, text: fmt::Arguments<'_>) {
    // Writing to a string fails only when a `Display` does, and the ones used here do not.
    let _ = html.write_fmt(text);
}

/// Appends a heading and a table of names and values; nothing when there are none.
pub(super) fn table(html: &mut String, heading: &str, rows: &[(String, String)]) {
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

/// Appends a value as indented JSON behind a summary to click on.
pub(super) fn folded_json(html: &mut String, summary: &str, value: &Value) {
    push(
        html,
        format_args!(
            "<details>\n<summary>{}</summary>\n<pre>{}</pre>\n</details>\n",
            Escaped(summary),
            Escaped(&format!("{value:#}"))
        ),
    );
}

/// The whole page. Its policy forbids the browser to load or run anything at all.
pub(super) fn page(title: &str, body: &str) -> String {
    let title = Escaped(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
}
